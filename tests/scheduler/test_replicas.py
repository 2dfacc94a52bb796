"""Several replicas of a base model in one process: where runs and samples go, and what a death delays."""

import asyncio
import json
import os
import random
import signal
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorimer import types
from lorimer.engine.config import EngineConfig, VllmConfig
from lorimer.errors import Unsupported
from lorimer.scheduler.placement import (
    Load,
    able_to_sample,
    choose_for_run,
    choose_for_sample,
    is_sampler,
    replica_configs,
    vllm_lacks,
)
from lorimer.store import moves
from lorimer.store.weights import WeightsShape
from lorimer.types.tensors import TensorData
from tests.scheduler.service import MODEL, Service, service

LEFT, RIGHT = f"{MODEL}#0", f"{MODEL}#1"


class Replica:
    def __init__(self, place: str, load: Load) -> None:
        self.place, self._load = place, load

    def load(self) -> Load:
        return self._load


def place_of(opened: Service, model_id: str) -> str:
    (place,) = [driver.place for driver in opened.scheduler.owner.drivers.values() if driver.holds(model_id)]
    return place


async def on_each(opened: Service, user, session):
    """Create runs until both replicas have one; return a run of each."""
    found: dict[str, object] = {}
    for number in range(64):
        run = await opened.create(user, session, number)
        found.setdefault(place_of(opened, run.model_id), run)
        if len(found) == 2:
            return found[LEFT], found[RIGHT]
    raise AssertionError("all runs are on one replica")


@pytest.mark.asyncio
async def test_replicas_share_runs_and_a_death_delays_only_its_own(tmp_path):
    async with service(tmp_path / "data", num_replicas=2) as opened:
        user, session = await opened.session()
        left, right = await on_each(opened, user, session)
        assert (await opened.run(left.model_id)).replica == LEFT
        for run in (left, right):
            await opened.done(await opened.train(user, run, 1))
        victim, other = opened.scheduler.owner.drivers[LEFT], opened.scheduler.owner.drivers[RIGHT]
        (model,) = opened.scheduler.stats().models
        assert set(model.pids) == {victim.slot.pid, other.slot.pid}
        os.kill(victim.slot.pid, signal.SIGSTOP)  # it computes nothing until it is killed
        stuck = await opened.step(user, left, 2)
        await opened.done(await opened.step(user, right, 2))
        assert (await opened.outcome(stuck, 0)).state == "pending"
        os.kill(victim.slot.pid, signal.SIGKILL)
        await opened.done(stuck)
        assert (victim.slot.num_deaths, other.slot.num_deaths) == (1, 0)
        first, second = [await opened.save(user, run, 3, "end") for run in (left, right)]
        assert (first / "adapter_model.safetensors").read_bytes() == (second / "adapter_model.safetensors").read_bytes()


@pytest.mark.asyncio
async def test_an_evicted_run_moves_to_the_replica_with_less_load(tmp_path):
    async with service(tmp_path / "data", num_replicas=2) as opened:
        user, session = await opened.session()
        left, _ = await on_each(opened, user, session)
        await opened.done(await opened.train(user, left, 1))
        await opened.done(await opened.step(user, left, 2))
        drivers = opened.scheduler.owner.drivers
        while place_of(opened, left.model_id) == LEFT:
            await opened.scheduler.unload(user, left)
            async with asyncio.timeout(60):
                while drivers[LEFT].holds(left.model_id) or (await opened.run(left.model_id)).replica is not None:
                    await asyncio.sleep(0.01)
            number = 100 + len(drivers[LEFT].core.runs)
            while len(drivers[LEFT].core.runs) <= len(drivers[RIGHT].core.runs):
                await opened.create(user, session, number)
                number += 1
            behind = await opened.train(user, left, 3)
            await opened.done(behind)
        assert (await opened.run(left.model_id)).replica == RIGHT
        found = await opened.scheduler.store.read(moves.recent, user.user_id, session.created_at, 10)
        assert [(move.model_id, move.from_replica, move.to_replica) for move in found] == [(left.model_id, LEFT, RIGHT)]
        assert json.loads(await opened.done(await opened.step(user, left, 4)))["metrics"]["optimizer_step"] == 2


