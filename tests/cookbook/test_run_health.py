"""Each check on metrics made to go wrong and on healthy ones; then real runs that go wrong, and what they tell."""

import json
import math
from functools import partial

import pytest

from lorimer.cookbook import run_health as health
from lorimer.cookbook import supervised
from lorimer.cookbook.arithmetic import split_sums, sum_rows
from lorimer.cookbook.checkpoints import read_jsonl
from lorimer.cookbook.datasets import chat_dataset, datum_maker
from lorimer.cookbook.logs import open_log, read_metrics
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.problems import question_dataset
from lorimer.cookbook.run_health import CHECKS, Health, learning_rate_far
from lorimer.cookbook.service import get_tokenizer

NAMES = {
    "mixed": "env/all/by_group/frac_mixed",
    "good": "env/all/by_group/frac_all_good",
    "bad": "env/all/by_group/frac_all_bad",
    "size": "env/all/by_group/size",
    "reward": "env/all/reward/total",
    "std": "env/all/reward/std",
    "length": "env/all/ac_tokens_per_turn",
    "cut": "env/all/frac_truncated",
    "malformed": "env/all/malformed",
    "entropy": "optim/entropy",
    "kl": "optim/kl_sample_train_v2",
    "ratio": "optim/ratio",
    "updates": "optim/num_updates",
    "skipped": "optim/skipped",
    "reference": "kl_policy_reference",
    "errors": "grader/errors",
    "graded": "grader/graded",
    "nll": "train/nll",
    "loss": "train/loss",
    "test": "test/nll",
    "test_loss": "test/loss",
}


def lines(**columns):
    """Metrics by step; ``None`` leaves a metric out of its line."""
    length = max(map(len, columns.values()))
    return [
        {
            NAMES[name]: values[place]
            for name, values in columns.items()
            if place < len(values) and values[place] is not None
        }
        for place in range(length)
    ]


def rising(first, last, number=12):
    return [first + (last - first) * place / (number - 1) for place in range(number)]


RL = {"updates": [1] * 12, "mixed": [0.5] * 12, "std": [0.4] * 12, "reward": rising(0.2, 0.6), "length": [4.0] * 12}
HEALTHY_RL = RL | {
    "entropy": rising(1.0, 0.4),
    "kl": [1e-12] * 12,
    "ratio": [1.0] * 12,
    "cut": [0.02] * 12,
    "malformed": [0.01] * 12,
    "skipped": [0] * 12,
    "errors": [0] * 12,
    "graded": [32] * 12,
    "reference": rising(0.001, 0.03),
}
NOISE = [0.05 * math.sin(7 * place) for place in range(40)]
HEALTHY_SFT = {
    "nll": [2 * 0.9**place + 0.3 + NOISE[place] for place in range(40)],
    "skipped": [0] * 40,
    "test": [2 * 0.9**place + 0.4 if place % 5 == 0 else None for place in range(40)],
}
WRONG = {
    "no_signal": RL | {"updates": [1, 1, 0, 0, 0], "reward": [0.0] * 5, "std": [0.0] * 5, "mixed": [0.5, 0.5, 0, 0, 0]},
    "few_mixed_groups": RL | {"mixed": [0.1] * 12, "bad": [0.9] * 12, "good": [0.0] * 12},
    "entropy_collapse": RL | {"entropy": [1.0] * 9 + [0.02] * 3},
    "divergence": RL | {"entropy": [1.0] * 9 + [3.0] * 3, "reward": [0.5] * 9 + [0.1] * 3},
    "policy_drift": RL | {"kl": [0.001] * 9 + [0.05] * 3},
    "reference_drift": RL | {"reference": [0.02] * 11 + [0.4]},
    "truncation": RL | {"cut": [0.0] * 9 + [0.6] * 3},
    "length_reward": RL | {"length": rising(4, 40)},
    "grader_errors": RL | {"errors": [0] * 9 + [10] * 3, "graded": [32] * 9 + [22] * 3},
    "malformed": RL | {"malformed": [0.0] * 9 + [0.8] * 3},
    "skipped_steps": {"nll": [1.0] * 12, "skipped": [0] * 11 + [1]},
    "loss_spike": {"nll": [*HEALTHY_SFT["nll"][:20], 3.0]},
    "loss_above_start": {"nll": [0.7, 0.8, 5.0, 6.0, 6.0]},
    "overfitting": {"nll": rising(1.0, 0.05, 12), "test": [1.0, None, 0.8, None, 0.7, None, 0.8, None, 0.9, None, 1.1]},
}


