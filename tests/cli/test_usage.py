"""``lorimer usage`` counts what a run used."""

from datetime import UTC, datetime

import pytest

from tests.cli.conftest import MODEL

COUNTS = ("trained_tokens", "sampled_tokens", "prompt_tokens", "cached_prompt_tokens")


def totals(rows):
    return {name: sum(row[name] for row in rows) for name in COUNTS}


def test_of_a_session(alice, trained):
    rows = alice.json("usage", "--by", "session", "--from", "1h")["usage"]
    (row,) = [row for row in rows if row["session"] == trained.session_id]
    assert (row["trained_tokens"], row["sampled_tokens"]) == (19, 3)
    assert row["prompt_tokens"] + row["cached_prompt_tokens"] == 2


def test_by_model(alice, trained):
    found = alice.json("usage")
    (row,) = found["usage"]
    assert row["model"] == MODEL
    assert row["trained_tokens"] == 19
    assert row["sampled_tokens"] >= 3
    assert row["checkpoints"] >= 3
    assert found["storage"]["checkpoint_count"] >= 3 and found["storage"]["size_bytes"] > 0
    shown = alice("usage")
    assert MODEL in shown and " 19 " in shown and "checkpoints are kept" in shown


@pytest.mark.parametrize("by", ["session", "project", "user", "day", "hour"])
def test_by_anything_sums_to_the_same(alice, trained, by):
    rows = alice.json("usage", "--by", by, "--from", "1h")["usage"]
    assert totals(rows) == totals(alice.json("usage", "--from", "1h")["usage"])
    expected = {"session": trained.session_id, "day": f"{datetime.now(UTC):%Y-%m-%d}", "user": "alice"}
    assert by not in expected or expected[by] in [row[by] for row in rows]


def test_longer_than_a_server_answers_at_once(alice, trained):
    found = alice.json("usage", "--from", "40d")
    assert [row["trained_tokens"] for row in found["usage"]] == [19]


def test_time_without_use(alice, trained):
    assert alice.json("usage", "--from", "2020-01-01", "--to", "2020-01-02")["usage"] == []
    assert "total" in alice("usage", "--from", "2020-01-01", "--to", "2020-01-02")


def test_time_that_ends_before_it_begins(alice):
    code, line = alice.refused("usage", "--from", "2020-01-02", "--to", "2020-01-01")
    assert (code, "is not before" in line) == (2, True)
