"""Times as people read and write them: "3 h ago", "7d", "2026-01-31"."""

import re
from datetime import UTC, datetime, timedelta

from lorimer.errors import InvalidInput

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
STEPS = ((60, 1, "s"), (3600, 60, "min"), (86_400, 3600, "h"), (60 * 86_400, 86_400, "d"))
"""Below so many seconds, the unit is so many seconds and called so."""
DURATION = re.compile(r"(\d{1,9})([smhdw]?)", re.ASCII)


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """How far away a time is; the date where that is more than two months."""
    if moment is None:
        return ""
    seconds = ((now or datetime.now(UTC)) - aware(moment)).total_seconds()
    for below, unit, name in STEPS:
        if abs(seconds) < below:
            count = int(abs(seconds) // unit)
            if count == 0:
                return "now"
            return f"{count} {name} ago" if seconds > 0 else f"in {count} {name}"
    return f"{aware(moment):%Y-%m-%d}"


def moment_text(moment: datetime | None) -> str:
    """A time in full, and how far away it is."""
    return "" if moment is None else f"{aware(moment).astimezone():%Y-%m-%d %H:%M:%S %Z} ({ago(moment)})"


def aware(moment: datetime) -> datetime:
    """Servers of other makes may leave the zone out; they mean UTC."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def parse_duration(text: str) -> int:
    """Seconds of ``3600``, ``90m``, ``12h``, ``7d`` or ``4w``."""
    found = DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"{text!r} is no length of time; accepted are seconds, or a number with m, h, d or w")
    return int(found[1]) * UNITS[found[2] or "s"]


def parse_moment(text: str) -> datetime:
    """A date or time of ISO 8601, in UTC where it names no zone; or a duration, which is so long ago."""
    try:
        if DURATION.fullmatch(text.strip()) and not text.strip().isdigit():
            return datetime.now(UTC) - timedelta(seconds=parse_duration(text))
        return aware(datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        raise InvalidInput(
            f"{text!r} is no time; accepted are dates such as 2026-01-31 or 2026-01-31T12:00Z, and 7d for a week ago"
        ) from None
