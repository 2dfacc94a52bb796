"""Entries of the log of metrics as series: by name, in columns, the parts of a step of the engine told as one.

A long run has millions of values, so nothing here is done value by value. Which entries are read, and how many steps
were before them, is said by `metrics`.
"""

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lorimer.types.thinning import Columns, Flags, Floats, Integers, first_of_each, join

FIELDS = ("entry_id", "source", "number", "is_step", "weight", "at", "data")

encode = msgspec.msgpack.Encoder().encode  # numbers that are not finite stay what they are
decode = msgspec.msgpack.Decoder(dict[str, float]).decode

Indices = NDArray[np.intp]
Named = dict[str, tuple[Indices, Floats]]
"""By name: which entries have a value of it, by rising index, and these values."""


@dataclass(frozen=True)
class Entries:
    """Rows of the table in columns."""

    ids: Integers
    is_client: Flags
    numbers: Integers
    is_step: Flags
    weights: Integers
    times: Floats
    data: Sequence[bytes]

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> "Entries":
        """Of rows of `FIELDS`."""
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
        """These entries and others."""
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
    """What clients reported, in the order of the log."""
    return {
        name: join([Columns(entries.numbers[found], entries.times[found], values)])
        for name, (found, values) in _by_name(entries.data, names).items()
    }


def engine_series(
    entries: Entries, is_told: Flags, num_steps: int, names: Collection[str] | None
) -> dict[str, Columns]:
    """What operations answered, by rising number, after so many steps; of steps in which ``is_told`` has a value."""
    steps = num_steps + 1 + np.cumsum(entries.is_step) - entries.is_step
    times = entries.times[np.searchsorted(steps, steps, side="right") - 1]  # that of the step's last operation
    series = {}
    for name, (found, values) in _by_name(entries.data, names).items():
        starts = first_of_each(steps[found])
        told = np.logical_or.reduceat(is_told[found], starts)
        if told.any():
            at = found[starts]
            whole = Columns(steps[at], times[at], reduce_parts(name, values, entries.weights[found], starts))
            series[name] = whole.take(told)
    return series


def _by_name(data: Sequence[bytes], names: Collection[str] | None) -> Named:
    # Most entries have the same names in the same order, and become a table together.
    alike: dict[tuple[str, ...], tuple[list[int], array[float]]] = defaultdict(lambda: ([], array("d")))
    for index, entry in enumerate(data):
        values = decode(entry)
        indices, flat = alike[tuple(values)]
        indices.append(index)
        flat.extend(values.values())
    parts: dict[str, list[tuple[Indices, Floats]]] = defaultdict(list)
    for known, (indices, flat) in alike.items():
        table = np.frombuffer(flat, np.float64).reshape(len(indices), len(known)).T
        for name, column in zip(known, table, strict=True):
            if names is None or name in names:
                parts[name].append((np.array(indices, np.intp), column))
    return {name: _in_order(of_name) for name, of_name in parts.items()}


def _in_order(parts: Sequence[tuple[Indices, Floats]]) -> tuple[Indices, Floats]:
    if len(parts) == 1:
        return parts[0]
    indices, values = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    order = np.argsort(indices)
    return indices[order], values[order]


def reduce_parts(name: str, values: Floats, weights: Integers, starts: Indices) -> Floats:
    """`reduce_metric` of many steps together, whose parts begin at ``starts``; a single part is left as it is."""
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
