"""Drawing tokens from logits: temperature, top-k, top-p, seeds.

A draw depends on nothing but the row's own logits, its seed and its position, so a seeded sequence comes out the same
whatever else is in the batch. Log probabilities are those of the temperature-scaled distribution, before top-k and
top-p cut it, so that they can be compared with the trainer's; a greedy draw (temperature 0) reports temperature 1.

Legend: N rows, V vocabulary, K draws or best tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.model.device import upload
from lorimer.engine.native.rowwise import Rowwise

_BLOCK = 256
_MAX_SORTED = 1 << 22
"""Maximum probabilities sorted together, which bounds memory."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Rule(NamedTuple):
    """How a row is drawn."""

    temperature: float
    top_k: int
    top_p: float

    @property
    def is_plain(self) -> bool:
        """Whether all tokens can be drawn. Of the temperatures of a pass, float32, one that small is 0."""
        return self.top_k <= 0 and self.top_p >= 1 and self.temperature > 2**-150


@dataclass(frozen=True)
class DrawRules:
    """One entry for each row; what the host must know is known without asking the device."""

    temperatures: Tensor
    is_scaled: bool
    """Whether a temperature is not 1."""
    is_greedy: bool
    """Whether a temperature is 0."""
    cut: Tensor
    """The M rows with a ``top_k`` or ``top_p``."""
    top_ks: Tensor
    """``(M, 1)``; 0 is no limit."""
    top_ps: Tensor
    """``(M, 1)``"""

    @classmethod
    def of(cls, rules: Sequence[Rule], device: torch.device) -> "DrawRules":
        kinds = (np.float32, np.int64, np.float64)
        temperatures, top_ks, top_ps = (
            np.array(values, kind) for values, kind in zip(zip(*rules, strict=True), kinds, strict=True)
        )
        cut = np.flatnonzero((top_ks > 0) | (top_ps < 1))
        on_device = upload([temperatures, cut, top_ks[cut, None], top_ps[cut, None]], device)
        is_scaled, is_greedy = bool((temperatures != 1).any()), bool((temperatures == 0).any())
        return cls(on_device[0], is_scaled, is_greedy, *on_device[1:])


def derive_seed(seed: int, *path: int) -> int:
    """Derive the seed of one sample of a request, different from those of the other samples."""
    value = np.array([seed & (2**64 - 1)], np.uint64)
    for step in path:
        value = _mix(value + _GOLDEN * np.array([step + 1], np.uint64))
    return int(value[0])


