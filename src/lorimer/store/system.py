"""Samples of the machine and its processes over time: as taken for two hours, averaged by the minute for two days, and
by ten minutes for eight days.

A row is one sample of one process (``source``). Coarser rows are made from the finer ones in the database, so that a
killed process loses none. `server.system` takes the samples.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, func, select

from lorimer.store.tables import insert, system_samples

Range = Literal["hour", "day", "week"]
RAW = 0
"""The period of samples as they were taken."""
KEPT_SECONDS = {RAW: 2 * 3600, 60: 2 * 86_400, 600: 8 * 86_400}
"""How long rows of each period are kept."""
SHOWN: dict[Range, tuple[int, int]] = {"hour": (RAW, 3600), "day": (60, 86_400), "week": (600, 7 * 86_400)}
"""The period and the seconds of each range."""

Point = tuple[float, float]
"""Mean and maximum."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Point]).decode


def add(c: Connection, source: str, at: int, values: Mapping[str, float]) -> None:
    """Store a sample of the second ``at``; roll up finished minutes and delete what is too old once a minute."""
    last = _last(c, RAW, source)
    _put(c, RAW, source, at, {name: (value, value) for name, value in values.items()})
    if last is None or last // 60 != at // 60:
        roll_up(c, source, RAW, 60, at)
        roll_up(c, source, 60, 600, at)
        for period, seconds in KEPT_SECONDS.items():
            c.execute(delete(system_samples).where(*_of(period), system_samples.c.at < at - seconds))


def roll_up(c: Connection, source: str, finer: int, period: int, now: int) -> None:
    """Make the rows of a period from the finer rows of buckets that ended since the last one."""
    last = _last(c, period, source)
    first = now - KEPT_SECONDS[finer] if last is None else last + period
    rows = select(system_samples.c.at, system_samples.c.data).where(
        *_of(finer, source), system_samples.c.at >= first, system_samples.c.at < now - now % period
    )
    buckets: dict[int, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for row in c.execute(rows.order_by(system_samples.c.at)):
        for name, point in _decode(row.data).items():
            buckets[row.at - row.at % period][name].append(point)
    for at, series in buckets.items():
        means = {
            name: (sum(mean for mean, _ in points) / len(points), max(most for _, most in points))
            for name, points in series.items()
        }
        _put(c, period, source, at, means)


def read(
    c: Connection, chosen: Range, now: int, after: int | None = None
) -> dict[tuple[str, str], list[tuple[int, float, float]]]:
    """Return ``(second, mean, maximum)`` by source and name, oldest first; with ``after`` only later ones."""
    period, seconds = SHOWN[chosen]
    first = now - seconds if after is None else max(after + 1, now - seconds)
    query = select(system_samples).where(*_of(period), system_samples.c.at >= first)
    found: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for row in c.execute(query.order_by(system_samples.c.at)):
        for name, (mean, most) in _decode(row.data).items():
            found[row.source, name].append((row.at, mean, most))
    return dict(sorted(found.items()))


def _put(c: Connection, period: int, source: str, at: int, points: Mapping[str, Point]) -> None:
    row = {"period": period, "source": source, "at": at, "data": _encode(points)}
    new = insert(c, system_samples).values(row)
    key = [system_samples.c.period, system_samples.c.source, system_samples.c.at]
    c.execute(new.on_conflict_do_update(index_elements=key, set_={"data": row["data"]}))


def _last(c: Connection, period: int, source: str) -> int | None:
    return c.execute(select(func.max(system_samples.c.at)).where(*_of(period, source))).scalar()


def _of(period: int, source: str | None = None) -> list[ColumnElement[bool]]:
    return [system_samples.c.period == period, *([] if source is None else [system_samples.c.source == source])]
