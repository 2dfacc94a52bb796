"""The replicas of full runs: which there are, and when their engines end."""

from dataclasses import replace
from pathlib import Path

import pytest

from lorimer import types
from lorimer.engine.config import EngineConfig, VllmConfig
from lorimer.engine.messages import ModelInfo, SaveState
from lorimer.errors import InvalidInput
from lorimer.scheduler import events
from lorimer.scheduler.admission import values_of_request
from lorimer.scheduler.core import Core
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.placement import full_configs, is_full, is_plain, is_sampler
from tests.scheduler.test_eviction import held

INFO = ModelInfo(
    model_name="m",
    directory="",
    architecture="",
    vocab_size=8,
    max_context=8,
    num_parameters=1,
    dtype="float32",
    device="cpu",
    token_budget=64,
    eos_token_ids=[],
    target_modules=[],
)


@pytest.fixture
def core():
    core = Core("m", SchedulerLimits(), Path("/data/weights"), Path("/data/snapshots"), 1, "m#full-0")
    core.handle([events.EngineReady(INFO)], 0.0)
    return core


def hold(core, **values):
    run = held("r", busy=False, **values)
    for runs in (core.runs, core.held):
        runs[run.model_id] = run
    return run


def kinds(effects):
    return [type(effect) for effect in effects]


def timer_fired(core, now):
    return core.handle([events.TimerFired(events.Timer("idle"))], now)


def test_engines_of_full_runs_have_the_ranks_of_their_base_and_are_of_their_own_kind():
    models = {"m": EngineConfig(model="m", ranks=4, dtype="bfloat16"), "n": EngineConfig(vllm=VllmConfig())}
    found = full_configs(models, 2)
    assert list(found) == ["m#full-0", "m#full-1", "n#full-0", "n#full-1"]
    for place, (_, config) in found.items():
        assert is_full(place) and not is_sampler(place) and not is_plain(place)
        assert (config.method, config.vllm) == ("full", None)
    assert [config.dtype for _, config in found.values()] == ["bfloat16"] * 2 + ["auto"] * 2
    assert [(config.ranks, config.device_index) for _, config in found.values()] == [(4, 0), (4, 4), (1, 0), (1, 1)]
    assert is_plain("m#0") and not is_plain("m#sampler-0")
    assert full_configs({"m": EngineConfig(quantize="nf4")}, 2) == {}


def test_an_engine_without_a_run_ends_after_a_while(core):
    assert kinds(timer_fired(core, 599.0)) == [events.SetTimer]
    assert core.is_ready
    assert kinds(timer_fired(core, 600.0)) == [events.StopEngine]
    assert not (core.is_ready or core.is_starting)
    assert timer_fired(core, 2000.0) == []


def test_an_idle_run_is_saved_before_its_engine_ends(core):
    run = hold(core, work_seconds=1.0)
    effects = timer_fired(core, 600.0)
    assert [type(one.command) for one in effects if isinstance(one, events.Send)] == [SaveState]
    assert events.StopEngine not in kinds(effects) and run.is_leaving


def saves(core, run):
    core.touch(run)
    return [one.command for one in core.handle([], 1.0) if isinstance(one, events.Send)]


@pytest.mark.parametrize(("cost", "due"), [(0.1, 10.0), (3.0, 60.0)])
def test_the_interval_of_snapshots_grows_with_their_cost(core, cost, due):
    run = hold(core, snapshot_cost=cost, work_seconds=due - 0.1)
    assert saves(core, run) == []
    run.work_seconds = due
    (command,) = saves(core, run)
    assert isinstance(command, SaveState) and command.is_snapshot and not command.shares_with


def test_a_snapshot_shares_files_only_with_the_one_that_it_replaces(core):
    run = hold(core, work_seconds=20.0)
    run.adopt(replace(run.row, newest_name="first", newest_seq=3))
    assert saves(core, run)[0].shares_with == ""
    run.end_saving()
    run.work_seconds = 20.0
    run.adopt(replace(run.row, snapshot_name="first", snapshot_seq=3, newest_name="second", newest_seq=6))
    assert saves(core, run)[0].shares_with == "/data/snapshots/first"


def test_work_begins_the_time_anew(core):
    run = hold(core)
    run.replays.add(object())
    timer_fired(core, 600.0)
    assert core.is_ready and not run.is_leaving
    run.replays.clear()
    assert kinds(timer_fired(core, 700.0)) == [events.SetTimer]
    assert core.is_ready and not run.is_leaving


def test_engines_of_adapters_stay():
    core = Core("m", SchedulerLimits(), Path("/data/weights"), Path("/data/snapshots"), 1, "m#0")
    core.handle([events.EngineReady(INFO)], 0.0)
    assert timer_fired(core, 1e6) == [] and core.is_ready


def create(base_model, **fields):
    return types.CreateModelRequest(session_id="s", model_seq_id=0, base_model=base_model, **fields)


def test_a_request_asks_for_a_full_run_by_its_config_or_by_the_name_of_the_model():
    values = values_of_request(create("m", full_config=types.FullConfig(train_norms=False)), ["m"])
    assert (values.method, values.rank, values.train_embed, values.train_norms) == ("full", 0, True, False)
    named = create("m:full", lora_config=types.LoraConfig(rank=8, train_unembed=False))
    values = values_of_request(named, ["m"])
    assert (values.base_model, values.method, values.train_unembed, values.train_embed) == ("m", "full", False, False)
    assert values.train_attn and values.train_norms
    # A model may have such a name.
    assert values_of_request(named, ["m:full"]).method == "lora"
    with pytest.raises(InvalidInput, match="a run has one of them"):
        both = create("m", full_config=types.FullConfig(), lora_config=types.LoraConfig(rank=8))
        values_of_request(both, ["m"])
    with pytest.raises(InvalidInput, match="at least one is needed"):
        none = types.FullConfig(**dict.fromkeys(types.FullConfig.model_fields, False))
        values_of_request(create("m", full_config=none), ["m"])
