"""The recipes of reinforcement learning, two steps of each; and one that is killed and started again."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.word_problems import generate_problems
from tests.conformance.servers import environment
from tests.recipes.conftest import recipe_command

SMALL = {"steps": 2, "batch_size": 2, "group_size": 4}


def test_rl_loop(run_recipe, tmp_path):
    printed = run_recipe("rl_loop", save_every=1, **SMALL)
    assert "step 2/2" in printed
    state = json.loads((tmp_path / "log" / "state.json").read_text())
    assert state["step"] == len(state["rewards"]) == 2
    printed = run_recipe("rl_loop", save_every=1, **SMALL | {"steps": 3})
    assert "step 3/3" in printed
    assert "step 2/3" not in printed


def test_rl_basic(run_recipe, tmp_path):
    assert "trained: tinker://" in run_recipe("rl_basic", **SMALL)
    assert len(read_metrics(tmp_path / "log")) == 2


def test_arithmetic_rl(run_recipe, tmp_path):
    printed = run_recipe("arithmetic_rl", eval_every=2, **SMALL)
    assert "right answers to 200 sums never seen" in printed
    first, *_, last = read_metrics(tmp_path / "log")
    assert 0.1 < first["test/correct"] < 0.3, "a fifth, as docs/tiny.md says of the base model"
    assert "test/correct" in last


def test_tool_use_rl(run_recipe, tmp_path):
    printed = run_recipe("tool_use_rl", sft_steps=2, eval_every=2, **SMALL)
    assert "reward for 100 products never seen" in printed
    assert read_metrics(tmp_path / "log" / "rl")[0]["env/all/turns_per_episode"] >= 1


def test_self_play(run_recipe, tmp_path):
    printed = run_recipe("self_play", sft_steps=2, steps=2, groups=2, games=2)
    assert "winning move is found, two" in printed
    assert {"one/won", "two/won"} <= read_metrics(tmp_path / "log" / "rl")[-1].keys()


def test_rl_gsm8k(run_recipe, tmp_path):
    """Generated problems, a grader of one's own, and a second run that begins with the first one's model."""
    (tmp_path / "my_grader.py").write_text("def grade(reply, answer):\n    return 1 / (1 + len(reply))\n")
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in generate_problems(12)))
    options = SMALL | {"num_held_out": 4, "max_tokens": 24, "output": tmp_path / "model.txt"}
    printed = run_recipe("rl_gsm8k", **options)
    assert "the problems are generated" in printed
    reference = (tmp_path / "model.txt").read_text().strip()
    assert f"model: {reference}" in printed
    more = {"start_from": tmp_path / "model.txt", "grader": "my_grader:grade", "data": data, "off_policy": 1}
    run_recipe("rl_gsm8k", log_dir=tmp_path / "more", **options | more)
    assert (tmp_path / "model.txt").read_text().strip() != reference
    lines = read_metrics(tmp_path / "more")
    assert sum(line.get("grader/graded", 0) for line in lines) >= 2 * 8
    assert all(0 < line["env/all/correct"] <= 1 for line in lines[:2])


@pytest.mark.parametrize("recipe", ["rl_basic"])
def test_killed_recipe_goes_on_and_ends_as_if_it_had_not_been(recipe, run_recipe, base_url, tmp_path):
    options = SMALL | {"steps": 14, "base_url": base_url}
    run_recipe(recipe, log_dir=tmp_path / "whole", **options)
    command = recipe_command(recipe, log_dir=tmp_path / "killed", **options)
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    wait_until(lambda: len(lines(tmp_path / "killed")) >= 12, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(lines(tmp_path / "killed")) < 14, "it was killed too late"
    run_recipe(recipe, log_dir=tmp_path / "killed", **options)
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")


def lines(log_dir: Path) -> list[dict[str, float]]:
    """What a run logged, without times."""
    names = ["step", "env/all/reward/total", "env/all/total_ac_tokens", "optim/num_data", "optim/entropy"]
    return [{name: round(line[name], 4) for name in names if name in line} for line in read_metrics(log_dir)]


def wait_until(is_true, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 100
    while not is_true():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < deadline
        time.sleep(0.005)
