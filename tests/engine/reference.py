"""Independent references the engine is compared with: plain transformers with PEFT, one sequence at a time.

Expert layers, for which PEFT has no shared factors, are merged into the weights by hand. Nothing of the engine's own
arithmetic is used here, only its names of targets.
"""

import copy
import os
import warnings

import numpy as np
import peft
import torch
from torch.func import functional_call

from lorimer.engine.adapters.adapters import create_adapter
from lorimer.engine.adapters.lora import ALPHA, LoraTarget
from lorimer.engine.messages import Datum, ForwardBackward, LoraConfig, OptimizerConfig
from lorimer.engine.model.base_model import BaseModel, register_implementations
from lorimer.engine.model.device import Device
from lorimer.engine.validation import check_operation
from lorimer.models.debug import tiny_model

if os.environ.get("LORIMER_TEST_DEVICE", "cpu") == "pretend":
    from tests.engine.pretend_device import DEVICE
else:
    DEVICE = Device(torch.device("cpu"), torch.float32, 1 << 30)
DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2")
MOE = ("gpt_oss", "qwen3_moe", "mixtral")
MAX_CONTEXT = 512


def open_pair(architecture, **overrides):
    """The engine's model and an untouched copy of the same weights."""
    register_implementations()
    plain = tiny_model(architecture, **overrides)
    plain.config._attn_implementation = "eager"
    return BaseModel(copy.deepcopy(plain), DEVICE, name=architecture), plain.requires_grad_(False).eval()


def make_adapter(model, rank=4, seed=0, optimizer="adamw", **flags):
    """An adapter whose B is not zero, so that every gradient is alive; in DoRA its magnitudes are not the norms."""
    config = LoraConfig(rank=rank, seed=seed, **flags)
    adapter = create_adapter(model.targets, config, OptimizerConfig(type=optimizer), model.device.handle, model.rows)
    generator = torch.Generator().manual_seed(seed + 1)
    for _, b, *magnitudes in adapter.weights.values():
        b.copy_(torch.empty(b.shape).normal_(0, 0.05, generator=generator))
        for one in magnitudes:
            one.mul_(torch.empty(one.shape).uniform_(0.5, 1.5, generator=generator).to(one.device))
    adapter.weights_changed()
    return adapter


def on_device(tensor):
    return tensor.to(DEVICE.handle)


def make_datum(loss_fn, length, seed, vocab_size, num_targets=0):
    rng = np.random.default_rng(seed)
    shape = (length, num_targets) if num_targets else (length,)
    inputs = {"target_tokens": rng.integers(0, vocab_size, shape)}
    if loss_fn == "cross_entropy":
        # Fractions, negative weights and zeros: all are legal.
        inputs["weights"] = (rng.normal(size=shape) * (rng.random(shape) < 0.7)).astype(np.float32)
    elif loss_fn != "custom":
        inputs["logprobs"] = (-5 + 0.3 * rng.normal(size=shape)).astype(np.float32)
        inputs["advantages"] = (rng.normal(size=shape) * (rng.random(shape) < 0.7)).astype(np.float32)
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = (rng.random(shape) < 0.8).astype(np.float32)
    return Datum(tokens=rng.integers(0, vocab_size, length), loss_fn_inputs=inputs)


def checked(data, loss_fn, vocab_size, forward_only=False, config=None, custom=None):
    message = ForwardBackward(
        request_id="r", model_id="m", data=data, loss_fn=loss_fn, forward_only=forward_only, loss_fn_config=config or {}
    )
    return check_operation(message, vocab_size=vocab_size, max_context=MAX_CONTEXT, custom_losses=custom or {})


def literal_loss(loss_fn, logprobs, datum, config=None):
    """The loss of one datum, written as in the documentation."""
    config = config or {}
    given = {name: torch.from_numpy(np.asarray(value)) for name, value in datum.loss_fn_inputs.items()}
    if loss_fn == "cross_entropy":
        return -(given["weights"] * logprobs).sum()
    q, advantages = given["logprobs"], given["advantages"]
    ratio = torch.exp(logprobs - q)
    low, high = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}.get(loss_fn, (0, 0))
    low, high = config.get("clip_low_threshold", low), config.get("clip_high_threshold", high)
    if loss_fn == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss_fn == "ppo":
        return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
    if loss_fn == "cispo":
        return -(ratio.clamp(low, high).detach() * logprobs * advantages).sum()
    if loss_fn == "dro":
        return -(logprobs * advantages - 0.5 * config.get("beta", 0.05) * (logprobs - q) ** 2).sum()
    assert loss_fn == "gspo"
    mask = given["sequence_ratio_mask"]
    s = torch.exp(((logprobs.detach() - q) * mask).sum() / mask.sum())
    s_t = s * torch.exp(logprobs - logprobs.detach())
    return -torch.minimum(s_t * advantages, s_t.clamp(low, high) * advantages).sum()


