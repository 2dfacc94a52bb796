"""The loops on lorimer/tiny: what a step does, that modes agree, that a resumed run ends as an uninterrupted one."""

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lorimer.cookbook.checkpoints import Checkpoints, read_jsonl
from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.renderers import Renderer
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.advantages import incorporate_kl_penalty
from lorimer.cookbook.rl.datums import RolloutDatum
from lorimer.cookbook.rl.envs import RLDataset
from lorimer.cookbook.rl.graders import GraderPool
from lorimer.cookbook.rl.problems import GradedProblem, ProblemDataset, ProblemGroupBuilder
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout
from lorimer.cookbook.rl.training import AsyncConfig, Config, split
from lorimer.cookbook.rl.updates import Update, UpdateConfig
from lorimer.errors import InvalidInput
from lorimer.types import ModelInput
from tests.cookbook.rl.episodes import MODEL, SumEnv, sum_datasets, tiny_renderer
from tests.cookbook.weights import weights_of


def only_training(renderer: Renderer) -> tuple[RLDataset, None]:
    """Sums to train on, and none to measure with."""
    return sum_datasets(renderer)[0], None


def make_config(log_dir: Path, **options: object) -> Config:
    values = {
        "base_model": MODEL,
        "dataset_builder": only_training,
        "log_dir": log_dir,
        "learning_rate": 2e-3,
        "rank": 4,
        "max_tokens": 6,
        "num_steps": 2,
        "sinks": ("jsonl",),
    }
    return Config(**{**values, **options})


REPRODUCED = ["env/all/reward/total", "env/all/total_ac_tokens", "optim/entropy", "optim/num_data"]


def curve(log_dir: Path) -> list[list[float]]:
    return [[round(line[name], 4) for name in REPRODUCED] for line in read_metrics(log_dir) if "optim/lr" in line]