@pytest.mark.asyncio
async def test_samples_go_where_their_weights_are_and_a_retry_is_not_computed_twice(tmp_path):
    async with service(tmp_path / "data", num_replicas=2) as opened:
        user, session = await opened.session()
        sampler = await opened.base_sampler(user, session)
        for seq_id in range(6):
            await opened.done(await opened.sample(user, sampler, seq_id, seed=1))
        sampled = [opened.scheduler.owner.drivers[name].core.sampling.sampled.total for name in (LEFT, RIGHT)]
        assert sorted(sampled) == [0, 30]
        # The owner of a waiting sample keeps it, although the retry is sent to another replica.
        busy = opened.scheduler.owner.drivers[LEFT if sampled[0] else RIGHT]
        os.kill(busy.slot.pid, signal.SIGSTOP)
        first = await opened.sample(user, sampler, 100, seed=2, max_tokens=64)
        busy.load = lambda: Load(num_samples=1000)
        again = await opened.sample(user, sampler, 100, seed=2, max_tokens=64)
        assert again.request_id == first.request_id
        other = opened.scheduler.owner.drivers[RIGHT if sampled[0] else LEFT]
        assert first.request_id not in other.core.open
        os.kill(busy.slot.pid, signal.SIGCONT)
        await opened.done(first)


@pytest.mark.asyncio
async def test_a_restart_with_fewer_replicas_takes_up_everything(tmp_path):
    opened = await Service.open(tmp_path / "data", num_replicas=2)
    user, session = await opened.session()
    left, right = await on_each(opened, user, session)
    for name in (LEFT, RIGHT):
        os.kill(opened.scheduler.owner.drivers[name].slot.pid, signal.SIGSTOP)
    waiting = [await opened.train(user, run, 1) for run in (left, right)]
    sampler = await opened.base_sampler(user, session)
    waiting.append(await opened.sample(user, sampler, 0, seed=1))
    await opened.die()
    async with service(tmp_path / "data", num_replicas=1) as opened:
        for accepted in waiting:
            await opened.done(accepted)
        for run in (left, right):
            assert (await opened.run(run.model_id)).replica == LEFT
            assert json.loads(await opened.done(await opened.step(user, run, 2)))["metrics"]["optimizer_step"] == 1


loads = st.builds(
    Load,
    num_runs=st.integers(0, 9),
    max_runs=st.integers(1, 9),
    num_samples=st.integers(0, 100),
    is_usable=st.booleans(),
)


@given(st.lists(loads, min_size=1, max_size=6), st.integers())
def test_a_run_gets_room_if_there_is_any(found, seed):
    replicas = [Replica(f"m#{number}", load) for number, load in enumerate(found)]
    chosen = choose_for_run(replicas, random.Random(seed)).load()
    assert chosen.is_usable or not any(load.is_usable for load in found)
    if any(load.is_usable and load.has_room for load in found):
        assert chosen.has_room
    better = [load for load in found if load.is_usable and load.has_room and load.num_runs < chosen.num_runs]
    assert (
        len(better) < max(1, len([load for load in found if load.is_usable and load.has_room]) - 1) or len(found) == 1
    )


def test_a_replica_more_moves_only_its_share_of_the_samples():
    def places(count):
        replicas = [Replica(f"m#{number}", Load()) for number in range(count)]
        return [choose_for_sample(replicas, f"weights-{key}").place for key in range(2000)]

    four, five = places(4), places(5)
    assert max(Counter(four).values()) < 600
    moved = [(before, after) for before, after in zip(four, five, strict=True) if before != after]
    assert {after for _, after in moved} == {"m#4"}
    assert 300 < len(moved) < 500


def test_an_overloaded_or_failed_replica_is_passed_over():
    replicas = [Replica(f"m#{number}", Load()) for number in range(3)]
    first = choose_for_sample(replicas, "weights")
    first._load = Load(num_samples=100)
    second = choose_for_sample(replicas, "weights")
    assert second is not first
    first._load, second._load = Load(), Load(is_usable=False)
    assert choose_for_sample(replicas, "weights") is first
    first._load = Load(is_usable=False)
    assert choose_for_sample(replicas, "weights") not in (first, second)


