"""Rollouts of the loops on the server: sent by default, chosen and bounded, and never in the way of training."""

import logging
import socket
import threading
import time

import pytest

from lorimer import ModelInput
from lorimer.client.connection import Connection
from lorimer.client.rollouts import RolloutReports
from lorimer.cookbook import distillation, reporting, supervised
from lorimer.cookbook.datasets import ShuffledDataset
from lorimer.cookbook.distillation import Prompt
from lorimer.cookbook.evaluation import accuracy, exact_match, nll, together
from lorimer.cookbook.rl import training
from lorimer.cookbook.rollout_log import RolloutLog
from lorimer.errors import InvalidInput
from lorimer.types import Rollout, RolloutTurn
from tests.cookbook.rl.episodes import sum_datasets, tiny_renderer
from tests.cookbook.rl.test_training import make_config
from tests.cookbook.test_supervised import config

SINKS = ("jsonl", "server")
DEBUG, TINY = "lorimer/debug", "lorimer/tiny"


@pytest.fixture
def client(service):
    return service.create_lora_training_client(DEBUG, rank=2, seed=0)


@pytest.fixture
def logged(service):
    """What the newest run, or a given one, has: rollouts with their turns, in order."""

    def read(query="", run_id=None):
        rest = service.create_rest_client()
        run_id = run_id or rest.list_runs(limit=1).result().runs[0].run_id
        return rest.list_rollouts(run_id, query, sort="step", content=True, limit=100).result().rollouts

    return read


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "lorimer.cookbook")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "lorimer.cookbook"]


def group(name, size=2, text="fine"):
    def make():
        turns = [RolloutTurn(role="assistant", content=text)]
        return [Rollout(step=0, group=name, number=number, turns=turns, reward=1.0) for number in range(size)]

    return make


async def test_rl_logs_its_groups_and_test_set(service, log_dir, logged):
    options = {"dataset_builder": sum_datasets, "sinks": SINKS, "eval_every": 1, "num_steps": 2}
    await training.train(make_config(log_dir, **options), service)
    found = logged("kind=rollout")
    assert [(one.step, one.split, one.group, one.number) for one in found] == [
        (step, "train", str(index), number) for step in range(2) for index in range(4) for number in range(4)
    ]
    by_group = [[one for one in found if one.step == 1 and one.group == str(index)] for index in range(4)]
    for several in by_group:
        rewards = [one.reward for one in several]
        assert [one.advantage for one in several] == pytest.approx([value - sum(rewards) / 4 for value in rewards])
        assert len({one.prompt_key for one in several}) == 1
    one = found[0]
    assert [turn.role for turn in one.content.turns] == ["user", "assistant"]
    assert "What is" in one.content.turns[0].content and one.num_tokens == len(one.content.turns[1].logprobs)
    assert {"correct", "format"} <= set(one.content.reward_parts) and one.stop_reason in ("stop", "length")
    assert one.tags == ["problems"] and "reference_answer" in one.content.turns[1].logs
    tested = logged("kind=sample")
    assert [(one.step, one.split, one.group) for one in tested] == [
        (step, "test", str(index)) for step in range(3) for index in range(8)
    ]


async def test_distillation_logs_its_samples(service, log_dir, logged):
    prompts = [Prompt(ModelInput.from_ints([first, first + 1])) for first in range(1, 5)]
    await distillation.train(
        distillation.Config(
            log_dir=log_dir,
            base_model=DEBUG,
            dataset=ShuffledDataset(prompts, 2),
            stop=[],
            max_tokens=3,
            num_samples=2,
            rank=2,
            sinks=SINKS,
        ),
        service,
    )
    found = logged()
    assert [(one.step, one.group, one.number) for one in found] == [
        (step, group, number) for step in range(2) for group in "01" for number in range(2)
    ]
    turn = found[-1].content.turns[1]
    assert len(turn.advantages) == len(turn.logprobs) == 3
    assert found[-1].reward == pytest.approx(sum(turn.advantages) / 3, abs=1e-5)


