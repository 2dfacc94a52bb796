"""Optimisers: the update that `optim_step` applies to an adapter.

`apply` checks the parameters of the step, clips, guards against numbers that are not finite, and lets the
run's optimiser update weights and moments in place. A new optimiser is one entry in `OPTIMIZERS`: its fields
with their defaults, and its update. Schedules belong to the client, which sends every field with every step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lorimer.engine.adapters.adapters import Adapter, Pairs, are_finite, flatten
from lorimer.engine.messages import OptimizerConfig
from lorimer.errors import InvalidInput, Unsupported

_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
"""Limits of float32, the dtype of weights, moments and the parameters of a step."""
_LARGEST_NORM = math.sqrt(_LARGEST) / 2
"""Tensors of a smaller norm have finite squares, hence finite second moments. Adding less to what is finite in float32
leaves it finite, for the largest numbers are much further apart."""


@dataclass(frozen=True)
class Optimizer:
    """One kind of update."""

    defaults: Mapping[str, float]
    """Every field of a step; ``learning_rate`` and ``grad_clip_norm`` are among them."""
    moments: tuple[str, ...]
    """Names of the tensors it keeps for each weight; they begin at zero."""
    update: Callable[[list[Tensor], list[Tensor], list[list[Tensor]], int, Mapping[str, float]], None]
    """Changes weights and moments in place, given weights, gradients, moments, steps before, fields."""
    is_bounded: Callable[[float, list[list[Tensor]], int, Mapping[str, float]], bool]
    """Whether weights and moments surely stay finite, given the gradient's norm, moments, steps before, fields.

    Only then the update needs no copy of the moments to go back to, which saves two thirds of a step's time.
    """


def apply(adapter: Adapter, params: Mapping[str, float]) -> dict[str, float]:
    """Take one step with the accumulated gradient and clear it; without one, the gradient is zero.

    Fields not in ``params`` have their defaults. The metrics are ``grad_norm`` (before clipping), ``update_norm``,
    ``param_norm``, ``step`` (the counter afterwards) and ``skipped``. A gradient or a result that is not finite
    makes ``skipped`` 1: weights, moments and counter stay as they were and the gradient is cleared. A norm that
    is not finite is left out.
    """
    optimizer = _find(adapter.optimizer)
    fields = _check_params(adapter.optimizer.type, optimizer.defaults, params)
    weights = flatten(adapter.weights)
    gradient = adapter.grads if adapter.grads is not None else _zeros(adapter.weights)
    grads = flatten(gradient)
    with torch.no_grad():
        grad_norm, update_norm = _norm(grads), 0.0
        is_applied = grad_norm < _LARGEST_NORM
        if is_applied:
            _clip(grads, grad_norm, fields["grad_clip_norm"])
            is_applied, update_norm = _update(adapter, optimizer, grads, grad_norm, fields)
        adapter.clear_gradient()
        norms = {"grad_norm": grad_norm, "update_norm": update_norm, "param_norm": _norm(weights)}
    metrics = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    return metrics | {"skipped": float(not is_applied), "optimizer_step": float(adapter.step)}


def check_optimizer(config: OptimizerConfig) -> None:
    """Refuse an optimiser that is not in ``OPTIMIZERS``."""
    _find(config)


def _find(config: OptimizerConfig) -> Optimizer:
    if config.type == "dimuon":
        raise Unsupported("optimizer 'dimuon' is not supported: its update formula is not published; use 'adamw'")
    if config.type not in OPTIMIZERS:
        raise Unsupported(f"optimizer {config.type!r} is not known; known are {', '.join(map(repr, OPTIMIZERS))}")
    if config.version is not None:
        raise Unsupported(f"optimizer {config.type!r} has no versions, but version {config.version!r} was asked for")
    return OPTIMIZERS[config.type]


def _check_params(name: str, defaults: Mapping[str, float], params: Mapping[str, float]) -> dict[str, float]:
    if unknown := sorted(params.keys() - defaults.keys()):
        raise InvalidInput(f"{name} has no parameter {', '.join(map(repr, unknown))}; it has {', '.join(defaults)}")
    fields = {**defaults, **params}
    for key, value in fields.items():
        accepted, text = _RANGES[key]
        if not (isinstance(value, int | float) and math.isfinite(value) and accepted(value)):
            raise InvalidInput(f"{name} parameter {key} is {value!r}, but must be {text}")
    return fields


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))


def _zeros(pairs: Pairs) -> Pairs:
    return {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in pairs.items()}


def _clip(grads: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale ``grads`` in place as `torch.nn.utils.clip_grad_norm_` does; zero means no limit."""
    if max_norm > 0 and (factor := max_norm / (norm + 1e-6)) < 1:
        torch._foreach_mul_(grads, factor)


