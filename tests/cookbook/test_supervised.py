"""The supervised loop on a real server: pipelined, measured, saved and resumed."""

import json

import numpy as np
import pytest

from lorimer.cookbook import supervised
from lorimer.cookbook.datasets import GeneratedDataset, ShuffledDataset
from lorimer.cookbook.datums import datum_from_tokens
from lorimer.cookbook.logs import read_metrics
from lorimer.errors import InvalidInput
from tests.cookbook.weights import weights_of

MODEL = "lorimer/debug"


def make(rng):
    """Sequences that count, from a random number on."""
    first = rng.randint(1, 20)
    return [datum_from_tokens(range(first, first + 6), [0, 1, 1, 1, 1, 1])]


TEST_DATA = [datum_from_tokens(range(10, 16), [0, 1, 1, 1, 1, 1])]


def config(log_dir, **changes):
    values = {
        "log_dir": log_dir,
        "base_model": MODEL,
        "dataset": GeneratedDataset(make, 4, 6),
        "learning_rate": 1e-2,
        "rank": 4,
        "sinks": ["jsonl"],
        "test_data": TEST_DATA,
    }
    return supervised.Config(**(values | changes))


def without_times(lines):
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


async def test_trains_and_logs_every_step(service, log_dir):
    result = await supervised.train(config(log_dir, eval_every=3, schedule="linear"), service)
    lines = read_metrics(log_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "test/nll" in line] == [0, 3, 6]
    assert [line["learning_rate"] for line in lines[:-1]] == pytest.approx([1e-2 * (1 - s / 6) for s in range(6)])
    assert lines[0]["num_tokens"] == 20
    assert lines[0]["train/nll"] > lines[5]["train/nll"]
    assert lines[0]["test/nll"] > result.metrics["test/nll"] == lines[6]["test/nll"]
    assert result.checkpoint.step == 6


@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_next_steps_are_submitted_before_the_last_is_back(service, log_dir, ahead):
    logged = []

    class Watched(GeneratedDataset):
        def get_batch(self, step):
            logged.append(len(read_metrics(log_dir)))
            return super().get_batch(step)

    await supervised.train(config(log_dir, dataset=Watched(make, 2, 5), submit_ahead=ahead, test_data=()), service)
    assert logged == [max(0, step - ahead) for step in range(5)]


async def test_gradients_of_several_batches_are_added_up(service, log_dir):
    rows = [datum for i in range(8) for datum in make(np.random.RandomState(i))]

    def ordered(batch_size):
        return ShuffledDataset(rows, batch_size, num_epochs=2)

    whole = await supervised.train(config(log_dir / "a", dataset=ordered(4)), service)
    parts = await supervised.train(config(log_dir / "b", dataset=ordered(2), batches_per_step=2), service)
    assert parts.metrics["test/nll"] == whole.metrics["test/nll"]
    assert [line.get("num_examples") for line in read_metrics(log_dir / "b")] == [4, 4, 4, 4, None]