def test_samplers_have_replicas_and_devices_of_their_own():
    vllm = VllmConfig(replicas=2, tensor_parallel=2)
    found = replica_configs({"m": EngineConfig(vllm=vllm), "n": EngineConfig()}, {"m": 3})
    engines = {place: config.device_index for place, (_, config) in found.items() if config.vllm is None}
    samplers = {place: config.device_index for place, (_, config) in found.items() if config.vllm is vllm}
    assert engines == {"m#0": 0, "m#1": 1, "m#2": 2, "n#0": 0}
    assert samplers == {"m#sampler-0": 3, "m#sampler-1": 5}
    assert {place for place in found if is_sampler(place)} == set(samplers)
    found = replica_configs({"m": EngineConfig(vllm=vllm, ranks=4)}, {"m": 2})
    assert [(config.device_index, config.ranks) for _, config in found.values()] == [(0, 4), (4, 4), (8, 1), (10, 1)]


def test_ranks_do_not_decode_and_wait_for_a_sampler():
    engine, sampler = Replica("m#0", Load()), Replica("m#sampler-0", Load(is_usable=False))
    one, many = EngineConfig(), EngineConfig(ranks=2)
    request = sample_request()
    assert able_to_sample([engine], [sampler], None, one, request) == [engine]  # until the sampler is ready
    assert able_to_sample([engine], [sampler], None, many, request) == [sampler]
    assert able_to_sample([engine], [sampler], "top_k", one, request) == [engine]
    with pytest.raises(Unsupported, match=r"needs 'top_k', which vLLM does not compute exactly, .* has 2 ranks"):
        able_to_sample([engine], [sampler], "top_k", many, request)
    score = sample_request(params={"max_tokens": 1})
    assert able_to_sample([engine], [sampler], "prompt_logprobs", many, score) == [engine]
    sampler._load = Load()
    assert able_to_sample([engine], [sampler], None, one, request) == [sampler]


def sample_request(**values):
    params = types.SamplingParams(**values.pop("params", {}))
    prompt = values.pop("prompt", types.ModelInput.from_ints([1, 2, 3]))
    return types.SampleRequest(prompt=prompt, sampling_params=params, **values)


IMAGE = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
LACKING = {
    "top_k": sample_request(params={"top_k": 1}),
    "top_p": sample_request(params={"top_p": 0.99}),
    "temperature": sample_request(params={"temperature": 0.001}),
    "prompt_logprobs": sample_request(prompt_logprobs=True),
    "topk_prompt_logprobs": sample_request(topk_prompt_logprobs=1),
    "target_prompt_logprobs": sample_request(target_prompt_logprobs=TensorData([[1], [2]], "int64", [2, 1])),
    "prompt_alt_tokens_k": sample_request(prompt_alt_tokens_k=1),
    "images": sample_request(prompt=IMAGE),
}


@pytest.mark.parametrize("name", LACKING)
def test_vllm_gets_no_request_that_it_cannot_answer_exactly(name):
    assert vllm_lacks(LACKING[name], VllmConfig(), shape=None, has_seed=False) == name


def test_vllm_gets_no_seed_grammar_high_rank_or_dora():
    request = sample_request(params={"temperature": 0.7, "stop": ["x"], "max_tokens": 9}, topk_sample_logprobs=3)
    assert vllm_lacks(request, VllmConfig(), shape=WeightsShape(32), has_seed=False) is None
    assert vllm_lacks(request, VllmConfig(), shape=WeightsShape(33), has_seed=False) == "rank"
    assert vllm_lacks(request, VllmConfig(), shape=WeightsShape(8, use_dora=True), has_seed=False) == "use_dora"
    assert vllm_lacks(request, VllmConfig(), shape=None, has_seed=True) == "seed"
    assert vllm_lacks(request, VllmConfig(ignore_seeds=True), shape=None, has_seed=True) is None
    assert vllm_lacks(request, VllmConfig(), shape=None, has_seed=False, grammar="start: /x/") == "grammar"
