"""Series of points as columns, and downsampling of long series without losing spikes or gaps.

Buckets hold 2**n steps and start at multiples of that, so coarser buckets consist of whole finer ones: a series thinned
in parts, or earlier, can be thinned again without error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

POINTS_PER_BUCKET = 5
"""A bucket keeps its first, last, smallest, largest and first non-finite value."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """Points in ascending order of steps; ``steps_per_bucket`` is 1 if no point was dropped."""

    steps: Integers
    times: Floats
    values: Floats
    steps_per_bucket: int = 1

    def points(self) -> list[tuple[int, float, float]]:
        return list(zip(self.steps.tolist(), self.times.tolist(), self.values.tolist(), strict=True))

    def take(self, chosen: NDArray[np.intp] | Flags) -> "Columns":
        return replace(self, steps=self.steps[chosen], times=self.times[chosen], values=self.values[chosen])


def join(parts: Sequence[Columns]) -> Columns:
    """Concatenate the parts.

    Of points with the same step the last one wins, as a later part corrects an earlier one.
    """
    if len(parts) == 1 and (np.diff(parts[0].steps) > 0).all():
        return parts[0]
    whole = Columns(
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.values for part in parts]),
        max(part.steps_per_bucket for part in parts),
    )
    ordered = whole.take(np.argsort(whole.steps, kind="stable"))
    return ordered.take(np.append(ordered.steps[1:] != ordered.steps[:-1], True))


def thin(columns: Columns, max_points: int) -> Columns:
    """Keep at most ``max_points`` points, which must be `POINTS_PER_BUCKET` or more."""
    assert max_points >= POINTS_PER_BUCKET
    if len(columns.steps) <= max_points:
        return columns
    shift = (len(columns.steps) * POINTS_PER_BUCKET // max_points).bit_length() - 1  # a smaller shift cannot suffice
    starts = first_of_each(columns.steps >> shift)
    while len(starts) * POINTS_PER_BUCKET > max_points:
        shift += 1
        starts = first_of_each(columns.steps >> shift)
    kept = columns.take(_kept(columns.values, starts))
    return replace(kept, steps_per_bucket=max(2**shift, columns.steps_per_bucket))


def first_of_each(sorted_numbers: Integers) -> NDArray[np.intp]:
    """Return the indices at which a new number starts."""
    return np.flatnonzero(np.append(True, sorted_numbers[1:] != sorted_numbers[:-1])[: len(sorted_numbers)])


def _kept(values: Floats, starts: NDArray[np.intp]) -> NDArray[np.intp]:
    ends = np.append(starts[1:], len(values))
    bucket_of = np.repeat(np.arange(len(starts)), ends - starts)
    finite = np.isfinite(values)
    smallest = np.minimum.reduceat(np.where(finite, values, np.inf), starts)[bucket_of]
    largest = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)[bucket_of]

    def first(wanted: Flags) -> NDArray[np.intp]:
        """Return the first matching value of each bucket that has one."""
        found = np.flatnonzero(wanted)
        return found[first_of_each(bucket_of[found])]

    chosen = [starts, ends - 1, first(values == smallest), first(values == largest), first(~finite)]
    return np.unique(np.concatenate(chosen))