def uniforms(seeds: list[int], positions: list[int]) -> np.ndarray:
    """Return a number in [0, 1) for each (seed, position), the same on every machine."""
    with np.errstate(over="ignore"):
        state = np.array(seeds, np.uint64) + _GOLDEN * (np.array(positions, np.uint64) + np.uint64(1))
        return (_mix(_mix(state)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def scaled_logprobs(logits_NV: Tensor, rules: DrawRules) -> Tensor:
    """Return log probabilities of the temperature-scaled distribution; overwrite ``logits_NV``."""
    if rules.is_scaled:
        divisors = torch.where(rules.temperatures == 0, 1.0, rules.temperatures)
        # A tiny temperature may overflow the division; the largest logit then takes everything.
        logits_NV = logits_NV.sub_(logits_NV.amax(-1, keepdim=True)).div_(divisors[:, None])
    return logits_NV.log_softmax(-1)


def choose(logits_NV: Tensor, rules: list[Rule], numbers_N: np.ndarray, k: int, native: Rowwise | None) -> list[Tensor]:
    """Draw one token for each row, which overwrites logits.

    Return tokens and their log probabilities, and with ``k`` the ``k`` most likely tokens and theirs. Compiled
    functions draw plain rows: what draws a row depends on its own rule alone.
    """
    others = [i for i, rule in enumerate(rules) if native is None or not rule.is_plain]
    if native is None or len(others) == len(rules):
        return _choose_by_torch(logits_NV, rules, numbers_N, k)
    temperatures_N = torch.tensor([rule.temperature if rule.is_plain else 1 for rule in rules], dtype=torch.float32)
    tokens_N, chosen_N, largest_N, logs_N = native.draw(logits_NV, temperatures_N, numbers_N)
    found = [tokens_N, chosen_N]
    if k:
        tops, values = best(logits_NV, k)
        # As compiled functions compute the log probability of the token that they draw.
        found += [tops, values.sub_(largest_N[:, None]).div_(temperatures_N[:, None]).sub_(logs_N[:, None])]
    if others:
        theirs = _choose_by_torch(logits_NV[others], [rules[i] for i in others], numbers_N[others], k)
        for ours, other in zip(found, theirs, strict=True):
            ours[others] = other
    return found


def _choose_by_torch(logits_NV: Tensor, rules: list[Rule], numbers_N: np.ndarray, k: int) -> list[Tensor]:
    on_device = DrawRules.of(rules, logits_NV.device)
    logprobs_NV = scaled_logprobs(logits_NV, on_device)
    tokens_N = draw(logprobs_NV, on_device, numbers_N)
    tops = best(logprobs_NV, k) if k else ()
    return [tokens_N, logprobs_NV.gather(1, tokens_N[:, None])[:, 0], *tops]


def draw(logprobs_NV: Tensor, rules: DrawRules, numbers_N: np.ndarray) -> Tensor:
    """Draw one token for each row by inverting its cumulative distribution at ``numbers_N``."""
    probabilities_NV = logprobs_NV.exp()
    size = max(1, _MAX_SORTED // probabilities_NV.shape[1])
    for rows, top_ks, top_ps in zip(*(x.split(size) for x in (rules.cut, rules.top_ks, rules.top_ps)), strict=True):
        if len(rows):
            probabilities_NV[rows] = _truncated(probabilities_NV[rows], top_ks, top_ps)
    (points_N,) = upload([numbers_N.astype(np.float32)], logprobs_NV.device)
    tokens = _invert(probabilities_NV, points_N)
    if not rules.is_greedy:
        return tokens
    return torch.where(rules.temperatures == 0, logprobs_NV.argmax(-1), tokens)


def _truncated(probabilities_MV: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the ``top_k`` likeliest tokens, of those the fewest whose mass reaches ``top_p``; ties go to lower ids."""
    order = torch.sort(probabilities_MV, descending=True, stable=True)
    ranks = torch.arange(probabilities_MV.shape[1], device=probabilities_MV.device)
    kept = order.values.masked_fill((top_ks > 0) & (ranks >= top_ks), 0)
    mass = kept.double().cumsum(-1)
    # A token is kept if the mass before it is not enough; the first one always is.
    is_enough = mass >= top_ps * mass[:, -1:]
    kept[:, 1:].masked_fill_(is_enough[:, :-1], 0)
    return torch.zeros_like(probabilities_MV).scatter_(1, order.indices, kept)


def _invert(weights_NV: Tensor, numbers_N: Tensor) -> Tensor:
    """Find the first token whose cumulative weight exceeds ``number * total``: first its block, then the token."""
    num_rows, size = weights_NV.shape
    padded = torch.nn.functional.pad(weights_NV, (0, -size % _BLOCK)).view(num_rows, -1, _BLOCK)
    cumulative_NB = padded.sum(-1).double().cumsum(-1)
    points = numbers_N.double()[:, None] * cumulative_NB[:, -1:]
    block_N1 = torch.searchsorted(cumulative_NB, points, right=True).clamp_(max=cumulative_NB.shape[1] - 1)
    before = torch.where(block_N1 > 0, cumulative_NB.gather(1, (block_N1 - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, block_N1[:, :, None].expand(-1, 1, _BLOCK))[:, 0]
    cumulative = inside.double().cumsum(-1)
    offset = torch.searchsorted(cumulative, points - before, right=True)
    # Rounding may point behind the last weight of the block; the last token with weight is meant.
    last = (inside > 0).int().mul(torch.arange(_BLOCK, device=inside.device)).amax(-1, keepdim=True)
    return (block_N1 * _BLOCK + torch.minimum(offset, last))[:, 0]


def best(logprobs_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most likely tokens of each row and their log probabilities, or logits."""
    values, tokens = logprobs_NV.topk(k, -1)
    return tokens, values