async def test_run_trains_measures_and_keeps_what_it_did(service, log_dir):
    config = make_config(log_dir, dataset_builder=sum_datasets, num_steps=3, eval_every=2, save_every=2)
    result = await training.train(config, service)
    lines = read_metrics(log_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert ["test/correct" in line for line in lines] == [True, False, True, True]
    for line in lines[:3]:
        assert abs(line["optim/kl_sample_train_v2"]) < 1e-4, "sampler and trainer are one model"
        assert line["optim/num_updates"] == 1
        assert line["env/all/total_episodes"] == 16
        assert line["async/staleness_max"] == 0
        assert line["tokens_per_second"] > 0
        assert 0 < line["optim/entropy"] < 5
    assert result.metrics["test/correct"] == lines[3]["test/correct"]
    assert Checkpoints(log_dir).last().sampler_path == result.sampler_path
    transcripts = read_jsonl(log_dir / "rollouts.jsonl")
    assert len(transcripts) == 3 * 4
    assert "What is" in transcripts[0]["text"]
    assert transcripts[0]["reference_answer"] == ""
    sampler = await service.create_sampling_client_async(model_path=result.sampler_path)
    assert (await sampler.get_base_model_async()) == MODEL


async def test_without_a_period_only_the_end_is_evaluated(service, log_dir):
    result = await training.train(make_config(log_dir, dataset_builder=sum_datasets, num_steps=2), service)
    lines = read_metrics(log_dir)
    assert [(line["step"], "test/correct" in line) for line in lines] == [(0, False), (1, False), (2, True)]
    assert result.metrics["test/correct"] == lines[2]["test/correct"]


async def test_streamed_minibatches_do_what_the_whole_batch_does(service, tmp_path):
    whole = await training.train(make_config(tmp_path / "whole"), service)
    parts = await training.train(make_config(tmp_path / "parts", num_minibatches=3), service)
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")
    first, second = (np.frombuffer(weights_of(service, r.state_path)[-4096:], np.float32) for r in (whole, parts))
    np.testing.assert_allclose(first, second, atol=2e-5)


async def test_resumed_run_ends_as_an_uninterrupted_one(service, tmp_path):
    whole = await training.train(make_config(tmp_path / "whole", num_steps=4, save_every=1), service)
    await training.train(make_config(tmp_path / "parts", num_steps=2), service)
    parts = await training.train(make_config(tmp_path / "parts", num_steps=4), service)
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")
    assert weights_of(service, whole.state_path) == weights_of(service, parts.state_path)
    again = await training.train(make_config(tmp_path / "parts", num_steps=4), service)
    assert again.sampler_path == parts.sampler_path


async def test_changed_configuration_is_refused_on_resume(service, tmp_path):
    await training.train(make_config(tmp_path, num_steps=1), service)
    with pytest.raises(InvalidInput, match=r"loss_fn was 'importance_sampling' and is 'ppo'"):
        await training.train(make_config(tmp_path, num_steps=2, loss_fn="ppo"), service)


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
async def test_every_loss_updates(service, log_dir, loss_fn):
    options = {"baseline": "leave_one_out", "normalise_advantages": True, "num_substeps": 2}
    await training.train(make_config(log_dir, loss_fn=loss_fn, num_steps=1, **options), service)
    (line,) = read_metrics(log_dir)
    assert line["optim/num_updates"] == 2
    assert "optim/clip_fraction" in line


async def test_engine_and_loop_count_the_same_steps(service, log_dir):
    """Although each step of the loop has two of the optimiser, or none where no group has a signal."""
    name = f"substeps {secrets.token_hex(4)}"
    await training.train(make_config(log_dir, num_substeps=2, sinks=("jsonl", "server"), name=name), service)
    updates = {line["step"]: line["optim/num_updates"] for line in read_metrics(log_dir) if "optim/lr" in line}
    rest = service.create_rest_client()
    (run,) = (await rest.list_runs_async(f'name="{name}"')).runs
    series = {(one.source, one.name): one.points for one in (await rest.get_run_metrics_async(run.run_id)).series}
    assert [step for step, _, _ in series["client", "optim/lr"]] == list(updates)
    assert [step for step, _, _ in series["engine", "grad_norm"]] == [step for step, n in updates.items() if n]
    assert sum(updates.values()) > len(updates)


async def test_penalty_moves_advantages_towards_the_reference(service):
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    tokens = [np.array([5, 9, 30, 200, 7]), np.array([3, 50, 60])]
    masks = [np.array([0, 1, 1, 1], np.float32), np.array([0, 1], np.float32)]
    data = [
        RolloutDatum(ids, np.full(len(mask), -1.0, np.float32), np.zeros(len(mask), np.float32), mask)
        for ids, mask in zip(tokens, masks, strict=True)
    ]
    scored = [await sampler.compute_logprobs_async(ModelInput.from_ints(ids.tolist())) for ids in tokens]
    differences = [(-1.0 - np.array(found[1:], float)) * mask for found, mask in zip(scored, masks, strict=True)]
    mean = sum(found.sum() for found in differences) / 4
    penalised, metrics = await incorporate_kl_penalty(data, sampler, 0.5)
    assert metrics["kl_policy_reference"] == pytest.approx(mean, rel=1e-4)
    for datum, difference, mask in zip(penalised, differences, masks, strict=True):
        np.testing.assert_allclose(datum.advantages, 0.5 * mask * (mean - difference), rtol=1e-4, atol=1e-5)
    discounted, _ = await incorporate_kl_penalty(data, sampler, 0.5, discount_factor=1.0)
    expected = np.cumsum(penalised[0].advantages[::-1])[::-1] * masks[0]
    np.testing.assert_allclose(discounted[0].advantages, expected, rtol=1e-4, atol=1e-5)


async def test_penalty_of_rounding_alone_is_no_update(service):
    """The policy is still its reference, and the rewards say nothing: there is nothing to learn."""
    client = await service.create_lora_training_client_async(MODEL, rank=4)
    sampler = await client.save_weights_and_get_sampling_client_async()
    builder = ProblemGroupBuilder(lambda: SumEnv(tiny_renderer(), (100, 100)), 4)
    group = await do_group_rollout(builder, Policy(sampling_client=sampler, max_tokens=4, seed=3))
    update = Update(client, UpdateConfig(learning_rate=1e-2, kl_penalty_coef=0.1), 0, 1, sampler)
    await update.add([replace(group, final_rewards_G=[-reward for reward in group.get_total_rewards()])])
    await update.step_optimizer()
    metrics = await update.finish()
    assert abs(metrics["kl_policy_reference"]) < 1e-4
    assert metrics["optim/num_updates"] == 0


async def test_run_with_a_penalty_reports_the_distance(service, log_dir):
    await training.train(make_config(log_dir, kl_penalty_coef=0.1, learning_rate=1e-2), service)
    first, second = read_metrics(log_dir)
    assert abs(first["kl_policy_reference"]) < 1e-3
    assert second["kl_policy_reference"] > 1e-3


async def test_graders_that_die_do_not_stop_training(service, log_dir):
    async with GraderPool("tests.cookbook.rl.grading:die_for_odd", num_workers=2, timeout_seconds=20) as pool:

        def make_datasets(renderer):
            make = lambda item: GradedProblem(renderer, f"What is {item} + 1?", str(item + 1), pool)  # noqa: E731
            return ProblemDataset(range(8), make, batch_size=2, group_size=4), None

        config = make_config(log_dir, dataset_builder=make_datasets, extra_metrics=[pool.take_metrics])
        await training.train(config, service)
    lines = read_metrics(log_dir)
    assert len(lines) == 2
    for line in lines:
        assert line["grader/graded"] + line["grader/errors"] == 8
        assert line["env/all/grader_error"] == line["grader/errors"] / 8
    assert sum(line.get("grader/errors_died", 0) for line in lines) > 0


async def test_environment_that_always_fails_ends_the_run_with_its_error(service, log_dir):
    class Broken(SumEnv):
        def check_answer(self, sample_str: str) -> bool:
            raise KeyError("answer")

    def make_datasets(renderer):
        make = lambda item: Broken(renderer, (item, item))  # noqa: E731
        return ProblemDataset(range(8), make, batch_size=2, group_size=2), None

    with pytest.raises(KeyError, match="answer"):
        await training.train(make_config(log_dir, dataset_builder=make_datasets), service)


# ── off-policy ────────────────────────────────────────────────────────────────────────────────────────


async def test_off_policy_run_learns_from_every_group_once_and_never_too_late(service, tmp_path):
    seen: list[tuple[int, int]] = []

    class Noted(SumEnv):
        async def step(self, action):
            seen.append((self.a, self.b))
            return await super().step(action)

    def make_datasets(renderer):
        sums = [(a, b) for a in range(10) for b in range(8)]
        make = lambda numbers: Noted(renderer, numbers)  # noqa: E731
        return ProblemDataset(sums, make, batch_size=4, group_size=2), None

    options = {"dataset_builder": make_datasets, "asynchronous": AsyncConfig(max_steps_off_policy=2)}
    await training.train(make_config(tmp_path, num_steps=3, **options), service)
    lines = read_metrics(tmp_path)
    assert all(line["async/staleness_max"] <= 2 for line in lines)
    assert max(line["async/staleness_max"] for line in lines) > 0
    assert [line["env/all/total_episodes"] for line in lines] == [8, 8, 8]
    done = Checkpoints(tmp_path).last().extra
    assert done["batch"] * 4 + len(done["done"]) == 12
    assert len(set(seen)) * 2 == len(seen)
    await training.train(make_config(tmp_path, num_steps=6, **options), service)
    done = Checkpoints(tmp_path).last().extra
    assert done["batch"] * 4 + len(done["done"]) == 24


@pytest.mark.parametrize("stale", ["requeue", "drop"])
async def test_group_that_comes_too_late_is_counted_and_not_learned_from(service, log_dir, stale):
    """One group of the first batch waits until two updates are done."""
    updates = 0
    late = asyncio.Event()
    tries: list[int] = []

    class Slow(SumEnv):
        async def step(self, action):
            if (self.a, self.b) == slow:
                tries.append(updates)
                await late.wait()
            return await super().step(action)

    def after_update() -> dict[str, float]:
        nonlocal updates
        updates += 1
        if updates == 2:
            late.set()
        return {}

    sums = [(a, b) for a in range(10) for b in range(8)]

    def make_datasets(renderer):
        make = lambda numbers: Slow(renderer, numbers)  # noqa: E731
        return ProblemDataset(sums, make, batch_size=2, group_size=2), None

    order = make_datasets(None)[0].get_batch(0)
    slow = (order[0].env_thunk().a, order[0].env_thunk().b)
    config = make_config(
        log_dir,
        num_steps=6,
        dataset_builder=make_datasets,
        asynchronous=AsyncConfig(max_steps_off_policy=1, stale=stale),
        extra_metrics=[after_update],
    )
    await asyncio.wait_for(training.train(config, service), 60)
    lines = read_metrics(log_dir)
    # On a busy machine another group may come too late as well, and the requeued one once more.
    assert sum(line[f"async/stale_{stale}"] for line in lines) >= 1
    assert len(tries) == 2 if stale == "drop" else len(tries) >= 4, "a requeued group is sampled again"
    assert all(line["async/staleness_max"] <= 1 for line in lines)
    assert [line["env/all/total_episodes"] for line in lines] == [4] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": "cross_entropy"}, "accepted are importance_sampling, ppo, cispo, gspo"),
        ({"baseline": "median"}, "accepted are mean"),
        ({"num_minibatches": 0}, "num_minibatches is 0; 1 or more"),
    ],
)
def test_wrong_configuration_is_refused(tmp_path, options, message):
    with pytest.raises(InvalidInput, match=message):
        make_config(tmp_path, **options)


def test_on_policy_is_no_case_of_off_policy():
    with pytest.raises(InvalidInput, match="1 or more is accepted"):
        AsyncConfig(max_steps_off_policy=0)


@pytest.mark.parametrize(("num_items", "num_parts", "sizes"), [(7, 3, [2, 2, 3]), (2, 5, [1, 1]), (4, 1, [4])])
def test_parts_are_nearly_equal_and_in_order(num_items, num_parts, sizes):
    parts = split(range(num_items), num_parts)
    assert [len(part) for part in parts] == sizes
    assert [item for part in parts for item in part] == list(range(num_items))


async def test_service_is_opened_when_none_is_given(base_url, log_dir):
    result = await training.train(make_config(log_dir, base_url=base_url, num_steps=1))
    assert result.sampler_path.startswith("tinker://")
