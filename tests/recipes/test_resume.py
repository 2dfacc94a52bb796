"""Every recipe, killed twice without warning and started again with the same command, ends as if it had not been.

In the suite some are killed beside a server that lives on. All of them, each with its server in its own process, so
that the server dies with it: ``python -m pytest tests/recipes/test_resume.py -m slow``.
"""

import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import typer
from safetensors.numpy import load

import lorimer.recipes
from lorimer.cookbook.checkpoints import Checkpoints, read_jsonl
from lorimer.cookbook.word_problems import generate_problems
from tests.conformance.servers import environment
from tests.cookbook.weights import weights_of
from tests.recipes.conftest import recipe_command

DEADLINE_SECONDS = 200


@dataclass(frozen=True)
class Case:
    """A small run of a recipe, and how much it has stored when it is killed, and killed again."""

    kills: tuple[int, int]
    options: dict[str, object] = field(default_factory=dict)
    has_data: bool = False
    output: str | None = None
    """The file that it writes besides its log."""


RL = {"batch_size": 2, "group_size": 4}
SL = {"max_steps": 12, "batch_size": 4, "rank": 4, "num_held_out": 4, "save_every": 4}
# Most save every ten or twenty steps: the first kill comes before there is a checkpoint, the second one after.
CASES = {
    "sl_loop": Case((4, 8), {"steps": 16, "batch_size": 4, "rank": 4, "save_every": 4, "num_questions": 4}),
    "sl_basic": Case((1, 11), {"steps": 16, "batch_size": 4, "every": 9}),
    "chat_sft": Case((2, 7), SL, has_data=True),
    "teach_its_name": Case((2, 12), {"steps": 20, "batch_size": 4, "rank": 4}),
    "sweep": Case((4, 46), {"steps": 40, "batch_size": 2, "num_questions": 2, "learning_rates": 0.001, "ranks": "2,4"}),
    "methods": Case(
        (4, 14),
        {"methods": "lora-2,full", "steps": 8, "search_steps": 2, "max_rates": 3, "batch_size": 2, "num_held_out": 4}
        | {"eval_every": 4, "save_every": 3},
    ),
    "rl_loop": Case((2, 4), {"steps": 8, "save_every": 2, **RL}),
    "rl_basic": Case((2, 11), {"steps": 14}),
    "arithmetic_rl": Case((2, 21), {"steps": 28, "num_questions": 4, **RL}),
    "tool_use_rl": Case((2, 15), {"sft_steps": 4, "steps": 16, **RL}),
    "agent_rl": Case((2, 15), {"sft_steps": 4, "steps": 16, "num_questions": 4, **RL}),
    "self_play": Case((2, 27), {"sft_steps": 16, "steps": 16, "games": 4}),
    "rl_gsm8k": Case(
        (1, 23), {"sft_steps": 2, "steps": 28, "num_held_out": 4, "max_tokens": 24, **RL}, True, "model.txt"
    ),
    "sft_gsm8k": Case((2, 7), SL, has_data=True, output="model.txt"),
    "inference_gsm8k": Case((4, 20), {"max_tokens": 24, "temperature": 1.0, "concurrency": 2}, True, "output.jsonl"),
    "dpo": Case((2, 7), SL, output="model.txt"),
    "distill_on_policy": Case(
        (2, 12), {"teacher_steps": 4, "steps": 16, "batch_size": 2, "num_samples": 2, "rank": 4, "num_questions": 20}
    ),
    "prompt_distillation": Case(
        (2, 22), {"num_questions": 64, "num_held_out": 4, "batch_size": 4, "max_steps": 28, "rank": 4}
    ),
    "demo": Case((2, 26), {"supervised_steps": 4, "rl_steps": 28, "num_questions": 8, **RL}),
}
FAST = ["sl_basic", "rl_loop"]
EXACT = {"sl_basic"}
"""They draw nothing that is trained on, and send one batch at a time: they end the same to the bit."""


def test_no_recipe_is_left_out():
    recipes = {path.stem for path in Path(lorimer.recipes.__file__ or "").parent.glob("*.py")}
    assert set(CASES) == recipes - {"__init__", "eval_gsm8k"}, "eval_gsm8k reads a file and prints; it keeps nothing"


def options_of(recipe: str, log_dir: Path) -> dict[str, object]:
    """The command line of a run that is kept in ``log_dir``."""
    case = CASES[recipe]
    options = dict(case.options)
    if case.has_data:
        options["data"] = log_dir.with_name("problems.jsonl")
        rows = [json.dumps(row) for row in generate_problems(60)]
        log_dir.with_name("problems.jsonl").write_text("\n".join(rows), "utf-8")
    if case.output:
        options["output"] = log_dir / case.output
        log_dir.mkdir(exist_ok=True)
    return options if recipe == "inference_gsm8k" else {"log_dir": log_dir, **options}


