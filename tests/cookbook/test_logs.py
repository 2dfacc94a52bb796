"""The log of a run: what is in its files, and what a resumed run makes of them."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from lorimer.cookbook import progress
from lorimer.cookbook.logs import open_log, read_metrics
from lorimer.errors import InvalidInput

CONFIG = {"rank": 4, "learning_rate": 1e-3}


def test_a_line_for_each_step(log_dir):
    with open_log(log_dir, config=CONFIG, sinks=["jsonl"]) as log:
        log.log({"loss": 1.5, "num_tokens": np.int64(3), "note": "hello"}, 0)
        assert read_metrics(log_dir) == [{"step": 0, "loss": 1.5, "num_tokens": 3, "note": "hello"}]
        log.log({"loss": math.nan, "norm": np.float32(0.5)}, 1)
    assert read_metrics(log_dir)[1] == {"step": 1, "loss": None, "norm": 0.5}
    assert json.loads((log_dir / "config.json").read_text("utf-8")) == CONFIG


def test_resumed_run_drops_what_it_computes_again(log_dir):
    with open_log(log_dir, config=CONFIG, sinks=["jsonl"]) as log:
        for step in range(5):
            log.log({"loss": step}, step)
    with (log_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "lo')  # what an interruption leaves
    with open_log(log_dir, config=CONFIG, resume_step=3, sinks=["jsonl"]) as log:
        log.log({"loss": 30}, 3)
    assert [line["loss"] for line in read_metrics(log_dir)] == [0, 1, 2, 30]


def test_changed_configuration_is_refused_with_the_difference(log_dir):
    open_log(log_dir, config=CONFIG, sinks=[]).close()
    changed = {"rank": 8, "learning_rate": 1e-3, "seed": 1}
    with pytest.raises(InvalidInput, match=r"rank was 4 and is 8; seed was None and is 1\. Give the same"):
        open_log(log_dir, config=changed, resume_step=2, sinks=[])
    open_log(log_dir, config=changed, resume_step=0, sinks=[]).close()  # nothing was saved: it begins anew


def test_lines_where_there_is_no_terminal(log_dir, capsys):
    with open_log(log_dir, config=CONFIG, total_steps=2, sinks=["console"]) as log:
        log.log({"loss": 1.23456, "num_tokens": 7} | {f"m{i}": i for i in range(20)}, 0)
        log.log({"loss": 1.0}, 1)
        log.log({"accuracy": 0.5}, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1/2  loss 1.235  num_tokens 7  m0 0  m1 1  m2 2  m3 3  m4 4  m5 5"
    assert lines[1:] == ["step 2/2  loss 1", "end  accuracy 0.5"]


def test_live_display_on_a_terminal():
    terminal = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    live = progress.LiveConsole(terminal, total_steps=4, resume_step=1)
    live.log({"loss": 1.25, "num_tokens": 1000}, 1)
    live.log({"loss": 0.75, "num_tokens": 1000}, 2)
    live.close()
    text = terminal.export_text()
    assert "3/4" in text
    assert "tokens/s" in text
    assert "loss" in text
    assert "0.75" in text
