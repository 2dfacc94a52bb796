"""``lorimer usage`` counts what a run used."""

from datetime import UTC, datetime

import pytest

from tests.cli.conftest import MODEL


def test_by_model(alice, trained):
    found = alice.json("usage")
    (row,) = found["usage"]
    assert row["model"] == MODEL
    assert row["trained_tokens"] == 19
    assert row["sampled_tokens"] == 3
    assert row["prompt_tokens"] + row["cached_prompt_tokens"] == 2
    assert row["checkpoints"] >= 3
    assert found["storage"]["checkpoint_count"] >= 3 and found["storage"]["size_bytes"] > 0
    shown = alice("usage")
    assert MODEL in shown and " 19 " in shown and "checkpoints are kept" in shown


@pytest.mark.parametrize("by", ["session", "project", "user", "day", "hour"])
def test_by_anything_sums_to_the_same(alice, trained, by):
    rows = alice.json("usage", "--by", by, "--from", "1h")["usage"]
    assert sum(row["trained_tokens"] for row in rows) == 19
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    expected = {"session": trained.session_id, "day": today, "user": "alice"}
    assert by not in expected or rows[-1][by] == expected[by]


def test_longer_than_a_server_answers_at_once(alice, trained):
    found = alice.json("usage", "--from", "40d")
    assert [row["trained_tokens"] for row in found["usage"]] == [19]


def test_time_without_use(alice, trained):
    assert alice.json("usage", "--from", "2020-01-01", "--to", "2020-01-02")["usage"] == []
    assert "total" in alice("usage", "--from", "2020-01-01", "--to", "2020-01-02")


def test_time_that_ends_before_it_begins(alice):
    code, line = alice.refused("usage", "--from", "2020-01-02", "--to", "2020-01-01")
    assert (code, "is not before" in line) == (2, True)
