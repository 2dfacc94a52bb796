"""The updates of optimisers: what each keeps for a weight of any shape, and how it changes weight and state.

A new optimiser is its fields in `types/optim.py` and one entry in `OPTIMIZERS`: the state of a weight, its update,
and the condition under which nothing can become infinite. `optim.py` checks fields, clips and guards a step.
Schedules belong to the client, which sends every field with every step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim._adafactor import adafactor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from lorimer.engine.model.device import download, upload
from lorimer.engine.training import muon, quantized_moments
from lorimer.types.optim import OPTIMIZERS as PARAMS

Fields = Mapping[str, Any]
"""The fields of a step, all of them present; the learning rates are those of the weights they come with."""
State = dict[str, dict[str, Tensor]]
"""What an optimiser keeps: by its own names, the tensors of the weights, by the names of these."""
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
"""Limits of float32, the dtype of weights, moments and the parameters of a step."""
LARGEST_NORM = math.sqrt(LARGEST) / 2
"""Tensors of a smaller norm have finite squares, hence finite second moments. Adding less to what is finite in float32
leaves it finite, for the largest numbers are much further apart."""


@dataclass(frozen=True)
class TrainedWeight:
    """One weight with its gradient and state, which an update changes in place."""

    tensor: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    """By the optimiser's own names."""
    groups: frozenset[str] = frozenset()
    """What it belongs to: ``attn``, ``mlp``, ``unembed``, ``embed`` or ``norms``, and ``lora_A``, ``lora_B`` or
    ``lora_magnitude``."""
    owner: int | None = None
    """The rank that updates it, where ranks share a weight that is updated as a whole; the others have no state."""
    num_rows: int = 0
    """Rows of the whole weight, if it has an owner; ``tensor`` and ``grad`` are some of them."""
    product_dtype: torch.dtype = torch.bfloat16
    """What its device multiplies bfloat16 numbers in: float32 where it has no units for bfloat16."""


@dataclass(frozen=True)
class Optimizer:
    """One kind of update; its fields and their defaults are in `types/optim.py`."""

    create_state: Callable[[Tensor, frozenset[str]], dict[str, Tensor]]
    """Returns the state of a weight before its first step, on the device of the weight, given also its groups."""
    update: Callable[[list[TrainedWeight], int, Fields], None]
    """Changes weights and states in place, given the number of steps before and the fields."""
    is_bounded: Callable[[list[TrainedWeight], float, int, Fields], bool]
    """Whether weights and states surely stay finite, given also the norm of the whole gradient.

    Only then the update needs no copy of everything to go back to, which saves two thirds of a step's time.
    """
    is_elementwise: bool = False
    """Whether each number is updated by itself, so that a weight may be updated in parts; states have its shape."""
    optional: tuple[str, ...] = ()
    """Names of tensors, shaped like the weight, that an update adds to the state when it first needs them."""
    ranges: Mapping[str, "Range"] = field(default_factory=dict)
    """Ranges of fields that are narrower here than in other optimisers."""
    find_trouble: Callable[[Fields], str] = lambda fields: ""
    """Returns why fields that are right each do not go together; empty if they do."""
    average: Callable[[Tensor, dict[str, Tensor]], Tensor] | None = None
    """Returns the weight to sample with, where it is not the one at which gradients are taken."""
    needs_whole: Callable[[Tensor, frozenset[str]], bool] = lambda weight, groups: False
    """Whether a weight is updated as a whole, given its groups; otherwise ranks update their rows by themselves."""
    shared: tuple[str, ...] = ()
    """Names of tensors that are the same for all rows of a weight."""


Range = tuple[Callable[[Any], bool], str]
"""Whether a value is accepted, and the words that say which are."""


def norm(tensors: list[Tensor]) -> float:
    """Return the norm of all tensors together."""
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))) if tensors else 0.0


def defaults(name: str) -> dict[str, Any]:
    """Return every field of a step of an optimiser with its default, those that all have last."""
    fields = PARAMS[name].model_fields
    common = ("grad_clip_norm", "lr_multipliers")
    own = [key for key in fields if key not in ("type", *common)]
    return {key: fields[key].get_default(call_default_factory=True) for key in (*own, *common)}