def records(log_dir: Path) -> dict[str, Any]:
    """What a run left: by file, the lines of its metrics, transcripts and answers, without times, paths and ids."""
    found: dict[str, Any] = {}
    for path in sorted(log_dir.rglob("*.jsonl")):
        if path.name != "checkpoints.jsonl":
            found[str(path.relative_to(log_dir))] = [
                {key: value for key, value in line.items() if not re.search("time|second|episode_id", key)}
                for line in read_jsonl(path)
            ]
    for path in log_dir.glob("*.json"):
        note = json.loads(path.read_text("utf-8"))
        if "step" in note:
            found[path.name] = {key: value for key, value in note.items() if key != "path"}
    return found


def num_recorded(log_dir: Path) -> int:
    """How many steps or answers are stored."""
    notes = [json.loads(path.read_text("utf-8")).get("step", 0) for path in log_dir.glob("*.json")]
    logs = [path for path in log_dir.rglob("*.jsonl") if path.name in ("metrics.jsonl", "output.jsonl")]
    return sum(notes) + sum(len(read_jsonl(path)) for path in logs)


def kill_at(num_steps: int, log_dir: Path, pid: int, is_running: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while num_recorded(log_dir) < num_steps:
        assert is_running(), "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Equal but for rounding: how many requests share a pass depends on when they come, and rounds differently."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_same(ours, theirs, f"{where}/{place}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4), where
    else:
        assert found == expected, where


def wait_until_idle(base_url: str) -> None:
    """What a killed client had sent is still computed, and would share a pass with what comes next."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while httpx2.get(f"{base_url}/api/v1/overview", headers={"X-API-Key": "tml-local"}).json()["queue"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def conclusion(printed: str, log_dir: Path) -> list[str]:
    """The last lines that a recipe prints, without the names of its run."""
    text = re.sub(r"tinker://\S+", "tinker://", printed.replace(str(log_dir), "LOG"))
    return [line for line in text.splitlines() if line.strip()][-2:]


# ── beside a server that lives on ─────────────────────────────────────────────────────────────────────


def start(recipe: str, arguments: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    app = typer.Typer()
    app.command()(importlib.import_module(f"lorimer.recipes.{recipe}").main)
    app(arguments)


@pytest.fixture(scope="module")
def starting() -> Any:
    """Processes that begin with everything imported, so that a recipe is at work immediately."""
    context = multiprocessing.get_context("forkserver")
    tokenizers = "transformers.models.auto.tokenization_auto"
    context.set_forkserver_preload([tokenizers, *(f"lorimer.recipes.{recipe}" for recipe in CASES)])
    return context


@pytest.mark.parametrize("recipe", FAST)
def test_recipe_beside_a_server(recipe, starting, run_recipe, base_url, service, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = run_recipe(recipe, **options_of(recipe, whole))
    options = options_of(recipe, killed)
    command = recipe_command(recipe, base_url=base_url, **options)
    for num_steps in CASES[recipe].kills:
        process = starting.Process(target=start, args=(recipe, command[command.index("-m") + 2 :]))
        process.start()
        kill_at(num_steps, killed, process.pid, process.is_alive)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was killed too late"
        wait_until_idle(base_url)
    printed = run_recipe(recipe, **options)
    assert_same(records(killed), records(whole))
    if recipe in EXACT:
        assert records(killed) == records(whole)
    assert conclusion(printed, killed) == conclusion(expected, whole)
    assert printed.count("\n") < expected.count("\n"), "it went on, and did not begin anew"
    for log in whole.rglob("checkpoints.jsonl"):
        paths = [
            Checkpoints(directory / log.parent.relative_to(whole)).last().state_path for directory in (whole, killed)
        ]
        ours, theirs = (load(weights_of(service, path)) for path in paths)
        for name, weight in ours.items():
            assert recipe not in EXACT or (weight == theirs[name]).all(), name
            np.testing.assert_allclose(weight, theirs[name], atol=1e-3, err_msg=name)


# ── with its server ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CASES)
def test_recipe_and_its_server(recipe, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    surroundings = environment(LORIMER_DATA=str(tmp_path / "data"))

    def begin(log_dir: Path) -> "subprocess.Popen[str]":
        command = recipe_command(recipe, **options_of(recipe, log_dir))
        return subprocess.Popen(command, cwd=tmp_path, env=surroundings, stdout=subprocess.PIPE, text=True)

    def run(log_dir: Path) -> str:
        process = begin(log_dir)
        printed = process.communicate()[0]
        assert process.returncode == 0
        return printed

    expected = run(whole)
    for num_steps in CASES[recipe].kills:
        with begin(killed) as process:
            kill_at(num_steps, killed, process.pid, lambda of=process: of.poll() is None)
        assert process.returncode == -signal.SIGKILL, "it was killed too late"
    printed = run(killed)
    assert_same(records(killed), records(whole))
    assert conclusion(printed, killed) == conclusion(expected, whole)
