"""Every recipe trains a model under whatever name it is served, says where it can be watched, and what it resumes."""

import json
import re

import pytest

from lorimer.cookbook.word_problems import generate_problems
from tests.conftest import ODD_NAME as NAME

RL: dict[str, object] = {"batch_size": 2, "group_size": 2}
SL: dict[str, object] = {"max_steps": 2, "batch_size": 2, "rank": 4, "num_held_out": 2}
OPTIONS: dict[str, dict[str, object]] = {
    "sl_loop": {"steps": 2, "batch_size": 2, "num_questions": 2, "save_every": 1},
    "sl_basic": {"steps": 2, "batch_size": 2},
    "chat_sft": SL,
    "teach_its_name": {"steps": 2, "batch_size": 2},
    "sweep": {"steps": 2, "batch_size": 2, "num_questions": 2, "learning_rates": "1e-3", "ranks": "2"},
    "methods": {"methods": "lora-2", "max_rates": 1, "steps": 2, "batch_size": 2, "num_held_out": 2},
    "rl_loop": {"steps": 2, **RL},
    "rl_basic": {"steps": 2},
    "arithmetic_rl": {"steps": 2, "num_questions": 2, **RL},
    "tool_use_rl": {"sft_steps": 2, "steps": 2, **RL},
    "self_play": {"sft_steps": 2, "steps": 2, "games": 2},
    "rl_gsm8k": {"sft_steps": 2, "steps": 2, "num_held_out": 2, "max_tokens": 8, **RL},
    "sft_gsm8k": SL,
    "inference_gsm8k": {"max_tokens": 4, "limit": 2},
    "dpo": SL,
    "distill_on_policy": {
        "teacher_steps": 2,
        "steps": 2,
        "batch_size": 2,
        "num_samples": 2,
        "rank": 4,
        "num_questions": 2,
    },
    "prompt_distillation": {"num_questions": 4, "num_held_out": 2, "batch_size": 2, "max_steps": 2, "rank": 4},
    "demo": {"supervised_steps": 2, "rl_steps": 2, "num_questions": 4, **RL},
}
QUICK = {"sl_loop", "chat_sft", "rl_gsm8k", "sft_gsm8k"}
WITH_DATA = {"chat_sft", "sft_gsm8k", "rl_gsm8k", "inference_gsm8k"}


@pytest.fixture(scope="module")
def odd_url(base_url):
    return base_url


@pytest.mark.parametrize(
    "recipe", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_recipe_with_a_model_of_any_name(recipe, odd_url, run_recipe, tmp_path):
    options = {"model": NAME, "base_url": odd_url, **OPTIONS[recipe]}
    if recipe in WITH_DATA:
        data = tmp_path / "data.jsonl"
        data.write_text("\n".join(json.dumps(row) for row in generate_problems(20)), "utf-8")
        options["data"] = data
    printed = run_recipe(recipe, **options)
    assert printed.count(f"console: {odd_url}/console/runs\n") == 2, printed
    assert printed.index("console: ") == 0


def test_rate_may_be_given_for_a_model_of_unknown_width(odd_url, run_recipe, tmp_path):
    printed = run_recipe(
        "rl_gsm8k", model=NAME, base_url=odd_url, learning_rate=1e-4, **(OPTIONS["rl_gsm8k"] | {"sft_steps": 0})
    )
    assert "model: tinker://" in printed


def test_complete_run_is_told(odd_url, run_recipe, tmp_path):
    options = {"model": NAME, "base_url": odd_url, "steps": 2, "batch_size": 2}
    assert "complete" not in run_recipe("sl_basic", **options)
    assert f"{tmp_path / 'log'} holds a complete run of 2 steps" in run_recipe("sl_basic", **options)


def test_resuming_flat_loops_is_told(odd_url, run_recipe, tmp_path):
    common = {"model": NAME, "base_url": odd_url, "batch_size": 2, "rank": 4, "save_every": 1}
    run_recipe("sl_loop", num_questions=2, steps=2, **common)
    printed = run_recipe("sl_loop", num_questions=2, steps=3, **(common | {"rank": 8}))
    assert re.search(r"^resumed at step 2 from tinker://\S+, with rank 4$", printed, re.MULTILINE)
    run_recipe("rl_loop", group_size=2, steps=2, log_dir=tmp_path / "rl", **common)
    printed = run_recipe("rl_loop", group_size=2, steps=3, log_dir=tmp_path / "rl", **(common | {"rank": 8}))
    assert re.search(r"^resumed at step 2 from tinker://\S+, with rank 4$", printed, re.MULTILINE)


def test_other_rank_than_that_of_loaded_weights_is_told(odd_url, run_recipe, tmp_path):
    common = {"model": NAME, "base_url": odd_url, **SL}
    run_recipe("dpo", output=tmp_path / "first.txt", **common)
    printed = run_recipe(
        "dpo", start_from=tmp_path / "first.txt", log_dir=tmp_path / "second", **(common | {"rank": 8})
    )
    path = (tmp_path / "first.txt").read_text("utf-8").strip()
    assert f"rank 8 is not used: {path} has rank 4, and the run goes on with that\n" in printed


def test_rl_without_a_signal_is_told(odd_url, run_recipe, tmp_path):
    """A grader that nobody can please; then groups of one."""
    common = {"model": NAME, "base_url": odd_url}
    printed = run_recipe(
        "rl_gsm8k", grader="operator:is_", **(OPTIONS["rl_gsm8k"] | {"sft_steps": 0, "steps": 4} | common)
    )
    assert printed.count("warning: nothing was learned in the last 3 steps") == 1
    assert re.search(
        r"different rewards \((all rewards are \S+|rewards differ only between groups)\)\. Look at ", printed
    )
    assert "the grader and the form of answers that it accepts" in printed
    assert "The answers are in rollouts.jsonl of the log directory." in printed
    sizes = {"steps": 3, "batch_size": 2, "group_size": 1, "num_questions": 2, "log_dir": tmp_path / "ones"}
    assert "the size of the groups, which must be at least 2" in run_recipe("arithmetic_rl", **sizes, **common)
