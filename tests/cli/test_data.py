"""``lorimer data check``: what it prints, and its exit code."""

import json
import logging

import pytest

from lorimer.client import tokenizers
from tests.cli.commands import lorimer, refused

ROWS = [{"prompt": f"Say {word}.", "completion": word} for word in "one two three four five six".split()]


@pytest.fixture
def check(base_url, tmp_path):
    def run(rows, *arguments, **variables):
        (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
        flags = ("-m", "lorimer/tiny", *arguments)
        return lorimer("data", "check", tmp_path / "d.jsonl", *flags, LORIMER_BASE_URL=base_url, **variables)

    return run


def test_good_rows(check):
    ended = check(ROWS)
    assert ended.exit_code == 0, ended.output
    assert "6, of which 1 are held out" in ended.stdout and "wrong" in ended.stdout and "nothing" in ended.stdout
    assert "[[one<|im_end|>]]" in ended.stdout or "[[two<|im_end|>]]" in ended.stdout


def test_trained_tokens_are_coloured(check):
    shown = check(ROWS, "--show", "1", NO_COLOR=None, FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="100").stdout
    assert "\x1b[1;4;92m" in shown and "[[" not in shown


def test_wrong_rows_fail_unless_allowed(check):
    ended = check([*ROWS, ROWS[0]], "--num-held-out", "0")
    assert ended.exit_code == 1 and "is the same as row 1" in ended.stdout
    assert check([*ROWS, ROWS[0]], "--num-held-out", "0", "--allow", "duplicate").exit_code == 0
    ended = check(ROWS, "--max-length", "4", "--json")
    found = json.loads(ended.stdout)
    assert ended.exit_code == 1 and {one["problem"] for one in found["findings"]} == {"nothing_trained"}
    assert found["previews"][0][0]["is_trained"] is False


def test_a_long_row_is_told_by_the_check_alone(check, monkeypatch):
    tokenizers._load.cache_clear()  # transformers warns once for each tokenizer
    heard = []
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler := logging.Handler()])
    monkeypatch.setattr(handler, "emit", heard.append)
    ended = check([*ROWS, {"prompt": "one two " * 1500, "completion": "three"}], "--num-held-out", "0")
    assert ended.exit_code == 1 and "1 nothing_trained" in ended.stdout
    assert heard == []


def test_wrong_options(check):
    assert "accepted are form, nothing_trained" in refused(check(ROWS, "--allow", "all"))[1]
    assert "accepted are last_assistant_message" in refused(check(ROWS, "--train-on", "none"))[1]