def _update(
    adapter: Adapter, optimizer: Optimizer, grads: list[Tensor], grad_norm: float, fields: Mapping[str, float]
) -> tuple[bool, float]:
    """Update the adapter unless the result is not finite; return whether it was finite, and the norm of the change."""
    pairs = adapter.moments or {name: _zeros(adapter.weights) for name in optimizer.moments}
    weights, moments = flatten(adapter.weights), [flatten(pairs[name]) for name in optimizer.moments]
    old_weights = [weight.clone() for weight in weights]
    if optimizer.is_bounded(grad_norm, moments, adapter.step, fields):
        optimizer.update(weights, grads, moments, adapter.step, fields)
    else:
        old_moments = [[tensor.clone() for tensor in tensors] for tensors in moments]
        optimizer.update(weights, grads, moments, adapter.step, fields)
        if not (_norm(weights) < _LARGEST_NORM and all(map(are_finite, moments))):
            for tensors, old in zip([weights, *moments], [old_weights, *old_moments], strict=True):
                torch._foreach_copy_(tensors, old)
            return False, 0.0
    adapter.moments = pairs
    adapter.step += 1
    torch._foreach_sub_(old_weights, weights)
    return True, _norm(old_weights)


def _update_adamw(
    weights: list[Tensor], grads: list[Tensor], moments: list[list[Tensor]], step: int, fields: Mapping[str, float]
) -> None:
    steps = torch.full((len(weights),), float(step), device=weights[0].device)
    adamw(
        weights,
        grads,
        moments[0],
        moments[1],
        [],
        list(steps.unbind()),
        fused=True,
        amsgrad=False,
        maximize=False,
        lr=fields["learning_rate"],
        beta1=fields["beta1"],
        beta2=fields["beta2"],
        eps=fields["eps"],
        weight_decay=fields["weight_decay"],
    )


def _is_adamw_bounded(grad_norm: float, moments: list[list[Tensor]], step: int, fields: Mapping[str, float]) -> bool:
    # The first moment is no larger than its past or the gradient, and what divides it no smaller than eps. A kernel
    # may multiply in any order, and a product that overflows on the way makes NaN of zeros.
    eps, lr = fields["eps"], fields["learning_rate"] / (1 - fields["beta1"] ** (step + 1))
    largest = max(grad_norm, _norm(moments[0]))
    are_products_finite = lr < _LARGEST and lr * largest < _LARGEST and largest / eps < _LARGEST
    is_update_small = lr * largest / eps < _LARGEST_NORM and fields["learning_rate"] * fields["weight_decay"] <= 1
    return are_products_finite and is_update_small and eps >= _SMALLEST


_UP_TO = f"a finite number of at least 0 and, as float32 holds it, at most {_LARGEST:.4g}"
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda value: 0 <= value <= _LARGEST, _UP_TO),
    "beta1": (lambda value: 0 <= value < 1, "at least 0 and below 1"),
    "beta2": (lambda value: 0 <= value < 1, "at least 0 and below 1"),
    "eps": (lambda value: 0 < value <= _LARGEST, f"a finite number above 0 and at most {_LARGEST:.4g}"),
    "weight_decay": (lambda value: 0 <= value <= _LARGEST, _UP_TO),
    "grad_clip_norm": (lambda value: value >= 0, "a finite number of at least 0, where 0 means no clipping"),
}

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(
        defaults={
            "learning_rate": 1e-4,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-12,
            "weight_decay": 0.0,
            "grad_clip_norm": 0.0,
        },
        moments=("exp_avg", "exp_avg_sq"),
        update=_update_adamw,
        is_bounded=_is_adamw_bounded,
    )
}
