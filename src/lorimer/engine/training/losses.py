"""The losses of the Tinker protocol, as plain sums over positions: value, gradient and metrics from logprobs.

This module knows logprobs only; who calls it computes them and backpropagates the gradient it returns. Every gradient
is written out: each term depends on its own logprob alone, the sequence ratio of ``gspo`` being held constant.
Uploaded losses are in ``custom_loss``. The formulas use tensor methods, so that ``validation`` can read the table of
losses without loading torch.

l: logprob of the target, q: logprob given by the sampler, A: advantage, w: weight, r = exp(l - q).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorimer.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from torch import Tensor

    Inputs = Mapping[str, Tensor]
    Config = Mapping[str, float]

_MAX_LOG_RATIO = 80.0
"""``ratio:mean`` counts larger log ratios as this, which keeps the metric finite; the loss does not."""


class Terms(NamedTuple):
    """The result of a formula for each position."""

    losses: Tensor
    gradient: Tensor
    log_ratio: Tensor | None = None
    """Log of the ratio that weighs the position; ``None`` where the loss has no sampler."""
    is_clipped: Tensor | None = None
    """Where clipping changed the term; ``None`` where the loss does not clip."""


@dataclass(frozen=True)
class Loss:
    name: str
    formula: Callable[[Tensor, Inputs, Config], Terms]
    inputs: tuple[str, ...]
    """Required of every datum besides ``target_tokens``."""
    optional_inputs: tuple[str, ...]
    """``weights``, which are 1 where not given, and clip bounds by position, which replace those of the config."""
    config: Mapping[str, float]
    """Accepted keys of ``loss_fn_config`` and their defaults."""
    is_token_local: bool
    """Whether the value at a position depends on that position alone, so that a datum may be cut anywhere."""


@dataclass(frozen=True)
class MetricSums:
    """Metrics of some positions of an operation; those of all its positions are the sum over the parts."""

    totals: Mapping[str, Tensor | float]
    """By metric name, with its ``:sum`` or ``:mean``."""
    num_active: Tensor | float
    """Positions with a non-zero advantage: what the means are over."""

    def __add__(self, other: MetricSums) -> MetricSums:
        totals = {name: total + other.totals[name] for name, total in self.totals.items()}
        return MetricSums(totals, self.num_active + other.num_active)

    def finalise(self) -> dict[str, float]:
        """Return the metrics as numbers, without means over no position."""
        num_active = float(self.num_active)
        metrics = {}
        for name, total in self.totals.items():
            if name.endswith(":sum"):
                metrics[name] = float(total)
            elif num_active:
                metrics[name] = float(total) / num_active
        return metrics


def find_loss(name: str) -> Loss:
    """Return the built-in loss of that name."""
    if name in LOSSES:
        return LOSSES[name]
    accepted = ", ".join([*LOSSES, "custom"])
    if name == "stable_reinforce":
        raise Unsupported(
            "loss_fn 'stable_reinforce' is not available: its formula is not published and it needs data "
            f"recorded while sampling; accepted are {accepted}"
        )
    raise InvalidInput(f"loss_fn {name!r} is not known; accepted are {accepted}")


def evaluate(loss: Loss, logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Tensor, MetricSums]:
    """Return the loss (0-d, summed in float64), its gradient with respect to ``logprobs``, and metrics.

    ``logprobs`` is ``(N,)``, or ``(N, K)`` for ``cross_entropy``: the positions of one datum, or for a token-local loss
    any positions of one operation. ``inputs`` have its shape; ``config`` replaces the loss's defaults. A position with
    zero weight or advantage contributes exactly nothing to value and gradient, however large its ratio (``dro`` keeps
    its quadratic term). Nothing else is masked or bounded: an overflow shows as a non-finite loss or gradient.

    Metrics: ``loss:sum``, ``tokens:sum`` (positions); ``weight:sum`` for ``cross_entropy``; for the others, over
    positions with a non-zero advantage, ``ratio:mean`` (the ratio the loss uses: of the sequence in ``gspo``),
    ``kl_sampler:mean`` (mean of q - l), ``kl_sampler_v2:mean`` (half the mean of its square) and, where the loss clips,
    ``clip_fraction:mean`` (positions where the clip changed the term).
    """
    logprobs = logprobs.detach()
    terms = loss.formula(logprobs, inputs, {**loss.config, **config})
    total = _sum(terms.losses)
    totals: dict[str, Tensor | float] = {"loss:sum": total, "tokens:sum": float(logprobs.shape[0])}
    if terms.log_ratio is None:
        return total, terms.gradient, MetricSums({**totals, "weight:sum": _sum(inputs["weights"])}, 0.0)
    is_active = inputs["advantages"] != 0
    kl = (inputs["logprobs"] - logprobs).masked_fill(~is_active, 0)
    totals["ratio:mean"] = _sum(_wide(terms.log_ratio).clamp(max=_MAX_LOG_RATIO).exp() * _wide(is_active))
    totals["kl_sampler:mean"] = _sum(kl)
    totals["kl_sampler_v2:mean"] = _sum(_wide(kl).square()) / 2
    if terms.is_clipped is not None:
        totals["clip_fraction:mean"] = _sum(terms.is_clipped & is_active)
    return total, terms.gradient, MetricSums(totals, _sum(is_active))


def active_positions(loss: Loss, inputs: Mapping[str, NDArray[Any]], config: Config) -> NDArray[np.bool_]:
    """Return which of the N positions can have a non-zero gradient, whatever the logprobs are: ``bool (N,)``."""
    if loss.name == "cross_entropy":
        is_weighted = inputs["weights"] != 0
        return is_weighted if is_weighted.ndim == 1 else is_weighted.any(-1)
    is_active: NDArray[np.bool_] = inputs["advantages"] != 0
    return is_active | True if loss.name == "dro" and config.get("beta", loss.config["beta"]) != 0 else is_active


def _wide(values: Tensor) -> Tensor:
    # Apple's GPUs have no float64.
    return (values.cpu() if values.device.type == "mps" else values).double()


def _sum(values: Tensor) -> Tensor:
    return _wide(values).sum()


# ── formulas ──────────────────────────────────────────────────────────────────────────────────────────


def _cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-w l"""
    weights = inputs["weights"]
    return Terms((-weights * logprobs).masked_fill(weights == 0, 0), -weights)


