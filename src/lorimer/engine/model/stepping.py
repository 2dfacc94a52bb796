"""A decoder layer's forward for decoding, without the Python of its modules.

Decoding computes few tokens at a time, so the calls around a layer's products take as long as the products. Most
decoder layers are one of two arrangements of norms, attention and MLP; ``LayerStep`` computes both with as few calls
as possible, fewest where ``native/decode.py`` has compiled functions. A layer is stepped this way only where that
gave the layer's own result on a probe, rows at near and far positions among it; any other keeps its forward.

Legend: N rows, one token of a sequence each; H query heads, K key/value heads, D head size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.model.linear import FrozenLinear, JoinedMatrix, multiply_with_adapters
from lorimer.engine.model.mlp import is_silu
from lorimer.engine.model.norms import FrozenRMSNorm
from lorimer.engine.native.decode import Decoding, LayerAttention
from lorimer.engine.native.library import LANES
from lorimer.engine.sampling.kv_cache import DecodeAttention
from lorimer.engine.training.batch import AdapterSlice, PassSlot

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

Norm = Callable[[Tensor], Tensor]


class LayerStep:
    """Replaces the ``forward`` of a decoder layer."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any], slot: PassSlot) -> None:
        self._layer, self._forward, self._slot = layer, forward, slot
        self._candidates: list[_Parts] = []
        """Ways to step the layer, which the next decoding pass probes; the first that is right is taken."""
        self._parts: _Parts | None = None

    @property
    def is_used(self) -> bool:
        return self._parts is not None

    @property
    def is_native(self) -> bool:
        """Whether it uses compiled functions, where the layer has what they compute."""
        return self._parts is not None and self._parts.is_native

    @property
    def has_native_attention(self) -> bool:
        return self._parts is not None and self._parts.has_native_attention

    def probe(self, native: Decoding | None = None) -> None:
        """Use the next decoding pass, which must be a good probe, to decide whether the layer can be stepped."""
        found = [_Parts.of(self._layer, functions) for functions in ((native, None) if native else (None,))]
        self._parts, self._candidates = None, [parts for parts in found if parts is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = self._slot.current.cache
        if not isinstance(cache, DecodeAttention) or len(args) != 1:
            return self._forward(*args, **kwargs)
        if self._candidates:
            return self._compare(cache, args[0], kwargs)
        if self._parts is None:
            return self._forward(*args, **kwargs)
        return self._parts.step(args[0][0], kwargs["position_embeddings"], cache, self._slot.current.slices).unsqueeze(
            0
        )

    def _compare(self, cache: DecodeAttention, x: Tensor, kwargs: dict[str, Any]) -> Any:
        candidates, self._candidates = self._candidates, []
        theirs = self._forward(x, **kwargs)
        for parts in candidates:
            try:
                ours = parts.step(x[0], kwargs["position_embeddings"], cache, []).unsqueeze(0)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                continue
            if isinstance(theirs, Tensor) and theirs.shape == ours.shape:
                # Compare what the layer adds: next to the residual a difference would be invisible.
                rounding = 4 * torch.finfo(x.dtype).eps * theirs.abs().max()
                allowed = _TOLERANCE[x.dtype] * (theirs - x).abs().max() + rounding
                if bool((ours - theirs).abs().max() <= allowed):
                    self._parts = parts
                    break
        return theirs


class _Product:
    """Layers that get the same input; their outputs are concatenated."""

    def __init__(self, *layers: FrozenLinear) -> None:
        self._matrix = layers[0].matrix if len(layers) == 1 else JoinedMatrix([layer.matrix for layer in layers])
        self._targets: list[LoraTarget] = []
        start = 0
        for layer in layers:
            self._targets += [replace(t, row_offset=t.row_offset + start) for t in layer.targets]
            start += layer.out_features

    def __call__(self, x: Tensor, slices: list[AdapterSlice]) -> Tensor:
        return multiply_with_adapters(x, self._matrix, self._targets, slices)[0]

    @classmethod
    def of(cls, parent: Any, fused: str, *names: str) -> "_Product":
        """Return the layer called ``fused`` if there is one, else those called ``names``."""
        layers = [getattr(parent, name) for name in ([fused] if hasattr(parent, fused) else names)]
        if not all(isinstance(layer, FrozenLinear) for layer in layers):
            raise AttributeError(f"{fused} is not a frozen linear layer")
        return cls(*layers)


class _Parts:
    """The submodules of a layer, looked up once."""

    def __init__(self, layer: Any, native: Decoding | None) -> None:
        """Raise ``AttributeError`` for a layer that has other submodules."""
        attention, mlp = layer.self_attn, layer.mlp
        self._native = native
        self._number, self._shape = attention.lorimer_layer, attention.lorimer_shape
        if self._shape.sinks is not None and attention.lorimer_slot.trains_base:
            raise AttributeError("the sinks of a layer that is trained change")
        self._qkv = _Product.of(attention, "qkv_proj", "q_proj", "k_proj", "v_proj")
        self._out = _Product.of(attention, "o_proj")
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.o_proj.in_features // self._head_dim
        self._num_kv = self._num_heads // attention.num_key_value_groups
        self._q_norm, self._k_norm = (_norm(attention, name) for name in ("q_norm", "k_norm"))
        self._norms_heads = self._q_norm is None or len(attention.q_norm.weight) == self._head_dim
        self._native_attention = None if native is None else self._find_native_attention(attention)
        self._before_attention = _norm(layer, "input_layernorm", native)
        if hasattr(layer, "post_feedforward_layernorm"):
            self._after_attention = _norm(layer, "post_attention_layernorm", native)
            name = "pre_feedforward_layernorm"
            self._after_mlp = _norm(layer, "post_feedforward_layernorm", native)
        else:
            self._after_attention = self._after_mlp = None
            name = "post_attention_layernorm"
        self._before_mlp = _norm(layer, name)
        self._norm_of_sum = None if native is None else _native_norm(layer, name)
        self._mlp = _gated(mlp, native)

    @classmethod
    def of(cls, layer: nn.Module, native: Decoding | None) -> "_Parts | None":
        try:
            return cls(layer, native)
        except AttributeError:
            return None

    @property
    def is_native(self) -> bool:
        return self._native is not None

    @property
    def has_native_attention(self) -> bool:
        return self._native_attention is not None

    def _find_native_attention(self, attention: Any) -> LayerAttention | None:
        norms = [_native_norm(attention, name) for name in ("q_norm", "k_norm")]
        if (self._q_norm is None) != (norms[0] is None) or (self._k_norm is None) != (norms[1] is None):
            return None
        dtype = attention.o_proj.weight.dtype
        if not self._norms_heads or any(norm is not None and norm.weight.dtype != dtype for norm in norms):
            return None
        found = LayerAttention(self._num_heads, self._num_kv, self._head_dim, self._shape, *norms)
        return found if found.is_possible else None

    def step(
        self, x_N: Tensor, rotary: tuple[Tensor, Tensor], cache: DecodeAttention, slices: list[AdapterSlice]
    ) -> Tensor:
        y = x_N if self._before_attention is None else self._before_attention(x_N)
        y = self._attend(y, rotary, cache, slices)
        if self._after_attention is not None:
            y = self._after_attention(y)
        if self._native is not None and self._norm_of_sum is not None:
            norm = self._norm_of_sum
            x_N, y = y, self._native.normalise(norm.weight, norm.eps, y, x_N)
        else:
            x_N = y.add_(x_N)
            y = x_N if self._before_mlp is None else self._before_mlp(x_N)
        y = self._mlp(y, slices)
        if self._after_mlp is not None:
            y = self._after_mlp(y)
        return y.add_(x_N)

    def _attend(
        self, x_N: Tensor, rotary: tuple[Tensor, Tensor], cache: DecodeAttention, slices: list[AdapterSlice]
    ) -> Tensor:
        qkv = self._qkv(x_N, slices)
        if self._native is not None and self._native_attention is not None:
            cos, sin = (part[0] for part in rotary)
            return self._out(
                cache.attend_native(self._native, self._number, self._native_attention, qkv, cos, sin), slices
            )
        heads = qkv.view(len(x_N), -1, self._head_dim)
        num_turned = self._num_heads + self._num_kv
        turned, v_NKD = heads[:, :num_turned], heads[:, num_turned:]
        if self._q_norm is not None and self._k_norm is not None:
            q, k = turned[:, : self._num_heads], turned[:, self._num_heads :]
            if self._norms_heads:
                turned = torch.cat([self._q_norm(q), self._k_norm(k)], 1)
            else:
                turned = torch.cat([self._q_norm(q.flatten(1)), self._k_norm(k.flatten(1))], 1).view(turned.shape)
        cos, sin = cache.rotation(rotary)
        swapped = torch.roll(turned, self._head_dim // 2, -1)
        if turned.dtype == torch.float32:
            turned = (turned * cos).addcmul_(swapped, sin)
        else:  # rounded where the model's own function rounds, as in a training pass
            turned = (turned * cos).add_(swapped.mul_(sin))
        q_NHD, k_NKD = turned[:, : self._num_heads], turned[:, self._num_heads :]
        out_NHD = cache.attend_rows(self._number, q_NHD, k_NKD, v_NKD, self._shape)
        return self._out(out_NHD.reshape(len(x_N), -1), slices)


def _norm(parent: Any, name: str, native: Decoding | None = None) -> Norm | None:
    """Return a norm without the overhead of a module call; ``None`` if there is no such norm."""
    norm = getattr(parent, name, None)
    if norm is None:
        return None
    if native is not None and (found := _native_norm(parent, name)) is not None:
        return lambda x: native.normalise(found.weight, found.eps, x)
    forward: Norm = norm.forward
    return forward


def _native_norm(parent: Any, name: str) -> FrozenRMSNorm | None:
    """Return the norm if compiled functions compute it."""
    norm = getattr(parent, name, None)
    is_usual = isinstance(norm, FrozenRMSNorm) and not norm.offset and len(norm.weight) % LANES == 0
    return norm if is_usual else None


def _gated(mlp: Any, native: Decoding | None) -> Callable[[Tensor, list[AdapterSlice]], Tensor]:
    """Return a function for ``down(act(gate(x)) * up(x))``, or the module itself if it has other submodules."""
    try:
        gate_up, down = _Product.of(mlp, "gate_up_proj", "gate_proj", "up_proj"), _Product.of(mlp, "down_proj")
        inner = mlp.down_proj.in_features
        act = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    except AttributeError:
        return lambda x, _: mlp(x.unsqueeze(0))[0]

    def run(x: Tensor, slices: list[AdapterSlice]) -> Tensor:
        both = gate_up(x, slices)
        return down(act(both[:, :inner]).mul_(both[:, inner:]), slices)

    def run_native(x: Tensor, slices: list[AdapterSlice]) -> Tensor:
        assert native is not None
        return down(native.gate(gate_up(x, slices)), slices)

    return run_native if native is not None and is_silu(act) and inner % LANES == 0 else run
