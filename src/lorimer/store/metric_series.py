"""Turns metric log entries into series by name, as columns, merging the parts of an engine step into one point.

A long run has millions of values, so everything is vectorized. `metrics` chooses the entries and counts the steps
before them.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lorimer.types.thinning import Columns, Flags, Floats, Integers, first_of_each, join

FIELDS = ("entry_id", "source", "number", "is_step", "weight", "at", "data")

encode = msgspec.msgpack.Encoder().encode  # msgpack keeps NaN and infinities
decode = msgspec.msgpack.Decoder(dict[str, float]).decode

Indices = NDArray[np.intp]
Named = dict[str, tuple[Indices, Floats]]
"""By name: the ascending indices of the entries that have a value, and the values."""


@dataclass(frozen=True)
class Entries:
    """Rows of the table as columns."""

    ids: Integers
    is_client: Flags
    numbers: Integers
    is_step: Flags
    weights: Integers
    times: Floats
    data: Sequence[bytes]

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> "Entries":
        """Build from rows of `FIELDS`."""
        return cls.of_columns(list(zip(*rows, strict=True)) or [()] * len(FIELDS))

    @classmethod
    def of_columns(cls, columns: Sequence[Sequence[Any]]) -> "Entries":
        ids, sources, numbers, is_step, weights, times, data = columns
        return cls(
            np.array(ids, np.int64),
            np.array([source == "client" for source in sources], np.bool_),
            np.array(numbers, np.int64),
            np.array(is_step, np.bool_),
            np.array(weights, np.int64),
            np.array(times, np.float64),
            data,
        )

    def then(self, other: "Entries") -> "Entries":
        """Concatenate these entries and others."""
        if not len(self.ids):
            return other
        return Entries(
            np.append(self.ids, other.ids),
            np.append(self.is_client, other.is_client),
            np.append(self.numbers, other.numbers),
            np.append(self.is_step, other.is_step),
            np.append(self.weights, other.weights),
            np.append(self.times, other.times),
            [*self.data, *other.data],
        )

    def take(self, chosen: Indices) -> "Entries":
        return Entries(
            self.ids[chosen],
            self.is_client[chosen],
            self.numbers[chosen],
            self.is_step[chosen],
            self.weights[chosen],
            self.times[chosen],
            [self.data[index] for index in chosen],
        )


def client_series(entries: Entries, names: Collection[str] | None) -> dict[str, Columns]:
    """Return the series that clients reported, in the order of the log."""
    by_name = _by_name(entries.data, names)
    axes: dict[int, tuple[Integers, Floats, bool]] = {}  # computed once for metrics that are in the same entries
    series = {}
    for name, (found, values) in by_name.items():
        if (axis := axes.get(id(found))) is None:
            steps = entries.numbers[found]
            axis = axes[id(found)] = steps, entries.times[found], bool((np.diff(steps) > 0).all())
        steps, times, is_ascending = axis
        columns = Columns(steps, times, values)
        series[name] = columns if is_ascending else join([columns])
    return series


def engine_series(
    entries: Entries,
    is_changed: Flags,
    num_steps: int,
    names: Collection[str] | None,
    place: Callable[[Integers], Integers] | None = None,
) -> dict[str, Columns]:
    """Return the series of operations, ordered by number, after ``num_steps`` optimizer steps.

    Only steps with an ``is_changed`` value. ``place`` returns the steps that optimizer steps belong to, in order.
    """
    steps = num_steps + np.cumsum(entries.is_step) - entries.is_step
    steps = steps if place is None else place(steps)
    times = entries.times[np.searchsorted(steps, steps, side="right") - 1]  # the time of the step's last operation
    series = {}
    for name, (found, values) in _by_name(entries.data, names).items():
        starts = first_of_each(steps[found])
        changed = np.logical_or.reduceat(is_changed[found], starts)
        if changed.any():
            at = found[starts]
            whole = Columns(steps[at], times[at], reduce_parts(name, values, entries.weights[found], starts))
            series[name] = whole.take(changed)
    return series


def _by_name(data: Sequence[bytes], names: Collection[str] | None) -> Named:
    # Most entries have the same names in the same order and are decoded into one table.
    alike: dict[tuple[str, ...], tuple[list[int], array[float]]] = defaultdict(lambda: ([], array("d")))
    for index, entry in enumerate(data):
        values = decode(entry)
        indices, flat = alike[tuple(values)]
        indices.append(index)
        flat.extend(values.values())
    parts: dict[str, list[tuple[Indices, Floats]]] = defaultdict(list)
    for known, (indices, flat) in alike.items():
        table, chosen = np.frombuffer(flat, np.float64).reshape(len(indices), len(known)).T, np.array(indices, np.intp)
        for name, column in zip(known, table, strict=True):
            if names is None or name in names:
                parts[name].append((chosen, column))
    return {name: _in_order(of_name) for name, of_name in parts.items()}


def _in_order(parts: Sequence[tuple[Indices, Floats]]) -> tuple[Indices, Floats]:
    if len(parts) == 1:
        return parts[0]
    indices, values = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    order = np.argsort(indices)
    return indices[order], values[order]


def reduce_parts(name: str, values: Floats, weights: Integers, starts: Indices) -> Floats:
    """Apply `reduce_metric` to many steps, whose parts begin at ``starts``. A single part is unchanged."""
    ends = np.append(starts[1:], len(values))
    if len(starts) == len(values):
        return values
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        reduced = _reduce(name.rpartition(":")[2] if ":" in name else "", values, weights, starts, ends)
    return np.where(ends - starts == 1, values[starts], reduced)


def _reduce(how: str, values: Floats, weights: Integers, starts: Indices, ends: Indices) -> Floats:
    match how:
        case "sum":
            return np.add.reduceat(values, starts)
        case "min":
            return np.minimum.reduceat(values, starts)
        case "max":
            return np.maximum.reduceat(values, starts)
        case "mean":
            return np.add.reduceat(values * weights, starts) / np.add.reduceat(weights, starts)
        case "slack":
            mean = _reduce("mean", values, weights, starts, ends)
            return np.maximum.reduceat(values, starts) - mean
    return values[ends - 1]
