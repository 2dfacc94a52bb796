"""Drawing tokens from logits: temperature, top-k, top-p, seeds.

A draw depends on nothing but the row's own logits, its seed and its position, so a seeded sequence comes out the same
whatever else is in the batch. Log probabilities are those of the temperature-scaled distribution, before top-k and
top-p cut it, so that they can be compared with the trainer's; a greedy draw (temperature 0) reports temperature 1.

Legend: N rows, V vocabulary, K draws or best tokens of a row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_BLOCK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class DrawRules:
    """One entry for each row."""

    temperatures: Tensor
    top_ks: list[int]
    top_ps: list[float]

    @classmethod
    def of(cls, rules: list[tuple[float, int, float]], device: torch.device) -> "DrawRules":
        temperatures, top_ks, top_ps = zip(*rules, strict=True)
        return cls(torch.tensor(temperatures, device=device), list(top_ks), list(top_ps))


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


def scaled_logprobs(logits_NV: Tensor, temperatures: Tensor) -> Tensor:
    """Return log probabilities of the temperature-scaled distribution; overwrite ``logits_NV``."""
    if bool((temperatures != 1).any()):
        divisors = torch.where(temperatures == 0, 1.0, temperatures)
        # A tiny temperature may overflow the division; the largest logit then takes everything.
        logits_NV = logits_NV.sub_(logits_NV.amax(-1, keepdim=True)).div_(divisors[:, None])
    return logits_NV.log_softmax(-1)


def draw(logprobs_NV: Tensor, rules: DrawRules, numbers_N: np.ndarray) -> Tensor:
    """Draw one token for each row by inverting its cumulative distribution at ``numbers_N``."""
    probabilities_NV = logprobs_NV.exp()
    for row, (top_k, top_p) in enumerate(zip(rules.top_ks, rules.top_ps, strict=True)):
        if 0 < top_k < probabilities_NV.shape[1] or top_p < 1:
            _truncate_(probabilities_NV[row], top_k, top_p)
    tokens = _invert(probabilities_NV, torch.from_numpy(numbers_N).to(logprobs_NV.device, torch.float32))
    is_greedy_N = rules.temperatures == 0
    return torch.where(is_greedy_N, logprobs_NV.argmax(-1), tokens) if bool(is_greedy_N.any()) else tokens


def _truncate_(probabilities_V: Tensor, top_k: int, top_p: float) -> None:
    """Keep the ``top_k`` likeliest tokens, of those the fewest whose mass reaches ``top_p``; ties go to lower ids."""
    order = torch.sort(probabilities_V, descending=True, stable=True)
    kept = order.values[: top_k if top_k > 0 else None]
    mass = kept.double().cumsum(0)
    num_kept = int((mass < top_p * float(mass[-1])).sum()) + 1
    probabilities_V[order.indices[min(num_kept, len(kept)) :]] = 0


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
    """Return the k most likely tokens of each row and their log probabilities."""
    values, tokens = logprobs_NV.topk(k, -1)
    return tokens, values
