"""Times as people read and write them."""

from datetime import UTC, datetime, timedelta

import pytest

from lorimer.cli.moments import ago, parse_duration, parse_moment
from lorimer.errors import InvalidInput

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "now"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (7199, "1 h ago"),
        (86_400 * 59, "59 d ago"),
        (86_400 * 60, "2025-12-31"),
        (-90, "in 1 min"),
        (-86_400 * 3, "in 3 d"),
    ],
)
def test_ago(seconds, text):
    assert ago(NOW - timedelta(seconds=seconds), NOW) == text


def test_time_without_a_zone_is_utc():
    assert ago(datetime(2026, 3, 1, 11), NOW) == "1 h ago"
    assert ago(None) == ""


@pytest.mark.parametrize(
    ("text", "seconds"), [("3600", 3600), ("90m", 5400), ("12h", 43_200), ("7d", 604_800), (" 1w ", 604_800)]
)
def test_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "-1d", "1.5h", "2026-13-01", "d", "9" * 20 + "d", "999999999w"])
def test_wrong_moment(text):
    with pytest.raises(InvalidInput, match="is no time"):
        parse_moment(text)


def test_moment():
    assert parse_moment("2026-01-31") == datetime(2026, 1, 31, tzinfo=UTC)
    assert parse_moment("2026-01-31T12:00+02:00") == datetime(2026, 1, 31, 10, tzinfo=UTC)
    assert abs(datetime.now(UTC) - timedelta(days=7) - parse_moment("7d")) < timedelta(minutes=1)