def found_in(made):
    return {concern.name for check in CHECKS if (concern := check(made)) is not None}


def test_every_check_has_a_run_that_goes_wrong():
    assert {check.__name__ for check in CHECKS} == set(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_noticed_alone(name):
    made = lines(**WRONG[name])
    concern = getattr(health, name)(made)
    assert concern is not None and concern.name == name
    assert concern.text.endswith(".") and concern.advice.endswith(".")
    assert found_in(made) == {name}


def test_healthy_runs_are_left_alone_at_every_step():
    for columns in (HEALTHY_RL, HEALTHY_SFT, {"loss": HEALTHY_SFT["nll"], "test_loss": HEALTHY_SFT["test"]}):
        made = lines(**columns)
        for end in range(1, len(made) + 1):
            assert found_in(made[:end]) == set(), end


def test_other_ways_to_go_wrong():
    drift = health.policy_drift(lines(**RL | {"ratio": [1.0] * 9 + [1.6] * 3}))
    assert "ratio" in drift.text
    longer = health.length_reward(
        lines(**RL | {"length": rising(4, 40), "reward": [0.5 + NOISE[i] for i in range(12)]})
    )
    assert "did not rise" in longer.text
    assert health.skipped_steps([{"train/nll": None}]) is not None
    ones = RL | {"updates": [0] * 4, "size": [1.0] * 4}
    assert "the size of the groups, which must be at least 2" in health.no_signal(lines(**ones)).advice
    assert "all wrong" in health.few_mixed_groups(lines(**WRONG["few_mixed_groups"])).advice
    solved = health.few_mixed_groups(lines(**RL | {"mixed": [0.1] * 12, "good": [0.9] * 12, "bad": [0.0] * 12}))
    assert "all right" in solved.advice


def test_learning_rate_far_from_the_rule():
    assert learning_rate_far(4e-3, 4.3e-3, "m") is None and learning_rate_far(8e-4, 4.3e-3, "m") is None
    assert "far above" in learning_rate_far(0.4, 4.3e-3, "m").text
    assert "far below" in learning_rate_far(1e-7, 4.3e-3, "m").text
    marks, told = Health({"base_model": "lorimer/tiny", "learning_rate": 1.0}).look({"train/nll": 1.0})
    assert marks == {"health/learning_rate": 1.0} and [one.name for one in told] == ["learning_rate"]
    assert Health({"base_model": "of-unknown-width", "learning_rate": 1.0}).look({}) == ({}, [])


def test_it_is_told_once_and_again_later(log_dir, capsys):
    def run(start, end):
        with open_log(log_dir, config={}, resume_step=start, sinks=["jsonl"]) as log:
            for step in range(start, end):
                log.log({"train/nll": 1.0, "optim/skipped": 1.0}, step)

    run(0, 10)
    assert capsys.readouterr().out.count("warning: a gradient or loss was not finite") == 1
    run(5, 30)  # resumed: what was told before the checkpoint is not told again
    assert [line["step"] for line in read_jsonl(log_dir / "health.jsonl")] == [0, 20]
    assert all(line["health/skipped_steps"] == 1 for line in read_metrics(log_dir))
    line = read_jsonl(log_dir / "health.jsonl")[0]
    assert line["name"] == "skipped_steps" and "grad_clip_norm" in line["advice"]


@pytest.mark.parametrize("resume_step", [1, 3, 4, 5, 6])
def test_resumed_run_warns_as_an_undisturbed_one(log_dir, resume_step):
    """The loss grows from the first steps on: the warning names the first loss, which only the file knows."""
    losses = [0.707, 0.9, 0.6, 1.3, 1.5, 1.6, 1.7, 1.8]

    def run(directory, start, end):
        with open_log(directory, config={}, resume_step=start, sinks=["jsonl"]) as log:
            for step in range(start, end):
                log.log({"train/nll": losses[step], "optim/skipped": 0.0}, step)

    whole, killed = log_dir / "whole", log_dir / "killed"
    run(whole, 0, len(losses))
    run(killed, 0, 7)  # lines after the checkpoint are computed again
    run(killed, resume_step, len(losses))
    assert "above the 0.707 it began with" in (whole / "health.jsonl").read_text("utf-8")
    for name in ("health.jsonl", "metrics.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_nothing_is_written_while_nothing_is_wrong(log_dir):
    with open_log(log_dir, config={}, sinks=["jsonl"]) as log:
        log.log({"train/nll": 1.0}, 0)
    assert not (log_dir / "health.jsonl").exists() and "health" not in json.dumps(read_metrics(log_dir))


# ── real runs ─────────────────────────────────────────────────────────────────────────────────────────


def told(log_dir):
    return {line["name"] for line in read_jsonl(log_dir / "health.jsonl")}


async def sft(service, log_dir, rows, **options):
    renderer = get_renderer("auto", get_tokenizer(service, "lorimer/tiny"))
    config = supervised.Config(
        log_dir=log_dir,
        base_model="lorimer/tiny",
        dataset=chat_dataset(rows, renderer, batch_size=4, num_epochs=options.pop("num_epochs")),
        test_data=[datum for row in options.pop("test_rows") for datum in datum_maker(renderer)(row)],
        rank=8,
        sinks=["jsonl"],
        **options,
    )
    await supervised.train(config, service)


async def test_run_with_a_hundred_times_the_learning_rate(service, log_dir):
    learned, held_out = (sum_rows(sums) for sums in split_sums())
    options = {"num_epochs": 1, "test_rows": held_out[:4], "schedule": "constant", "max_steps": 8}
    await sft(service, log_dir, learned[:32], learning_rate=0.43, **options)
    assert {"learning_rate", "loss_above_start"} <= told(log_dir)
    assert any("health/loss_above_start" in line for line in read_metrics(log_dir))
    await sft(service, log_dir.with_name("usual"), learned[:32], learning_rate=4e-3, **options)
    assert not told(log_dir.with_name("usual")) - {"loss_spike"}


async def test_run_that_learns_few_rows_by_heart(service, log_dir):
    """Words that follow no rule: what is held out can only get worse."""
    words = "moon tree fish lamp door star ring leaf".split()
    rows = [{"question": f"Word of {place}?", "answer": f"{word} {place}"} for place, word in enumerate(words)]
    options = {"num_epochs": 12, "test_rows": rows[4:], "schedule": "constant", "eval_every": 2}
    await sft(service, log_dir, rows[:4], learning_rate=2e-2, **options)
    assert "overfitting" in told(log_dir)


async def test_run_with_a_constant_reward(service, log_dir):
    config = training.Config(
        base_model="lorimer/tiny",
        dataset_builder=lambda renderer: (
            partial(question_dataset, batch_size=2, group_size=2)(
                sum_rows(split_sums()[0][:20]), renderer, lambda reply, row: 1.0
            ),
            None,
        ),
        log_dir=log_dir,
        learning_rate=1e-3,
        rank=4,
        max_tokens=4,
        num_steps=4,
        sinks=["jsonl"],
    )
    await training.train(config, service)
    assert "no_signal" in told(log_dir)
    assert [("health/no_signal" in line) for line in read_metrics(log_dir)][:4] == [False, False, True, True]