def _tensors(weights: list[TrainedWeight]) -> list[Tensor]:
    return [weight.tensor for weight in weights]


def _grads(weights: list[TrainedWeight]) -> list[Tensor]:
    return [weight.grad for weight in weights]


def _states(weights: list[TrainedWeight], name: str) -> list[Tensor]:
    return [weight.state[name] for weight in weights]


def _zeros(*names: str) -> Callable[[Tensor, frozenset[str]], dict[str, Tensor]]:
    return lambda weight, groups: {name: torch.zeros_like(weight) for name in names}


def _decay_is_small(fields: Fields) -> bool:
    """Return whether decoupled weight decay shrinks weights."""
    return bool(fields["learning_rate"] * fields["weight_decay"] <= 1)


def _decayed_norm(weights: list[TrainedWeight], grad_norm: float, fields: Fields) -> float:
    """Return a bound of the gradient's norm with weight decay as a part of it."""
    decay = fields["weight_decay"]
    return grad_norm + decay * norm(_tensors(weights)) if decay else grad_norm


# ── AdamW and Adam ────────────────────────────────────────────────────────────────────────────────────


def _update_adamw(weights: list[TrainedWeight], step: int, fields: Fields) -> None:
    _run_adam(adamw, weights, step, fields)


def _update_adam(weights: list[TrainedWeight], step: int, fields: Fields) -> None:
    _run_adam(adam, weights, step, fields)


