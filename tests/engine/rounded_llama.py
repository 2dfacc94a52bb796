"""A decoder of the Llama family in plain torch that rounds to bfloat16 where the engine does, and nowhere else.

It computes in float32 on numbers that bfloat16 holds. `Round` stands for each result that is stored in bfloat16, in the
forward pass and, for the gradient that comes back to it, in the backward pass. Weights are float32, rounded when used;
their gradients are not rounded. One sequence at a time; nothing of the engine is used.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].bfloat16().float()


def rounded(x: Tensor) -> Tensor:
    return Round.apply(x)


class RoundedLlama:
    def __init__(self, config, masters: dict[str, Tensor]) -> None:
        """``masters`` are float32 tensors that require a gradient, by the names of transformers."""
        self._config, self._masters = config, masters

    def _weight(self, name: str) -> Tensor:
        """The weight as passes see it; its gradient reaches the master as it is."""
        master = self._masters[name]
        return master + (master.bfloat16().float() - master).detach()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self._weight(f"{name}.bias") if f"{name}.bias" in self._masters else None
        return rounded(F.linear(rounded(x), self._weight(f"{name}.weight"), bias))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = rounded(x)
        inverse = (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).rsqrt()
        return rounded(x * inverse * self._weight(f"{name}.weight"))

    def _turn(self, x_HTD: Tensor) -> Tensor:
        """Rotary positions."""
        half = x_HTD.shape[-1] // 2
        frequencies = self._config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(x_HTD.shape[1]).float(), frequencies).repeat(1, 2)
        cos, sin = angles.cos().bfloat16().float(), angles.sin().bfloat16().float()
        x = rounded(x_HTD)
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return rounded(rounded(rounded(x) * cos) + rounded(rounded(turned) * sin))

    def _attend(self, x: Tensor, name: str) -> Tensor:
        config = self._config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Gradients of the three are added in bfloat16, one after the other.
        x = rounded(x)
        q, inner = self._linear(x, f"{name}.q_proj"), rounded(x)
        k, v = self._linear(inner, f"{name}.k_proj"), self._linear(inner, f"{name}.v_proj")
        q, k, v = (one.view(len(x), -1, size).transpose(0, 1) for one in (q, k, v))
        q, k, v = self._turn(q), rounded(self._turn(k)), rounded(v)
        k, v = (one.repeat_interleave(len(q) // len(k), 0) for one in (k, v))
        scores = rounded(rounded(rounded(q) * size**-0.5) @ k.transpose(1, 2))
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        out = rounded(rounded(scores.softmax(-1)) @ v)
        return self._linear(out.transpose(0, 1).reshape(len(x), -1), f"{name}.o_proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        x = rounded(x)
        gate, up = self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj")
        return self._linear(rounded(rounded(F.silu(rounded(gate))) * rounded(up)), f"{name}.down_proj")

    def logits(self, tokens: Tensor) -> Tensor:
        x = rounded(F.embedding(tokens, self._weight("model.embed_tokens.weight")))
        for number in range(self._config.num_hidden_layers):
            layer = f"model.layers.{number}"
            x = rounded(x + self._attend(self._norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn"))
            x = rounded(x + self._mlp(self._norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"))
        head = "model.embed_tokens" if "lm_head.weight" not in self._masters else "lm_head"
        return self._linear(self._norm(x, "model.norm"), head)
