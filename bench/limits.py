"""Measures the limits of the machine: the time of a model's matrix products alone, and the slowdown of bfloat16.

The limit of a training step is the forward product and the product with the transposed weight of every linear layer,
and the six products of its LoRA pair, with torch's own kernels: no attention, norm, softmax, optimiser or Python.
"""

import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.models import RANK

MAX_SLOWDOWN = 3.0


def bfloat16_slowdown(seconds: float = 1.0) -> float:
    """Return the time of a bfloat16 product over float32, for training or for decoding, whichever is smaller."""
    return min(
        _probe(torch.bfloat16, rows, seconds / 4) / _probe(torch.float32, rows, seconds / 4) for rows in (16, 512)
    )


def gemm_seconds(linear_shapes: list[tuple[int, int]], num_tokens: int, dtype: torch.dtype) -> float:
    """Return the time of the products of one training step over ``num_tokens``, each the best of a few calls."""
    total = 0.0
    for (out_features, in_features), count in Counter(linear_shapes).items():
        x, d_y = (torch.ones(num_tokens, n, dtype=dtype) for n in (in_features, out_features))
        w, inner = torch.ones(out_features, in_features, dtype=dtype), torch.ones(num_tokens, RANK, dtype=dtype)
        a, b = torch.ones(RANK, in_features, dtype=dtype), torch.ones(out_features, RANK, dtype=dtype)
        products: list[tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor]] = [
            (F.linear, x, w),
            (torch.mm, d_y, w),
            (F.linear, x, a),
            (F.linear, inner, b),
            (torch.mm, d_y, b),
            (torch.mm, inner, a),
            (torch.mm, inner.t(), x),
            (torch.mm, d_y.t(), inner),
        ]
        total += count * sum(_best(function, left, right, 0.02) for function, left, right in products)
    return total


def _probe(dtype: torch.dtype, rows: int, seconds: float) -> float:
    return _best(F.linear, torch.ones(rows, 512, dtype=dtype), torch.ones(1536, 512, dtype=dtype), seconds)


def _best(function: Callable[..., torch.Tensor], left: torch.Tensor, right: torch.Tensor, seconds: float) -> float:
    """Return the shortest of at least three calls after a warm-up call."""
    function(left, right)
    best, num_calls, stop = float("inf"), 0, time.perf_counter() + seconds
    while num_calls < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        function(left, right)
        best = min(best, time.perf_counter() - start)
        num_calls += 1
    return best