def _run_adam(function: Callable[..., None], weights: list[TrainedWeight], step: int, fields: Fields) -> None:
    steps = torch.full((len(weights),), float(step), device=weights[0].tensor.device)
    function(
        _tensors(weights),
        _grads(weights),
        _states(weights, "exp_avg"),
        _states(weights, "exp_avg_sq"),
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


def _is_adamw_bounded(weights: list[TrainedWeight], grad_norm: float, step: int, fields: Fields) -> bool:
    largest = max(grad_norm, norm(_states(weights, "exp_avg")))
    return _is_adam_step_bounded(largest, step, fields) and _decay_is_small(fields)


def _is_adam_bounded(weights: list[TrainedWeight], grad_norm: float, step: int, fields: Fields) -> bool:
    whole = _decayed_norm(weights, grad_norm, fields)
    largest = max(whole, norm(_states(weights, "exp_avg")))
    return whole < LARGEST_NORM and _is_adam_step_bounded(largest, step, fields)


def _is_adam_step_bounded(largest: float, step: int, fields: Fields) -> bool:
    # The first moment is no larger than its past or the gradient, and what divides it no smaller than eps. A kernel
    # may multiply in any order, and a product that overflows on the way makes NaN of zeros.
    eps, lr = fields["eps"], fields["learning_rate"] / (1 - fields["beta1"] ** (step + 1))
    are_products_finite = lr < LARGEST and lr * largest < LARGEST and largest / eps < LARGEST
    return bool(are_products_finite and lr * largest / eps < LARGEST_NORM and eps >= SMALLEST)


# ── AdamW with moments in 8 bits ──────────────────────────────────────────────────────────────────────


def _has_quantized_moments(weight: Tensor, groups: frozenset[str]) -> bool:
    return weight.numel() >= quantized_moments.MIN_NUMBERS


def _create_adamw8bit(weight: Tensor, groups: frozenset[str]) -> dict[str, Tensor]:
    if not _has_quantized_moments(weight, groups):
        return _zeros("exp_avg", "exp_avg_sq")(weight, groups)
    return quantized_moments.create(weight)


def _update_adamw8bit(weights: list[TrainedWeight], step: int, fields: Fields) -> None:
    small = [weight for weight in weights if "exp_avg_scale" not in weight.state]
    if small:
        _update_adamw(small, step, fields)
    for weight in weights:
        if "exp_avg_scale" in weight.state:
            quantized_moments.update(weight.tensor, weight.grad, weight.state, step, fields)


def _is_adamw8bit_bounded(weights: list[TrainedWeight], grad_norm: float, step: int, fields: Fields) -> bool:
    # No number of a block is larger than its scale.
    past = [weight.state.get("exp_avg_scale", weight.state["exp_avg"]) for weight in weights]
    largest = max(grad_norm, math.sqrt(quantized_moments.BLOCK) * norm(past))
    return _is_adam_step_bounded(largest, step, fields) and _decay_is_small(fields)


# ── stochastic gradient descent ───────────────────────────────────────────────────────────────────────


def _update_sgd(weights: list[TrainedWeight], step: int, fields: Fields) -> None:
    buffers = [weight.state.get("momentum_buffer") for weight in weights]
    sgd(
        _tensors(weights),
        _grads(weights),
        buffers,
        foreach=True,
        weight_decay=fields["weight_decay"],
        momentum=fields["momentum"],
        lr=fields["learning_rate"],
        dampening=fields["dampening"],
        nesterov=fields["nesterov"],
        maximize=False,
    )
    for weight, buffer in zip(weights, buffers, strict=True):
        if buffer is not None:
            weight.state["momentum_buffer"] = buffer


def _is_sgd_bounded(weights: list[TrainedWeight], grad_norm: float, step: int, fields: Fields) -> bool:
    past = [weight.state["momentum_buffer"] for weight in weights if "momentum_buffer" in weight.state]
    whole = _decayed_norm(weights, grad_norm, fields)
    buffer = fields["momentum"] * norm(past) + whole
    return bool(buffer < LARGEST_NORM and fields["learning_rate"] * (whole + buffer) < LARGEST_NORM)


def _sgd_trouble(fields: Fields) -> str:
    if fields["nesterov"] and (fields["momentum"] <= 0 or fields["dampening"] != 0):
        return "nesterov needs a momentum above 0 and a dampening of 0"
    return ""


# ── Lion ──────────────────────────────────────────────────────────────────────────────────────────────


def _update_lion(weights: list[TrainedWeight], step: int, fields: Fields) -> None:
    tensors, grads, averages = _tensors(weights), _grads(weights), _states(weights, "exp_avg")
    lr, beta1, beta2 = (fields[name] for name in ("learning_rate", "beta1", "beta2"))
    torch._foreach_mul_(tensors, 1 - lr * fields["weight_decay"])
    directions = torch._foreach_mul(averages, beta1)
    torch._foreach_add_(directions, grads, alpha=1 - beta1)
    torch._foreach_sign_(directions)
    torch._foreach_add_(tensors, directions, alpha=-lr)
    torch._foreach_mul_(averages, beta2)
    torch._foreach_add_(averages, grads, alpha=1 - beta2)


def _is_lion_bounded(weights: list[TrainedWeight], grad_norm: float, step: int, fields: Fields) -> bool:
    num_weights = sum(weight.tensor.numel() for weight in weights)
    is_move_small = fields["learning_rate"] * math.sqrt(num_weights) < LARGEST_NORM
    return is_move_small and _decay_is_small(fields) and norm(_states(weights, "exp_avg")) < LARGEST_NORM


# ── Adafactor ─────────────────────────────────────────────────────────────────────────────────────────


def _create_adafactor(weight: Tensor, groups: frozenset[str]) -> dict[str, Tensor]:
    if weight.dim() < 2:
        return {"variance": torch.zeros_like(weight)}
    *lead, rows, columns = weight.shape
    return {"row_var": weight.new_zeros(*lead, rows, 1), "col_var": weight.new_zeros(*lead, 1, columns)}


def _update_adafactor(weights: list[TrainedWeight], step: int, fields: Fields) -> None:
    adafactor(
        _tensors(weights),
        _grads(weights),
        [weight.state.get("row_var") for weight in weights],
        [weight.state.get("col_var") for weight in weights],
        [weight.state.get("variance") for weight in weights],
        [torch.tensor(float(step)) for _ in weights],
        foreach=False,
        d=fields["d"],
        lr=fields["learning_rate"],
        beta2_decay=fields["beta2_decay"],
        weight_decay=fields["weight_decay"],
        eps1=fields["eps1"],
        eps2=fields["eps2"],
        maximize=False,
    )


def _is_adafactor_bounded(weights: list[TrainedWeight], grad_norm: float, step: int, fields: Fields) -> bool:
    # An update's root mean square is at most d, relative to the weights'; eps1 is squared on the way.
    num_weights = sum(weight.tensor.numel() for weight in weights)
    relative = max(fields["eps2"], norm(_tensors(weights))) * min(fields["learning_rate"], 1.0)
    is_move_small = relative * fields["d"] * math.sqrt(num_weights) < LARGEST_NORM
    is_eps_usable = math.sqrt(SMALLEST) <= fields["eps1"] < LARGEST_NORM and grad_norm / fields["eps1"] < LARGEST_NORM
    return bool(is_move_small and is_eps_usable and _decay_is_small(fields))


# ── Muon ──────────────────────────────────────────────────────────────────────────────────────────────

_NS_COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""With these a spectral norm of at most 1 stays below 2, however often the polynomial is applied."""


def _is_muon_matrix(weight: Tensor, groups: frozenset[str]) -> bool:
    return weight.dim() >= 2 and not groups & {"embed", "unembed"}


def _create_muon(weight: Tensor, groups: frozenset[str]) -> dict[str, Tensor]:
    names = ("momentum_buffer",) if _is_muon_matrix(weight, groups) else ("exp_avg", "exp_avg_sq")
    return _zeros(*names)(weight, groups)


def _split_muon(weights: list[TrainedWeight]) -> tuple[list[TrainedWeight], list[TrainedWeight]]:
    matrices = [weight for weight in weights if "momentum_buffer" in weight.state]
    return matrices, [weight for weight in weights if "momentum_buffer" not in weight.state]


def _adamw_fields(fields: Fields) -> Fields:
    return {key.removeprefix("adamw_"): value for key, value in fields.items() if key.startswith("adamw_")}


def _update_muon(weights: list[TrainedWeight], step: int, fields: Fields) -> None:
    matrices, others = _split_muon(weights)
    if others:
        _update_adamw(others, step, _adamw_fields(fields))
    tensors: list[Tensor] = []
    grads: list[Tensor] = []
    buffers: list[Tensor] = []
    for weight in matrices:
        # A stack holds the matrices of experts, each of which is orthogonalised by itself.
        for several, one in (
            (tensors, weight.tensor),
            (grads, weight.grad),
            (buffers, weight.state["momentum_buffer"]),
        ):
            several += one.flatten(0, -3).unbind() if one.dim() > 2 else [one]
    if matrices:
        muon.update(tensors, grads, buffers, fields, matrices[0].product_dtype)


def _is_muon_bounded(weights: list[TrainedWeight], grad_norm: float, step: int, fields: Fields) -> bool:
    matrices, others = _split_muon(weights)
    num_weights = sum(weight.tensor.numel() for weight in matrices)
    return bool(
        (not others or _is_adamw_bounded(others, grad_norm, step, _adamw_fields(fields)))
        and tuple(fields["ns_coefficients"]) == _NS_COEFFICIENTS
        and fields["eps"] >= SMALLEST
        and fields["learning_rate"] * 2 * num_weights < LARGEST_NORM
        and norm([weight.state["momentum_buffer"] for weight in matrices]) < LARGEST_NORM
        and _decay_is_small(fields)
    )


# ── schedule-free AdamW ───────────────────────────────────────────────────────────────────────────────


def _create_schedule_free(weight: Tensor, groups: frozenset[str]) -> dict[str, Tensor]:
    return {
        "z": weight.clone(),
        "exp_avg_sq": torch.zeros_like(weight),
        # The sum of the weights of all steps, the largest learning rate, and beta1 of the last step.
        "averaging": torch.zeros(3, dtype=torch.float64, device=weight.device),
    }


def _update_schedule_free(weights: list[TrainedWeight], step: int, fields: Fields) -> None:
    """Move z by the gradient, average it into x, and leave y between the two in the weight."""
    lr, beta1, beta2 = (fields[name] for name in ("learning_rate", "beta1", "beta2"))
    correction = 1 - beta2 ** (step + 1)
    # Read and written together: a device would be waited for at each weight.
    averaging = [weight.state["averaging"] for weight in weights]
    averages = [array.tolist() for array in download(averaging)]
    for number, weight in enumerate(weights):
        y, z, exp_avg_sq = weight.tensor, weight.state["z"], weight.state["exp_avg_sq"]
        total, largest, last_beta1 = averages[number]
        largest = max(largest, lr)
        share = (step + 1) ** fields["r"] * largest ** fields["weight_lr_power"]
        total += share
        share = share / total if total else 0.0
        exp_avg_sq.mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
        move = weight.grad / (exp_avg_sq / correction).sqrt_().add_(fields["eps"])
        if fields["weight_decay"]:
            move.add_(y, alpha=fields["weight_decay"])
        if last_beta1 not in (0.0, beta1):
            y.lerp_(z, 1 - beta1 / last_beta1)  # the same average, mixed by the new beta1
        y.lerp_(z, share)
        y.add_(move, alpha=lr * (beta1 * (1 - share) - 1))
        z.sub_(move, alpha=lr)
        averages[number] = [total, largest, beta1]
    for old, new in zip(averaging, upload([np.array(one) for one in averages], averaging[0].device), strict=True):
        old.copy_(new)


def _is_schedule_free_bounded(weights: list[TrainedWeight], grad_norm: float, step: int, fields: Fields) -> bool:
    held = norm(_tensors(weights)) + norm(_states(weights, "z"))
    lr, move = fields["learning_rate"], grad_norm / fields["eps"] + fields["weight_decay"] * held
    is_move_small = move < LARGEST and lr * move < LARGEST_NORM
    return bool(is_move_small and held < LARGEST_NORM / 20 and fields["eps"] >= SMALLEST)


def _average_schedule_free(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    beta1 = state["averaging"][2].item()
    return weight.lerp(state["z"], 1 - 1 / beta1) if beta1 else weight


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(_zeros("exp_avg", "exp_avg_sq"), _update_adamw, _is_adamw_bounded, is_elementwise=True),
    "adam": Optimizer(_zeros("exp_avg", "exp_avg_sq"), _update_adam, _is_adam_bounded, is_elementwise=True),
    "sgd": Optimizer(_zeros(), _update_sgd, _is_sgd_bounded, optional=("momentum_buffer",), find_trouble=_sgd_trouble),
    "lion": Optimizer(_zeros("exp_avg"), _update_lion, _is_lion_bounded, is_elementwise=True),
    "adafactor": Optimizer(
        _create_adafactor, _update_adafactor, _is_adafactor_bounded, needs_whole=lambda weight, groups: True
    ),
    "muon": Optimizer(_create_muon, _update_muon, _is_muon_bounded, needs_whole=_is_muon_matrix),
    "adamw8bit": Optimizer(
        _create_adamw8bit, _update_adamw8bit, _is_adamw8bit_bounded, needs_whole=_has_quantized_moments
    ),
    "schedule_free_adamw": Optimizer(
        _create_schedule_free,
        _update_schedule_free,
        _is_schedule_free_bounded,
        # The average is divided by it, and a small one would magnify rounding.
        ranges={"beta1": (lambda value: isinstance(value, float) and 0.1 <= value < 1, "at least 0.1 and below 1")},
        average=_average_schedule_free,
        shared=("averaging",),
    ),
}


def state_of(name: str, state: State) -> dict[str, Tensor]:
    """Return what the optimiser keeps of one weight, by its own names."""
    return {kind: tensors[name] for kind, tensors in state.items() if name in tensors}


def average_weights(optimizer: str, weights: Mapping[str, Tensor], state: State) -> dict[str, Tensor] | None:
    """Return new tensors to sample with where ``weights``, at which gradients are taken, are not these."""
    average = OPTIMIZERS[optimizer].average
    if average is None or not state:
        return None
    with torch.no_grad():
        return {name: average(tensor, state_of(name, state)) for name, tensor in weights.items()}
