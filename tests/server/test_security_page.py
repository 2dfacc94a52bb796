"""The tests that SECURITY.md names are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "SECURITY.md"


def missing(text: str) -> list[str]:
    named = re.findall(r"`([\w/.]+\.py)::(test_\w+)`", text)
    return [
        f"{path}::{name}"
        for path, name in named
        if not (TESTS / path).exists() or not re.search(rf"def {name}\(", (TESTS / path).read_text("utf-8"))
    ]


def test_every_named_test_exists():
    text = PAGE.read_text("utf-8")
    assert missing(text) == []
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| attack", "| fault"))
    ]
    assert len(rows) > 50
    assert [row for row in rows if "::test_" not in row] == []


def test_a_planted_name_is_missed():
    assert missing("`server/test_auth.py::test_nothing` and `server/none.py::test_x`") == [
        "server/test_auth.py::test_nothing",
        "server/none.py::test_x",
    ]
