"""Every member of the SDK has a test, every mark is true, and the page that says so is up to date."""

import pytest

import compatibility
from compatibility import MarkedTest, problems


def test_page_is_up_to_date():
    assert compatibility.current_page() == compatibility.PAGE.read_text("utf-8"), "run python tools/compatibility.py"


MEMBERS = {"RestClient": ["RestClient.whoami", "RestClient.get_session"], "tinker": ["tinker run list"]}
WHOAMI = MarkedTest("test_a", "test_whoami", ("RestClient.whoami",), "rest.whoami().result()")
SESSION = MarkedTest("test_a", "test_session", ("RestClient.get_session",), "rest.get_session('a').result()")
RUNS = MarkedTest("test_b", "test_runs", ("tinker run list",), "run('run', 'list')")


def test_planted_marks_that_are_true_are_accepted():
    assert problems(MEMBERS, [WHOAMI, SESSION, RUNS]) == []


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ([WHOAMI, RUNS], "RestClient.get_session has no test"),
        (
            [WHOAMI, SESSION, RUNS, MarkedTest("test_a", "test_x", ("RestClient.gone",), "a.gone()")],
            "RestClient.gone is marked",
        ),
        ([WHOAMI, MarkedTest("test_a", "test_session", ("RestClient.get_session",), "pass"), RUNS], "does not use it"),
        ([WHOAMI, SESSION, MarkedTest("test_b", "test_runs", ("tinker run list",), "run('run')")], "does not use it"),
    ],
    ids=["missing", "unknown", "unused", "unused-command"],
)
def test_planted_problems_are_found(found, named):
    assert any(named in problem for problem in problems(MEMBERS, found))
