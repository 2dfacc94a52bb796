"""Counts what a JSON body holds, on its bytes, before any object is built from it."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorimer.errors import InvalidInput, TooLarge

_PART_BYTES = 1 << 17
_NAMED_BYTES = 1 << 16
"""In larger bodies a duplicate key is not searched by name, which would take longer than all other checks."""
_QUOTE, _COMMA, _COLON = b'",:'
_CONTAINERS = frozenset({dict, list})
_OPEN, _CLOSE, _BRACE_BIT = 0x7B, 0x7D, 0x20
"""``[`` and ``]`` differ from ``{`` and ``}`` in one bit."""


@dataclass(frozen=True)
class JsonLimits:
    """What a JSON body may hold."""

    depth: int
    values: int
    """Values of all kinds, containers included."""
    containers: int
    """Lists and objects, which cost far more than numbers."""
    setting: str = "max_json_values"
    """The setting that an operator raises to accept more values."""


@dataclass
class Counts:
    """Counts of tokens outside strings."""

    containers: int = 0
    commas: int = 0
    keys: int = 0
    """The number of colons: every key has one."""
    depth: int = 0

    @property
    def values(self) -> int:
        """An upper bound on the number of values."""
        return 1 + self.commas + self.containers


def check_json(body: bytes, limits: JsonLimits) -> Counts:
    """Refuse a body that holds too much. Return its counts, exact or upper bounds.

    First counts characters everywhere, including strings, which is many times faster and suffices for most bodies.
    """
    counts = Counts(body.count(b"[") + body.count(b"{"), body.count(b","), body.count(b":"))
    if counts.containers > limits.depth or counts.values > limits.values or counts.containers > limits.containers:
        counts = count_outside_strings(body, limits)
    return counts


def count_outside_strings(body: bytes, limits: JsonLimits | None = None) -> Counts:
    """Count exactly. With ``limits``, refuse the body as soon as one is exceeded."""
    if b"\\" in body:  # remove escaped backslashes, then escaped quotes
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    whole = np.frombuffer(body, np.uint8)
    counts = Counts()
    level, quotes = 0, 0
    for start in range(0, len(whole), _PART_BYTES):
        part = whole[start : start + _PART_BYTES]
        is_inside = np.cumsum(part == _QUOTE, dtype=np.uint8)
        is_inside += quotes
        is_inside &= 1
        quotes = int(is_inside[-1])
        outside = part[is_inside == 0]
        brackets = outside | _BRACE_BIT
        opens, closes = brackets == _OPEN, brackets == _CLOSE
        counts.containers += int(np.count_nonzero(opens))
        counts.commas += int(np.count_nonzero(outside == _COMMA))
        counts.keys += int(np.count_nonzero(outside == _COLON))
        if len(outside):
            levels = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32)
            counts.depth = max(counts.depth, level + int(levels.max()))
            level += int(levels[-1])
        if limits is not None:
            _check(counts, limits)
    return counts


def _check(counts: Counts, limits: JsonLimits) -> None:
    if counts.depth > limits.depth:
        raise InvalidInput(f"it is nested deeper than {limits.depth} levels")
    for what, number, maximum in (
        ("lists and objects", counts.containers, limits.containers),
        ("values", counts.values, limits.values),
    ):
        if number > maximum:
            raise TooLarge(f"the body holds more than {maximum} {what}; fewer are accepted here ({limits.setting})")


def refuse_doubled_keys(body: bytes, value: Any, counts: Counts) -> None:
    """Refuse a body with a duplicate key: ``value``, parsed from it, then has fewer keys than the body."""
    num_keys = count_keys(value)
    if num_keys < counts.keys and num_keys < count_outside_strings(body).keys:
        raise InvalidInput(f"{_doubled_key(body)} comes twice")


def count_keys(value: Any) -> int:
    """Count the keys of all objects."""
    num_keys, left = 0, [value] if type(value) in _CONTAINERS else []
    while left:
        item = left.pop()
        if isinstance(item, dict):
            num_keys += len(item)
            item = item.values()
        # Lists of numbers are long, so their types are checked in one pass.
        if not _CONTAINERS.isdisjoint(map(type, item)):
            left += [child for child in item if type(child) in _CONTAINERS]
    return num_keys


def _doubled_key(body: bytes) -> str:
    found: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> None:
        name, number = Counter(name for name, _ in pairs).most_common(1)[0] if pairs else ("", 0)
        if number > 1:
            found.append(name)

    if len(body) <= _NAMED_BYTES:
        json.loads(body, object_pairs_hook=look)
    return f"key {found[0][:80]!r}" if found else "a key of one object"
