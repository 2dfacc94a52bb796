"""The reinforcement recipes of the official cookbook: rewards rise, and trainer and sampler agree on logprobs."""

import json
import math

import pytest

from tests.official_cookbook.recipes import Cookbook, Run
from tests.official_cookbook.workspace import STUDENT

pytestmark = pytest.mark.slow
AGREEMENT = 1e-4
"""A hundredth of what the cookbook's own page calls healthy."""


def assert_finite(run: Run) -> None:
    for row in run.metrics:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row


def agreement(run: Run) -> list[float]:
    """The largest difference between the two in any step, by the cookbook's two estimates."""
    assert_finite(run)
    return [max(map(abs, run.series(f"optim/kl_sample_train_{version}"))) for version in ("v1", "v2")]


def start_from(cookbook: Cookbook, log: str, state: str) -> None:
    """Let a recipe that knows no starting checkpoint resume one, by the record that it looks for."""
    folder = cookbook.directory / "runs" / log
    folder.mkdir(parents=True)
    record = {"name": "start", "batch": 0, "state_path": state}
    (folder / "checkpoints.jsonl").write_text(json.dumps(record) + "\n", "utf-8")


def test_rl_loop_raises_its_reward(cookbook, boxer, figures):
    start_from(cookbook, "rl_loop", boxer.path())
    run = cookbook.recipe(
        "rl_loop",
        "rl_loop",
        model_name=STUDENT,
        batch_size=16,
        group_size=8,
        learning_rate=1e-3,
        max_tokens=24,
        max_steps=6,
        save_every=3,
    )
    assert_finite(run)
    rewards = run.series("reward/total")
    figures(reward=rewards)
    assert rewards[-1] > rewards[0] + 0.15
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["start", "000003", "final"]


def test_rl_basic_takes_a_step_of_2048_rollouts(cookbook, boxer, figures):
    options = {"load_checkpoint_path": boxer.path(), "learning_rate": 1e-3, "max_tokens": 16, "max_steps": 1}
    run = cookbook.recipe("rl_basic", "rl_basic", model_name=STUDENT, **options)
    figures(kl_sample_train=agreement(run), reward=run.series("env/all/reward/total"))
    assert max(agreement(run)) < AGREEMENT
    assert run.series("env/all/total_episodes") == [2048]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"compute_post_kl": True}, id="on-policy"),
        pytest.param(
            {"stream_minibatch_config.num_minibatches": 2, "stream_minibatch_config.groups_per_batch": 16}, id="stream"
        ),
        pytest.param({"max_steps_off_policy": 2, "loss_fn": "ppo"}, id="async-ppo"),
    ],
)
def test_math_rl_on_sums(cookbook, adder, figures, request, options):
    name = request.node.callspec.id
    run = cookbook.recipe(
        "math_rl.train",
        f"math_rl-{name}",
        model_name=STUDENT,
        load_checkpoint_path=adder.path(),
        group_size=8,
        groups_per_batch=16,
        lora_rank=16,
        learning_rate=5e-4,
        max_tokens=12,
        max_steps=4,
        eval_every=0,
        **options,
    )
    figures(kl_sample_train=agreement(run), reward=run.series("env/all/reward/total"))
    if name != "async-ppo":
        assert max(agreement(run)) < AGREEMENT
    if name == "on-policy":
        assert run.series("kl_pre_post_v2")[0] > 0, "the step changed the policy"


def test_shorter_prefers_short_replies(cookbook, figures):
    run = cookbook.recipe(
        "preference.shorter.train",
        "shorter",
        model_name=STUDENT,
        renderer_name="role_colon",
        batch_size=4,
        group_size=4,
        learning_rate=1e-3,
        max_tokens=16,
        eval_every=0,
        max_steps=2,
    )
    figures(kl_sample_train=agreement(run), tokens=run.series("env/all/ac_tokens_per_turn"))
    assert max(agreement(run)) < AGREEMENT


def test_distillation_comes_closer_to_its_teacher(cookbook, adder, figures):
    run = cookbook.recipe(
        "distillation.on_policy_distillation",
        "distillation",
        model_name=STUDENT,
        teacher_model=STUDENT,
        teacher_checkpoint=adder.path("sampler_path"),
        dataset="tulu3",
        group_size=4,
        groups_per_batch=16,
        lora_rank=16,
        learning_rate=2e-3,
        max_tokens=12,
        max_steps=4,
        eval_every=0,
        save_every=0,
    )
    distances = run.series("teacher_kl")
    figures(kl_sample_train=agreement(run), teacher_kl=distances)
    assert max(agreement(run)) < AGREEMENT
    assert distances[-1] < distances[0]
