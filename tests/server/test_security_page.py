"""The tests that SECURITY.md names are there, and `make test-all` or `make faults` runs them."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "SECURITY.md"
FAULTS = "faults/"
"""What `make faults` runs, with its slow tests."""


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


def left_out(text: str) -> list[str]:
    """Return the named tests that neither `make test-all` nor `make faults` runs: slow ones of other folders."""
    named = set(re.findall(r"`([\w/.]+\.py)::(test_\w+)`", text))
    found = []
    for path in sorted({path for path, _ in named if not path.startswith(FAULTS)}):
        for node in ast.walk(ast.parse((TESTS / path).read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (path, node.name) in named:
                slow = any(ast.unparse(one) == "pytest.mark.slow" for one in node.decorator_list)
                found += [f"{path}::{node.name}"] if slow else []
    return found


def test_every_named_test_is_run():
    text = PAGE.read_text("utf-8")
    assert "`make test-all` runs them, `make faults` the slow ones" in text
    assert left_out(text) == []


def test_a_planted_slow_test_is_found():
    slow = "cli/test_demo.py::test_examples_show_that_trying_helps"
    assert left_out(f"`{slow}`, `faults/test_kills.py::test_few_kills`") == [slow]


def test_a_planted_name_is_missed():
    assert missing("`server/test_auth.py::test_nothing` and `server/none.py::test_x`") == [
        "server/test_auth.py::test_nothing",
        "server/none.py::test_x",
    ]