async def test_evaluations_log_their_samples(service, log_dir, logged):
    rows = [{"question": f"{a} + 1", "answer": str(a + 1)} for a in range(3)]
    renderer = tiny_renderer()
    asked = accuracy(rows, renderer, exact_match(), max_tokens=4, num_samples=2, temperature=1.0, name="sums")
    evaluators = [
        together(asked, accuracy(rows[:1], renderer, exact_match(), max_tokens=2, name="few")),
        nll(config(log_dir).test_data),
    ]
    await supervised.train(config(log_dir, base_model=TINY, sinks=SINKS, evaluators=evaluators), service)
    found = logged()
    assert {one.kind for one in found} == {"sample"}
    last = [one for one in found if one.step == found[-1].step]
    assert [(one.split, one.group, one.number) for one in last] == [
        *(("sums", str(row), number) for row in range(3) for number in range(2)),
        ("few", "0", 0),
    ]
    assert [turn.role for turn in last[0].content.turns] == ["user", "assistant"]
    assert last[0].content.turns[0].content == "0 + 1" and last[0].reward in (0.0, 1.0)
    assert asked.take_samples() == []


@pytest.mark.parametrize("options", [{"rollout_fraction": 0}, {"sinks": ("jsonl",)}])
async def test_they_can_be_left_out(service, log_dir, logged, options):
    await training.train(make_config(log_dir, **{"sinks": SINKS, "num_steps": 1, **options}), service)
    assert logged() == []


def test_settings_are_checked(log_dir):
    for wrong in ({"rollout_fraction": 1.5}, {"rollout_fraction": -0.1}, {"rollout_bytes": 0}):
        with pytest.raises(InvalidInput, match="accepted"):
            make_config(log_dir, **wrong)
        with pytest.raises(InvalidInput, match="accepted"):
            config(log_dir, **wrong)


def test_a_fraction_of_groups_up_to_a_size(client, logged):
    def sent(fraction, max_bytes, groups):
        log = RolloutLog(client, fraction, max_bytes, seed=3)
        log.log(0, groups)
        log.close()
        return [(one.group, one.number) for one in logged(run_id=client.model_id)]

    half = sent(0.5, 10**6, [group(str(n)) for n in range(40)])
    assert 10 <= len({name for name, _ in half}) <= 30 and len(half) == 2 * len({name for name, _ in half})
    assert sent(0.5, 10**6, [group(str(n)) for n in range(40)]) == half
    client.log_rollouts([], 0).result()
    large = [group(f"large {n}", text="x" * 1000) for n in range(9)]
    found = [one for one in sent(1.0, 7000, large) if one[0].startswith("large")]
    assert found == [("large 0", 0), ("large 0", 1), ("large 1", 0), ("large 1", 1)]
    one = [one for one in sent(1.0, 5000, [group("single", 9, "x" * 1000)]) if one[0] == "single"]
    assert one == [("single", 0), ("single", 1), ("single", 2)]


def test_a_server_that_is_away_neither_stops_nor_fails_a_loop(client, warnings, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    client.rollout_reports = RolloutReports(Connection(address), client.model_id)
    monkeypatch.setattr(reporting, "CLOSE_SECONDS", 0.3)
    log = RolloutLog(client, 1.0, 10**6)
    began = time.monotonic()
    for step in range(100):
        log.log(step, [group("a")])
    assert time.monotonic() - began < 1.0
    log.close()
    assert time.monotonic() - began < 3.0
    assert len(warnings()) == 1 and "rollouts are not reported to the server" in warnings()[0]


def test_a_server_without_the_route_is_told_of_once(client, warnings):
    client.rollout_reports = RolloutReports(client.holder.connection, client.model_id)
    client.rollout_reports._path = "/api/v1/runs/x/y/z"
    log = RolloutLog(client, 1.0, 10**6)
    for step in range(3):
        log.log(step, [group("a")])
    log.close()
    assert len(warnings()) == 1 and "older versions" in warnings()[0]


def test_groups_that_cannot_be_made_are_told_of_once(client, warnings, logged):
    def broken():
        assert threading.current_thread() is not threading.main_thread()
        raise KeyError("no such token")

    log = RolloutLog(client, 1.0, 10**6)
    log.log(0, [broken])
    log.close()
    assert len(warnings()) == 1 and "no such token" in warnings()[0]
    assert logged(run_id=client.model_id) == []