def _importance_sampling(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-r A, the gradient flowing through r"""
    log_ratio = logprobs - inputs["logprobs"]
    losses = _weighed(log_ratio.exp(), inputs["advantages"])
    return Terms(losses, losses, log_ratio)


def _ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-min(r A, clip(r, low, high) A)"""
    return _clipped_surrogate(logprobs - inputs["logprobs"], inputs, config)


def _gspo(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-min(s A, clip(s, low, high) A), s = exp(mean of l - q over the mask) with a gradient of s in l at each position.

    A mask without a position gives s = 1.
    """
    mask = inputs["sequence_ratio_mask"] != 0
    log_ratio = (logprobs - inputs["logprobs"]).masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)
    return _clipped_surrogate(log_ratio.expand_as(logprobs), inputs, config)


def _cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-c l A with c = clip(r, low, high) held constant"""
    log_ratio = logprobs - inputs["logprobs"]
    low, high = _clip_bounds(inputs, config)
    ratio = log_ratio.exp()
    gradient = _weighed(ratio.clamp(min=low).clamp(max=high), inputs["advantages"])
    losses = (gradient * logprobs).masked_fill(gradient == 0, 0)
    return Terms(losses, gradient, log_ratio, (ratio < low) | (ratio > high))


def _dro(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-(l A - beta / 2 (l - q)^2)"""
    log_ratio = logprobs - inputs["logprobs"]
    advantages, beta = inputs["advantages"], config["beta"]
    losses = 0.5 * beta * log_ratio.square() - logprobs * advantages
    return Terms(losses, beta * log_ratio - advantages, log_ratio)


def _clipped_surrogate(log_ratio: Tensor, inputs: Inputs, config: Config) -> Terms:
    # min() takes the clipped branch only where A pushes the ratio further out; its gradient is then zero. On a bound
    # both branches are equal and clamp passes the gradient, so that autograd too gives the unclipped one.
    low, high = _clip_bounds(inputs, config)
    advantages = inputs["advantages"]
    ratio = log_ratio.exp()
    is_clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    losses = _weighed(ratio.where(~is_clipped, ratio.clamp(min=low).clamp(max=high)), advantages)
    return Terms(losses, losses.masked_fill(is_clipped, 0), log_ratio, is_clipped)


def _clip_bounds(inputs: Inputs, config: Config) -> tuple[Tensor | float, Tensor | float]:
    low, high = "clip_low_threshold", "clip_high_threshold"
    return inputs.get(low, config[low]), inputs.get(high, config[high])


def _weighed(ratio: Tensor, advantages: Tensor) -> Tensor:
    return (-ratio * advantages).masked_fill(advantages == 0, 0)


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────

_SAMPLED = ("logprobs", "advantages")
_SEQUENCE = (*_SAMPLED, "sequence_ratio_mask")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")


def _clips(low: float, high: float) -> dict[str, float]:
    return dict(zip(_CLIPS, (low, high), strict=True))


# No default is published for dro's beta, so the documentation's example is taken, nor for gspo's bounds, so those of
# the GSPO paper are.
LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, (), ("weights",), {}, is_token_local=True),
        Loss("importance_sampling", _importance_sampling, _SAMPLED, (), {}, is_token_local=True),
        Loss("ppo", _ppo, _SAMPLED, _CLIPS, _clips(0.8, 1.2), is_token_local=True),
        Loss("cispo", _cispo, _SAMPLED, _CLIPS, _clips(0.0, 4.0), is_token_local=True),
        Loss("dro", _dro, _SAMPLED, (), {"beta": 0.05}, is_token_local=True),
        Loss("gspo", _gspo, _SEQUENCE, _CLIPS, _clips(1 - 3e-4, 1 + 4e-4), is_token_local=False),
    )
}