async def test_evaluators_see_the_weights_of_their_step(service, log_dir):
    sequence = TEST_DATA[0].model_input.append_int(15)

    async def evaluate(sampler):
        logprobs = await sampler.compute_logprobs_async(sequence)
        return {"sampler/nll": -sum(logprobs[1:]) / 5}

    await supervised.train(config(log_dir, evaluators=[evaluate], eval_every=2, submit_ahead=2), service)
    measured = [line for line in read_metrics(log_dir) if "test/nll" in line]
    assert [line["step"] for line in measured] == [0, 2, 4, 6]
    for line in measured:
        assert line["sampler/nll"] == pytest.approx(line["test/nll"], abs=1e-3)
    assert len({line["test/nll"] for line in measured}) == 4


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("batches_per_step", [1, 2])
async def test_interrupted_run_ends_as_an_uninterrupted_one(service, log_dir, batches_per_step):
    class Breaking(GeneratedDataset):
        def get_batch(self, step):
            if step == 5 * batches_per_step:
                raise Interrupted
            return super().get_batch(step)

    sizes = 4 // batches_per_step, 6 * batches_per_step
    options = {"save_every": 2, "eval_every": 2, "batches_per_step": batches_per_step}
    options["dataset"] = GeneratedDataset(make, *sizes)
    whole = await supervised.train(config(log_dir / "whole", **options), service)
    with pytest.raises(Interrupted):
        await supervised.train(config(log_dir / "cut", **options | {"dataset": Breaking(make, *sizes)}), service)
    assert [line["step"] for line in read_metrics(log_dir / "cut")] == [0, 1, 2, 3]
    resumed = await supervised.train(config(log_dir / "cut", **options), service)
    assert without_times(read_metrics(log_dir / "cut")) == without_times(read_metrics(log_dir / "whole"))
    paths = whole.checkpoint.state_path, resumed.checkpoint.state_path
    assert paths[0] != paths[1]
    first, second = [weights_of(service, path) for path in paths]
    assert first == second

    again = await supervised.train(config(log_dir / "cut", **options), service)
    assert again == resumed, "a run that is done is not done again"
    with pytest.raises(InvalidInput, match=r"learning_rate was 0\.01 and is 0\.02"):
        await supervised.train(config(log_dir / "cut", learning_rate=0.02, **options), service)


async def test_failed_step_is_told_and_leaves_nothing_behind(service, log_dir):
    class Wrong(GeneratedDataset):
        def get_batch(self, step):
            return [datum_from_tokens([1, 10**6], [0, 1])] if step == 2 else super().get_batch(step)

    async def evaluate(sampler):
        return {"one": 1.0}

    wrong = config(log_dir, dataset=Wrong(make, 2, 5), evaluators=[evaluate], eval_every=1)
    with pytest.raises(Exception, match="1000000"):
        await supervised.train(wrong, service)


async def test_own_server_is_found_by_its_address(base_url, log_dir):
    result = await supervised.train(config(log_dir, base_url=base_url, max_steps=1, test_data=()))
    assert json.loads((log_dir / "config.json").read_text("utf-8"))["num_steps"] == 1
    assert result.metrics["step"] == 0


async def test_run_of_another_optimizer_is_logged_and_saved_with_it(service, log_dir):
    options = {"optimizer": "lion", "optimizer_params": {"lr_multipliers": {"lora_B": 2.0}}, "learning_rate": 1e-3}
    options |= {"save_every": 2, "schedule": "constant"}
    whole = await supervised.train(config(log_dir / "whole", **options), service)
    await supervised.train(config(log_dir / "cut", max_steps=4, **options), service)
    described = json.loads((log_dir / "cut" / "config.json").read_text("utf-8"))
    assert (described["optimizer"], described["optimizer_params"]) == ("lion", {"lr_multipliers": {"lora_B": 2.0}})
    client = service.create_training_client_from_state_with_optimizer(whole.checkpoint.state_path)
    assert client.get_info().optimizer_config.type == "lion"
    lines = [read_metrics(log_dir / name)[:4] for name in ("whole", "cut")]
    assert [line["train/nll"] for line in lines[0]] == [line["train/nll"] for line in lines[1]]
    with pytest.raises(InvalidInput, match="optimizer was 'lion' and is 'sgd'"):
        await supervised.train(config(log_dir / "cut", max_steps=4, **options | {"optimizer": "sgd"}), service)


WRONG = [
    ({"rank": 0}, "rank is 0"),
    ({"batches_per_step": 9}, "6 batches"),
    ({"optimizer": "rprop"}, "optimizer is 'rprop'; accepted are adamw, adam, sgd"),
    ({"optimizer": "lion", "optimizer_params": {"momentum": 0.9}}, "lion.momentum: extra inputs"),
    ({"optimizer": "lion", "weight_decay": 0.1}, "weight_decay is a field of adamw; give it to lion"),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG)
def test_configuration_is_checked(log_dir, changes, reason):
    with pytest.raises(InvalidInput, match=reason):
        config(log_dir, **changes)