class PeftReference:
    """PEFT's LoRA on the untouched model, with an adapter's weights; fused projections get the parts' block form."""

    def __init__(self, plain, model, adapter):
        self._adapter, self._targets = adapter, [t for t in model.targets if t.name in adapter.weights]
        rank = adapter.rank
        parts = {}
        for target in self._targets:
            parts.setdefault(target.module, []).append(target)
        self._parts = parts
        is_rslora = adapter.config.use_rslora is True
        power = 0.5 if is_rslora else 1  # the stacked pair has the rank of all parts, and their scale
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=ALPHA,
            use_rslora=is_rslora,
            use_dora=adapter.config.use_dora is True,
            target_modules=list(parts),
            rank_pattern={name: rank * len(group) for name, group in parts.items() if len(group) > 1},
            alpha_pattern={name: ALPHA * len(group) ** power for name, group in parts.items() if len(group) > 1},
        )
        with warnings.catch_warnings():
            # PEFT warns of tied embeddings; the adapter of the head is meant to leave the embedding alone.
            warnings.simplefilter("ignore", UserWarning)
            self.model = peft.get_peft_model(copy.deepcopy(plain), config).eval()
        for name, group in parts.items():
            layer = self.model.get_submodule(f"base_model.model.{name}")
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            with torch.no_grad():
                b.zero_()
                for i, target in enumerate(group):
                    weight_a, weight_b, *magnitudes = (factor.cpu() for factor in adapter.weights[target.name])
                    a[i * rank : (i + 1) * rank] = weight_a
                    b[target.rows, i * rank : (i + 1) * rank] = weight_b
                    for one in magnitudes:
                        layer.lora_magnitude_vector["default"].weight[target.rows] = one

    def logits(self, tokens):
        return self.model(input_ids=tokens[None]).logits[0]

    def gradients(self):
        rank, found = self._adapter.rank, {}
        for name, group in self._parts.items():
            layer = self.model.get_submodule(f"base_model.model.{name}")
            a, b = layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad
            for i, target in enumerate(group):
                rows = slice(i * rank, (i + 1) * rank)
                found[target.name] = (a[rows], b[target.rows, rows])
                if layer.lora_magnitude_vector:
                    magnitudes = layer.lora_magnitude_vector["default"].weight
                    found[target.name] += (magnitudes.grad[target.rows],)
        return found


class MergedReference:
    """The adapter merged into the weights of the untouched model, differentiable in its factors."""

    def __init__(self, plain, model, adapter):
        self.model, self._adapter = plain, adapter
        self._targets = [t for t in model.targets if t.name in adapter.weights]
        self._leaves = {
            name: tuple(f.detach().cpu().clone().requires_grad_() for f in pair)
            for name, pair in adapter.weights.items()
        }

    def logits(self, tokens):
        return functional_call(self.model, self.merged(), (tokens[None],), tie_weights=False).logits[0]

    def merged(self):
        """The weights that the adapter changes, by name."""
        weights = {}
        for target in self._targets:
            name = _weight_name(target)
            if name not in weights:
                weights[name] = self.model.get_parameter(name).detach()
            a, b = self._leaves[target.name]
            delta = self._adapter.scale * (b @ a)
            if target.num_experts and self.model.get_submodule(target.module).is_transposed:
                update = _placed(weights[name].transpose(1, 2), target, delta).transpose(1, 2)
            else:
                update = _placed(weights[name], target, delta)
            weights[name] = weights[name] + update
        return weights

    def gradients(self):
        return {name: tuple(f.grad for f in pair) for name, pair in self._leaves.items()}


def _weight_name(target: LoraTarget) -> str:
    if not target.num_experts:
        return f"{target.module}.weight"
    part = target.name.rpartition(":")[2]
    return f"{target.module}.{'down_proj' if part == 'down' else 'gate_up_proj'}"


def _placed(weight, target, delta):
    """``delta`` at the target's rows of a tensor shaped like ``weight``."""
    selector = torch.zeros(weight.shape[-2], delta.shape[-2])
    selector[torch.arange(weight.shape[-2])[target.rows], torch.arange(delta.shape[-2])] = 1
    return selector @ delta


def reference_of(plain, model, adapter, architecture):
    return (PeftReference if architecture in DENSE else MergedReference)(plain, model, adapter)


def run_reference(reference, data, loss_fn, config=None):
    """Loss sum, log probabilities and gradients, one sequence at a time."""
    total, logprobs = 0.0, []
    for datum in data:
        all_logprobs = reference.logits(torch.from_numpy(datum.tokens)).log_softmax(-1)
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
        chosen = all_logprobs.gather(1, targets.view(len(datum.tokens), -1)).view(targets.shape)
        loss = literal_loss(loss_fn, chosen, datum, config)
        loss.backward()
        total += loss.item()
        logprobs.append(chosen.detach().numpy())
    return total, logprobs, reference.gradients()


def relative_error(a, b):
    a, b = a.cpu(), b.cpu()
    scale = max(b.abs().max().item(), 1e-6)
    return (a - b).abs().max().item() / scale
