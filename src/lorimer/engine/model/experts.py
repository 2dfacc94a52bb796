"""Mixture-of-experts layers with adapters, for every model that uses transformers' experts interface.

``packed_experts`` replaces its forward function: token copies are sorted by expert and adapter, so that frozen
products run once per expert and low-rank products once per (expert, adapter). The factor that touches the hidden
size is shared by the experts of a layer, the other is each expert's own (``lora.py``).

Legend: T tokens, S = T * experts per token, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.model.device import download
from lorimer.engine.model.masters import add_product, add_sum
from lorimer.engine.model.quantization import QuantizedWeight
from lorimer.engine.model.quantized_loading import quantized_weights
from lorimer.engine.training.batch import AdapterSlice


@dataclass(frozen=True)
class _Run:
    """Rows ``start:stop`` go to one expert and belong to one adapter, or to none."""

    start: int
    stop: int
    expert: int
    part: AdapterSlice | None


def packed_experts(module: Any, hidden_TH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the ``forward`` of an experts module for transformers."""
    current = module.lorimer_slot.current
    top_k = top_k_index.shape[-1]
    order_S, runs = _sort(top_k_index, module.num_experts, current.slices)
    if current.count_experts:
        copies, weights = top_k_index.flatten(), current.num_sequences_T
        counted = torch.ones_like(copies) if weights is None else weights.repeat_interleave(top_k)
        # Not bincount, for which the host waits.
        counts = counted.new_zeros(module.num_experts).scatter_add_(0, copies, counted)
        current.expert_counts[id(module)] = counts
    x = hidden_TH[order_S // top_k]
    if module.has_gate:
        x = module._apply_gate(_linear(x, module, "gate_up_proj", ("gate", "up"), runs))
    else:
        x = module.act_fn(_linear(x, module, "up_proj", ("up",), runs))
    x = _linear(x, module, "down_proj", ("down",), runs)
    if module.has_post_expert_norm:
        x = module.post_expert_norm(x)
    weighted = x * top_k_weights.flatten()[order_S].unsqueeze(-1)
    back = torch.empty_like(order_S)
    back[order_S] = torch.arange(len(order_S), device=order_S.device)
    return weighted[back].view(*top_k_index.shape, -1).sum(1).to(hidden_TH.dtype)


def _sort(top_k_index: Tensor, num_experts: int, slices: list[AdapterSlice]) -> tuple[Tensor, list[_Run]]:
    """Sort token copies by (expert, adapter); return the order and its runs of equal keys."""
    owner = torch.full(top_k_index.shape[:1], len(slices), device=top_k_index.device)
    for i, part in enumerate(slices):
        owner[part.start : part.stop] = i
    key_S, order_S = torch.sort((top_k_index * (len(slices) + 1) + owner[:, None]).flatten(), stable=True)
    keys = torch.arange(num_experts * (len(slices) + 1), device=key_S.device)
    # The host plans the products of a layer by what its router has chosen, so it waits for it, once.
    (stops,) = download([torch.searchsorted(key_S, keys, right=True)])
    runs, start = [], 0
    for key, stop in enumerate(stops.tolist()):
        if stop > start:
            expert, i = divmod(key, len(slices) + 1)
            runs.append(_Run(start, stop, expert, slices[i] if i < len(slices) else None))
            start = stop
    return order_S, runs


def _linear(x: Tensor, module: Any, name: str, parts: tuple[str, ...], runs: list[_Run]) -> Tensor:
    targets = [module.lorimer_targets[part] for part in parts]
    return _ExpertLinear.apply(x, module.lorimer_anchor, module, name, targets, runs)


def _weight(module: Any, name: str) -> Tensor | QuantizedWeight:
    """Return the weight that the module has now, ``(E, out, in)``, however the model stores it."""
    if (quantized := quantized_weights(module).get(name)) is not None:
        return quantized
    weight: Tensor = getattr(module, name).detach()
    return weight.transpose(1, 2) if module.is_transposed else weight


def _matrices(weight: Tensor | QuantizedWeight, runs: list[_Run]) -> Iterator[tuple[_Run, Tensor]]:
    """Return each run with the weight of its expert; a quantised one is converted once for all runs of an expert."""
    matrix, expert = None, -1
    for run in runs:
        if matrix is None or run.expert != expert:
            matrix, expert = weight[run.expert], run.expert
        yield run, matrix


def _factor(tensor: Tensor, expert: int) -> Tensor:
    """Return the expert's own factor, or the one that all experts share."""
    return tensor[expert] if tensor.dim() == 3 else tensor


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        module: Any,
        name: str,
        targets: list[LoraTarget],
        runs: list[_Run],
    ) -> Tensor:
        weight, bias = _weight(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
        y = x.new_empty(len(x), weight.shape[1])
        ctx.inner = []
        for run, matrix in _matrices(weight, runs):
            rows = x[run.start : run.stop]
            out = torch.mm(rows, matrix.t(), out=y[run.start : run.stop])
            if bias is not None:
                out += bias[run.expert]
            for target in targets:
                if run.part is not None and target.name in run.part.weights:
                    a, b = (_factor(f, run.expert).to(x.dtype) for f in run.part.weights[target.name])
                    inner = rows @ a.t()
                    # A stepped slice cannot be the target of a matrix product, so the product is added.
                    out[:, target.rows] += (inner @ b.t()).mul_(run.part.scale)
                    ctx.inner.append((run, target, inner))
        ctx.save_for_backward(x)
        # Not the weight, which sharding frees and gathers again for the backward pass.
        ctx.module, ctx.name, ctx.runs = module, name, runs
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        d_y, d_x, weight = grads[0], torch.empty_like(x), _weight(ctx.module, ctx.name)
        for run, matrix in _matrices(weight, ctx.runs):
            torch.mm(d_y[run.start : run.stop], matrix, out=d_x[run.start : run.stop])
        _add_gradients(ctx.module, ctx.name, x, d_y, ctx.runs)
        for run, target, inner in ctx.inner:
            a, b = (_factor(f, run.expert) for f in run.part.weights[target.name])
            d_rows = d_y[run.start : run.stop, target.rows]
            d_inner = (d_rows @ b.to(d_y.dtype)).mul_(run.part.scale)
            d_x[run.start : run.stop].addmm_(d_inner, a.to(d_y.dtype))
            if run.part.grads is not None:
                d_a, d_b = (_factor(g, run.expert) for g in run.part.grads[target.name])
                d_a.addmm_(d_inner.float().t(), x[run.start : run.stop].float())
                d_b.addmm_(d_rows.float().t(), inner.float(), alpha=run.part.scale)
        return d_x, None, None, None, None, None


def _add_gradients(module: Any, name: str, x: Tensor, d_y: Tensor, runs: list[_Run]) -> None:
    """Add the gradients of the experts' own weights and biases to their buffers; only a full run has these."""
    d_weight, d_bias = getattr(module, name).grad, getattr(module, f"{name}_bias").grad if module.has_bias else None
    for run in runs:
        rows = d_y[run.start : run.stop]
        if d_weight is not None and module.is_transposed:
            add_product(d_weight[run.expert], x[run.start : run.stop], rows)
        elif d_weight is not None:
            add_product(d_weight[run.expert], rows, x[run.start : run.stop])
        if d_bias is not None:
            add_sum(d_bias[run.expert], rows)


def balance_metrics(counts: list[Tensor]) -> dict[str, float]:
    """Return how evenly a pass used the experts of its layers, under the names Tinker documents.

    With u a layer's tokens per expert over their mean: the share of experts with tokens, the share above the mean,
    the largest u - 1 (mean and maximum over layers) and the smallest u - 1.
    """
    if not counts:
        return {}
    share_LE = torch.stack(counts).double()
    share_LE = share_LE / share_LE.mean(1, keepdim=True).clamp_min(1e-9)
    highest, lowest = share_LE.amax(1) - 1, share_LE.amin(1) - 1
    return {
        "e_frac_with_tokens:mean": (share_LE > 0).double().mean().item(),
        "e_frac_oversubscribed:mean": (share_LE > 1).double().mean().item(),
        "e_max_violation:mean": highest.mean().item(),
        "e_max_violation:max": highest.max().item(),
        "e_min_violation:mean": lowest.mean().item(),
    }
