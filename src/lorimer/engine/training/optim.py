"""One step of an optimiser: checks of its fields, clipping, multipliers, and a guard against infinite numbers.

`take_step` works on named weights of any shape; `apply` is the `optim_step` of a LoRA run. The updates themselves
are in `optimizers.py`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lorimer.engine.adapters.adapters import Adapter, are_finite, name_factors
from lorimer.engine.messages import OptimizerConfig, StepField
from lorimer.engine.sharding import ALONE, Shards
from lorimer.engine.training.division import Division
from lorimer.engine.training.optimizers import (
    LARGEST,
    LARGEST_NORM,
    OPTIMIZERS,
    Fields,
    Optimizer,
    Range,
    State,
    TrainedWeight,
    defaults,
    norm,
    state_of,
)
from lorimer.errors import CheckpointError, InvalidInput, Unsupported

_CHUNK_BYTES = 4 << 20
"""Weights updated together: with their copy, by which a step knows how far it moved, they stay in a CPU's cache."""


@dataclass(frozen=True)
class StepOutcome:
    is_applied: bool
    """Whether weights and state have changed, so that the step counts."""
    metrics: dict[str, float]


def apply(
    adapter: Adapter, params: Mapping[str, StepField], product_dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Take one step of a LoRA run with its accumulated gradient, and clear that; return the metrics of the step."""
    outcome = take_step(
        adapter.optimizer,
        name_factors(adapter.weights),
        None if adapter.grads is None else name_factors(adapter.grads),
        adapter.moments,
        adapter.step,
        params,
        adapter.groups,
        product_dtype=product_dtype,
    )
    adapter.clear_gradient()
    adapter.weights_changed()
    adapter.step += outcome.is_applied
    return outcome.metrics


def take_step(
    config: OptimizerConfig,
    weights: Mapping[str, Tensor],
    grads: Mapping[str, Tensor] | None,
    state: State,
    step: int,
    params: Mapping[str, StepField],
    groups: Mapping[str, frozenset[str]],
    division: Division | None = None,
    product_dtype: torch.dtype = torch.bfloat16,
) -> StepOutcome:
    """Change ``weights`` and ``state`` in place by one step; without ``grads`` the gradient is zero.

    With ``division`` they are this rank's parts, and all ranks take the step together. ``product_dtype`` is what the
    device multiplies bfloat16 numbers in.

    Weights are float32 of any shape. ``state`` is empty before the first step, and ``step`` is the number of steps
    applied before. ``groups`` says by weight what ``lr_multipliers`` may name. Gradients may be overwritten.

    Fields not in ``params`` have their defaults. The metrics are ``grad_norm`` (before clipping), ``update_norm``,
    ``param_norm``, ``optimizer_step`` (the counter afterwards), ``num_parameters``, ``optimizer_state_bytes`` and
    ``skipped``. A gradient or a result that is not finite makes ``skipped`` 1: weights and state stay as they were. A
    norm that is not finite is left out.
    """
    optimizer = _find(config)
    fields = _check_params(config.type, optimizer, params)
    multipliers = _multipliers(fields, weights, groups)
    if division is None:
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        division = Division(ALONE, optimizer, shapes, defaultdict(frozenset, groups))
    shards = division.shards
    with torch.no_grad():
        trained = {
            name: TrainedWeight(
                tensor,
                torch.zeros_like(tensor) if grads is None else grads[name],
                state_of(name, state) or division.create_state(name, tensor),
                groups.get(name, frozenset()),
                division.owners.get(name),
                division.shapes[name][0] if name in division.owners else 0,
                product_dtype,
            )
            for name, tensor in weights.items()
        }
        gradient = [weight.grad for weight in trained.values()]
        grad_norm, update_norm = shards.norm(norm(gradient)), 0.0
        is_applied = grad_norm < LARGEST_NORM
        if is_applied:
            _clip(gradient, grad_norm, fields["grad_clip_norm"])
            parts = defaultdict(list)
            for name, weight in trained.items():
                parts[multipliers[name]].append(weight)
            scaled = [(part, _scale_rates(fields, multiplier)) for multiplier, part in parts.items()]
            is_applied, update_norm = _update(optimizer, scaled, grad_norm, step, shards)
        if is_applied:
            _keep(state, trained)
        param_norm = shards.norm(norm(list(weights.values())))
        norms = {"grad_norm": grad_norm, "update_norm": shards.norm(update_norm), "param_norm": param_norm}
    metrics = {key: value for key, value in norms.items() if math.isfinite(value)}
    metrics |= {"skipped": float(not is_applied), "optimizer_step": float(step + is_applied)}
    metrics |= {"num_parameters": float(division.num_parameters)}
    (num_bytes,) = shards.sum_numbers(state_bytes(division.counted(state)))
    return StepOutcome(is_applied, metrics | {"optimizer_state_bytes": num_bytes})


def state_bytes(state: State) -> int:
    """Return the memory of an optimiser's state."""
    return sum(tensor.nbytes for tensors in state.values() for tensor in tensors.values())


def check_state(
    config: OptimizerConfig,
    weights: Mapping[str, Tensor],
    state: State,
    step: int,
    groups: Mapping[str, frozenset[str]],
) -> None:
    """Refuse a loaded state that is not the one that ``step`` steps on ``weights`` leave behind.

    Tensors on the device ``meta`` stand for those of which a rank has a part.
    """
    optimizer = _find(config)
    check_finite(state)
    for name, weight in weights.items():
        created = optimizer.create_state(weight.to("meta"), groups.get(name, frozenset()))
        expected = {kind: (tuple(one.shape), one.dtype) for kind, one in created.items()}
        found = {kind: (tuple(one.shape), one.dtype) for kind, one in state_of(name, state).items()}
        optional = dict.fromkeys(optimizer.optional, (weight.shape, weight.dtype))
        if found != expected and (found or step) and {**optional, **found} != {**optional, **expected}:
            raise CheckpointError(f"the saved state of {name!r} is {found}, where {config.type} has {expected}")


def check_finite(state: State) -> None:
    """Refuse a loaded state with numbers that are not finite."""
    for kind, tensors in state.items():
        found = [tensor for tensor in tensors.values() if tensor.is_floating_point() and not tensor.is_meta]
        if not are_finite(found):
            raise CheckpointError(f"the saved state holds numbers in {kind!r} that are not finite")


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


def _check_params(name: str, optimizer: Optimizer, params: Mapping[str, Any]) -> dict[str, Any]:
    fields = defaults(name)
    if unknown := sorted(params.keys() - fields.keys()):
        raise InvalidInput(f"{name} has no parameter {', '.join(map(repr, unknown))}; it has {', '.join(fields)}")
    fields |= params
    for key, value in fields.items():
        accepted, text = optimizer.ranges.get(key) or _RANGES[key.removeprefix("adamw_")]
        if not accepted(value):
            raise InvalidInput(f"{name} parameter {key} is {value!r}, but must be {text}")
    if trouble := optimizer.find_trouble(fields):
        raise InvalidInput(f"{name}: {trouble}")
    return fields


def _multipliers(
    fields: Fields, weights: Mapping[str, Tensor], groups: Mapping[str, frozenset[str]]
) -> dict[str, float]:
    """Return the product of the multipliers of each weight's groups, by the name of the weight."""
    given: Mapping[str, float] = fields["lr_multipliers"]
    known = frozenset[str]().union(*groups.values())
    if unknown := sorted(given.keys() - known):
        raise InvalidInput(
            f"lr_multipliers has {', '.join(map(repr, unknown))}; the run trains weights of {', '.join(sorted(known))}"
        )
    found = {name: math.prod(given[group] for group in groups.get(name, ()) if group in given) for name in weights}
    for key in _RATES & fields.keys():
        if fields[key] * max(found.values(), default=1.0) > LARGEST:
            raise InvalidInput(f"{key} {fields[key]!r} times its lr_multipliers is more than float32 holds")
    return found


def _scale_rates(fields: Fields, multiplier: float) -> Fields:
    return {key: value * multiplier if key in _RATES else value for key, value in fields.items()}


def _clip(grads: list[Tensor], grad_norm: float, max_norm: float) -> None:
    """Scale ``grads`` in place as `torch.nn.utils.clip_grad_norm_` does; zero means no limit."""
    if max_norm > 0 and (factor := max_norm / (grad_norm + 1e-6)) < 1:
        torch._foreach_mul_(grads, factor)


def _update(
    optimizer: Optimizer, parts: list[tuple[list[TrainedWeight], Fields]], grad_norm: float, step: int, shards: Shards
) -> tuple[bool, float]:
    """Update the weights unless the result is not finite; return whether it was finite, and the norm of the change."""
    if shards.all(all(optimizer.is_bounded(weights, grad_norm, step, fields) for weights, fields in parts)):
        is_computed, move = _update_all(optimizer, parts, step, shards)
        assert is_computed, "what is bounded does not overflow"
        return True, move
    every = [weight for weights, _ in parts for weight in weights]
    before = [(one, one.clone()) for weight in every for one in (weight.tensor, *weight.state.values())]
    is_computed, move = _update_all(optimizer, parts, step, shards)
    if not shards.all(is_computed and all(map(_is_usable, every))):
        for tensor, copy in before:
            tensor.copy_(copy)
        return False, 0.0
    return True, move


def _update_all(
    optimizer: Optimizer, parts: list[tuple[list[TrainedWeight], Fields]], step: int, shards: Shards
) -> tuple[bool, float]:
    """Update all weights, a chunk at a time; return whether nothing overflowed, and the norm of this rank's changes."""
    moves = []
    is_computed = True
    scratch: list[Tensor] = []
    for weights, fields in parts:
        owned = [weight for weight in weights if weight.owner is not None]
        for chunk in _chunks([weight for weight in weights if weight.owner is None], optimizer.is_elementwise):
            tensors = [weight.tensor for weight in chunk]
            old = _copies(tensors, scratch)
            is_computed &= _compute(optimizer, chunk, step, fields)
            torch._foreach_sub_(old, tensors)
            moves.append(norm(old))
        for chunk in _rounds(owned):
            is_updated, move = _update_gathered(optimizer, chunk, step, fields, shards)
            is_computed &= is_updated
            moves.append(move)
    return is_computed, moves[0] if len(moves) == 1 else math.hypot(*moves)


def _compute(optimizer: Optimizer, weights: list[TrainedWeight], step: int, fields: Fields) -> bool:
    """Update weights; return false if torch finds that a factor overflows."""
    try:
        optimizer.update(weights, step, fields)
    except RuntimeError as error:
        if "overflow" not in str(error):  # torch's word for a factor that float32 cannot hold
            raise
        return False
    return True


def _rounds(weights: list[TrainedWeight]) -> Iterator[list[TrainedWeight]]:
    """Yield weights of different owners together, so that each rank has at most one whole at a time."""
    by_owner: dict[int | None, list[TrainedWeight]] = {}
    for weight in weights:
        by_owner.setdefault(weight.owner, []).append(weight)
    for several in zip_longest(*by_owner.values()):
        yield [weight for weight in several if weight is not None]


def _update_gathered(
    optimizer: Optimizer, weights: list[TrainedWeight], step: int, fields: Fields, shards: Shards
) -> tuple[bool, float]:
    """Update weights, each as a whole at its owner; return as `_update_all` does."""
    own: TrainedWeight | None = None
    for weight in weights:
        assert weight.owner is not None
        tensor = shards.gather_rows(weight.tensor, weight.num_rows, weight.owner)
        grad = shards.gather_rows(weight.grad, weight.num_rows, weight.owner)
        if tensor is not None and grad is not None:
            own = replace(weight, tensor=tensor, grad=grad, owner=None, num_rows=0)
    is_computed, move = True, 0.0
    with shards.together():
        if own is not None:
            old = own.tensor.clone()
            is_computed = _compute(optimizer, [own], step, fields)
            move = norm([old.sub_(own.tensor)])
    for weight in weights:
        assert weight.owner is not None
        whole = own.tensor if own is not None and weight.owner == shards.rank else None
        shards.scatter_rows(whole, weight.tensor, weight.num_rows, weight.owner)
    return is_computed, move


def _copies(tensors: list[Tensor], scratch: list[Tensor]) -> list[Tensor]:
    """Copy into the memory of the last copies if it is large enough: the system takes longer to provide new memory."""
    sizes = [tensor.numel() for tensor in tensors]
    if not scratch or scratch[0].numel() < sum(sizes):
        scratch[:] = [tensors[0].new_empty(sum(sizes))]
    parts = scratch[0][: sum(sizes)].split(sizes)
    copies = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(copies, tensors)
    return copies


def _chunks(weights: list[TrainedWeight], is_elementwise: bool) -> Iterator[list[TrainedWeight]]:
    chunk: list[TrainedWeight] = []
    num_bytes = 0
    for weight in (part for whole in weights for part in (_split(whole) if is_elementwise else [whole])):
        if chunk and num_bytes + weight.tensor.nbytes > _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(weight)
        num_bytes += weight.tensor.nbytes
    if chunk:
        yield chunk


def _split(weight: TrainedWeight) -> list[TrainedWeight]:
    """Return views of the parts of a large weight."""
    every = (weight.tensor, weight.grad, *weight.state.values())
    if weight.tensor.nbytes <= _CHUNK_BYTES or not all(one.is_contiguous() for one in every):
        return [weight]
    tensors, grads, *states = (one.view(-1).split(_CHUNK_BYTES // 4) for one in every)
    return [
        replace(weight, tensor=tensor, grad=grad, state=dict(zip(weight.state, state, strict=True)))
        for tensor, grad, *state in zip(tensors, grads, *states, strict=True)
    ]


def _is_usable(weight: TrainedWeight) -> bool:
    state = [tensor for tensor in weight.state.values() if tensor.is_floating_point()]
    return norm([weight.tensor]) < LARGEST_NORM and (not state or are_finite(state))


def _keep(state: State, trained: Mapping[str, TrainedWeight]) -> None:
    """Put the tensors of a first step, and those that came into being later, into the state."""
    for name, weight in trained.items():
        for key, tensor in weight.state.items():
            state.setdefault(key, {})[name] = tensor


def _number(accepts: Callable[[float], bool], text: str) -> Range:
    def accepts_number(value: Any) -> bool:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and accepts(value)
        )

    return accepts_number, text


_RATES = frozenset({"learning_rate", "adamw_learning_rate"})
"""Fields that ``lr_multipliers`` multiply."""
_UP_TO = _number(
    lambda value: 0 <= value <= LARGEST,
    f"a finite number of at least 0 and, as float32 holds it, at most {LARGEST:.4g}",
)
_ABOVE = _number(lambda value: 0 < value <= LARGEST, f"a finite number above 0 and at most {LARGEST:.4g}")
_BELOW_ONE = _number(lambda value: 0 <= value < 1, "at least 0 and below 1")
_FLAG: Range = (lambda value: isinstance(value, bool), "true or false")
_RANGES: dict[str, Range] = {
    "learning_rate": _UP_TO,
    "beta1": _BELOW_ONE,
    "beta2": _BELOW_ONE,
    "eps": _ABOVE,
    "weight_decay": _UP_TO,
    "grad_clip_norm": _number(lambda value: value >= 0, "a finite number of at least 0, where 0 means no clipping"),
    "lr_multipliers": (
        lambda value: isinstance(value, Mapping) and all(_UP_TO[0](one) for one in value.values()),
        f"an object of finite numbers from 0 to {LARGEST:.4g} by group of weights",
    ),
    "momentum": _BELOW_ONE,
    "dampening": _number(lambda value: 0 <= value <= 1, "from 0 to 1"),
    "nesterov": _FLAG,
    "beta2_decay": _number(lambda value: -LARGEST <= value <= 0, "a finite number of at most 0"),
    "eps1": _ABOVE,
    "eps2": _ABOVE,
    "d": _ABOVE,
    "ns_coefficients": (
        lambda value: isinstance(value, list | tuple) and len(value) == 3 and all(_UP_TO[0](abs(one)) for one in value),
        "three finite numbers",
    ),
    "ns_steps": _number(lambda value: value in range(1, 100), "an integer from 1 to 99"),
    "adjust_lr_fn": (lambda value: value in ("original", "match_rms_adamw"), "'original' or 'match_rms_adamw'"),
    "r": _number(lambda value: 0 <= value <= 10, "from 0 to 10"),
    "weight_lr_power": _number(lambda value: 0 <= value <= 4, "from 0 to 4"),
}
