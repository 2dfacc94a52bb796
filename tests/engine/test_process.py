"""An engine in a process of its own, through the door the API process uses: every command, every way to end.

Starting a process takes seconds, so those that tests need to themselves are started together when the module begins;
the shared one and that of another program without a fork server.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lorimer.engine import fork_server
from lorimer.engine.messages import (
    Cancel,
    CreateRun,
    DropRun,
    DropSampler,
    ForwardBackward,
    GetStatus,
    LoadProgress,
    LoadSampler,
    LoadState,
    LoraConfig,
    OptimStep,
    PublishSampler,
    RegisterLoss,
    SampleProgress,
    SampleRequest,
    SamplingParams,
    SaveState,
    Shutdown,
    TrainBatch,
)
from lorimer.engine.process import EngineProcess
from lorimer.errors import Cancelled, EngineDied, InvalidInput
from lorimer.models.debug import make_debug_model
from tests.engine.operations import make_operation, make_sample, register_gather, settings

NUMBERS = count()
PATIENCE = 120
"""Seconds after which a test fails instead of waiting; nothing here is expected to take more than a few."""

PARENT = """
import sys, time
from lorimer.engine.config import EngineConfig
from lorimer.engine.process import EngineProcess
settings = dict(model="lorimer/debug", device="cpu", dtype="float32", num_threads=1, memory_bytes=1 << 28)
engine = EngineProcess(EngineConfig(cache_directory=sys.argv[1], **settings))
engine.ready.result()
print(engine.pid, flush=True)
time.sleep(600)
"""


class Started:
    """Processes that start side by side while the module begins."""

    def __init__(self, directory):
        make_debug_model(directory / "model", architecture="llama")
        local = settings(directory, model=str(directory / "model"), token_budget=64)
        self.events: list = []
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(fork_server.VARIABLE, raising=False)
            self.shared = EngineProcess(local, self.events.append)
            self.parent: Any = subprocess.Popen(
                [sys.executable, "-c", PARENT, str(directory)], stdout=subprocess.PIPE, text=True
            )
        self.doomed = EngineProcess(local)
        self.busy = EngineProcess(local)
        self.unknown = EngineProcess(settings(directory, model="nobody/nothing"))
        refused = directory / "refused"
        make_debug_model(refused, architecture="llama")
        (refused / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
        self.refused = EngineProcess(settings(directory, model=str(refused)))

    def close(self):
        engines = (self.shared, self.doomed, self.busy, self.unknown, self.refused)
        for engine in engines:
            engine.close()
        self.parent.kill()
        self.parent.wait()
        self.parent.stdout.close()
        assert not any(psutil.pid_exists(engine.pid) for engine in engines)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    started = Started(tmp_path_factory.mktemp("engine"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def engine(started):
    started.shared.ready.result(PATIENCE)
    return started.shared


@pytest.fixture
def run(engine):
    return new_run(engine)


def new_run(engine, rank=4, seed=1):
    model_id = f"run-{next(NUMBERS)}"
    ask(engine, CreateRun, model_id=model_id, lora=LoraConfig(rank=rank, seed=seed))
    return model_id


def new_id():
    return f"request-{next(NUMBERS)}"


def ask(engine, kind, **fields):
    return engine.submit(kind(request_id=new_id(), **fields)).result(PATIENCE)


def train(engine, *operations):
    return [future.result(PATIENCE) for future in engine.train(TrainBatch(operations=list(operations)))]


def has_ended(pid):
    deadline = time.monotonic() + PATIENCE
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# ── starting ──────────────────────────────────────────────────────────────────────────────────────────


def test_it_loads_and_says_so(engine, started):
    info = engine.ready.result()
    assert (info.architecture, info.device, info.dtype, info.token_budget) == ("LlamaForCausalLM", "cpu", "float32", 64)
    assert [line.partition(" ")[0] for line in info.kernels] == [
        *("attention", "products", "products:", "norms,", "decoding:")
    ]
    assert engine.is_alive
    assert psutil.Process(engine.pid).ppid() == os.getpid()
    stages = [event.stage for event in started.events if isinstance(event, LoadProgress)]
    assert stages[-1].startswith("loading")


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("unknown", ["no model 'nobody/nothing'; looked at:", "aliases", "hub"]),
        ("refused", ["'t5' model; a causal language model is needed"]),
    ],
)
def test_a_model_that_cannot_be_served_is_explained(started, name, messages):
    engine = getattr(started, name)
    error = engine.ready.exception(PATIENCE)
    assert isinstance(error, InvalidInput)
    assert all(message in str(error) for message in messages)
    assert has_ended(engine.pid)
    engine._reader.join(PATIENCE)
    with pytest.raises(EngineDied) as refusal:
        engine.submit(GetStatus(request_id="late"))
    assert messages[0] in str(refusal.value)
    assert not engine.is_alive


def test_an_engine_of_another_version_is_not_waited_for(tmp_path, monkeypatch):
    """What it says cannot be read, as after an upgrade of the files under a running server."""
    stranger = tmp_path / "python"
    stranger.write_text(
        f"#!{sys.executable}\nimport os, sys, time\nnumber, read = int(sys.argv[3]), b''\n"
        "while b'waiting' not in read:\n    read += os.read(number, 4096)\n"
        "os.write(number, (5).to_bytes(8, 'little') + b'hello')\ntime.sleep(600)\n"
    )
    stranger.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stranger))
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)
    with EngineProcess(settings(tmp_path)) as engine:
        future = engine.submit(GetStatus(request_id="waiting"))
        for error in (future.exception(PATIENCE), engine.ready.exception(PATIENCE)):
            assert isinstance(error, EngineDied)
            assert "its reply makes no sense" in str(error)


# ── every command ─────────────────────────────────────────────────────────────────────────────────────


def test_runs_of_several_ranks_and_losses_train_together_as_they_do_alone(engine):
    together, alone = ([new_run(engine, rank, rank) for rank in (1, 4, 9)] for _ in range(2))
    losses = ("cross_entropy", "ppo", "gspo")
    first = train(engine, *(make_operation(r, r, loss) for r, loss in zip(together, losses, strict=True)))
    second = [train(engine, make_operation(r, r, loss))[0] for r, loss in zip(alone, losses, strict=True)]
    for ours, theirs in zip(first, second, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert np.allclose(a, b, atol=1e-4)
    for ours, theirs in zip(together, alone, strict=True):
        steps = [ask(engine, OptimStep, model_id=run, params={"learning_rate": 0.01}).metrics for run in (ours, theirs)]
        assert steps[0] == pytest.approx(steps[1], rel=1e-4)
        assert (steps[0]["optimizer_step"], steps[0]["skipped"]) == (1, 0)


def test_a_run_learns(engine, run):
    losses = []
    for _ in range(8):
        losses.append(train(engine, make_operation(new_id(), run, lengths=[16]))[0].metrics["loss:sum"])
        ask(engine, OptimStep, model_id=run, params={"learning_rate": 0.05})
    assert losses[-1] < losses[0] - 1


def test_a_forward_pass_leaves_no_gradient(engine, run):
    (result,) = train(engine, make_operation(new_id(), run, forward_only=True))
    assert len(result.logprobs) == 3
    assert ask(engine, OptimStep, model_id=run).metrics["grad_norm"] == 0


@pytest.mark.parametrize("optimizer", [True, False], ids=["with-optimizer", "weights-only"])
def test_saved_and_loaded_a_run_goes_on(engine, run, tmp_path, optimizer):
    def advance(model_id, seed):
        (result,) = train(engine, make_operation(new_id(), model_id, seed=seed))
        return result.metrics, ask(engine, OptimStep, model_id=model_id, params={"learning_rate": 0.01}).metrics

    advance(run, 1)
    directory = str(tmp_path / "state")
    saved = ask(engine, SaveState, model_id=run, directory=directory, weights_only=not optimizer)
    assert saved.size_bytes == sum(path.stat().st_size for path in Path(directory).iterdir())
    other = new_run(engine, seed=2)
    advance(other, 3)
    loaded = ask(engine, LoadState, model_id=other, directory=directory, optimizer=optimizer)
    assert loaded.step == (1 if optimizer else 0)
    for seed in (5, 6):
        ours, theirs = advance(run, seed), advance(other, seed)
        if optimizer:
            assert ours == theirs
    if not optimizer:
        # The weights are the same, the moments are not, so the loss is equal once and then differs.
        assert ours != theirs


def test_samplers_are_published_loaded_and_dropped(engine, run, tmp_path):
    train(engine, make_operation(new_id(), run))
    ask(engine, OptimStep, model_id=run, params={"learning_rate": 0.1})
    ask(engine, SaveState, model_id=run, directory=str(tmp_path / "a"), weights_only=True)
    before = ask(engine, GetStatus).num_samplers
    ask(engine, PublishSampler, model_id=run, sampler_id="published")
    ask(engine, LoadSampler, sampler_id="loaded", directory=str(tmp_path / "a"))
    assert ask(engine, GetStatus).num_samplers == before + 2
    futures = [engine.submit(make_sample(new_id(), sampler_id=name)) for name in ("published", "loaded", None)]
    published, loaded, base = (future.result(PATIENCE).sequences[0] for future in futures)
    assert published.tokens.tolist() == loaded.tokens.tolist()
    assert published.logprobs.tolist() != base.logprobs.tolist()
    for name in ("published", "loaded"):
        ask(engine, DropSampler, sampler_id=name)
    with pytest.raises(InvalidInput, match="there is no sampler 'published'"):
        engine.submit(make_sample(new_id(), sampler_id="published")).result(PATIENCE)


def test_a_sample_carries_everything_that_was_asked_for(engine):
    request = make_sample(
        new_id(),
        num_samples=2,
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        prompt_alt_tokens_k=2,
        target_prompt_logprobs=np.arange(38).reshape(19, 2),
    )
    result = engine.submit(request).result(PATIENCE)
    assert [(s.tokens.shape, s.logprobs.shape, s.stop_reason) for s in result.sequences] == [((8,), (8,), "length")] * 2
    assert result.sequences[0].topk_logprobs.token_ids.shape == (8, 2)
    assert np.isnan(result.prompt_logprobs[0])
    assert np.isfinite(result.prompt_logprobs[1:]).all()
    assert result.topk_prompt_logprobs.logprobs.shape == (20, 3)
    assert result.target_prompt_logprobs.shape == (19, 2)
    assert result.prompt_alt_tokens.token_ids.shape == (19, 2)


def test_a_custom_loss_is_registered_and_used(engine, run):
    engine.submit(register_gather(new_id(), "gather")).result(PATIENCE)
    operation = make_operation(new_id(), run, "custom", lengths=[6], loss_fn_config={"loss_id": "gather"})
    operation.data[0].loss_fn_inputs["index"] = np.array([0, 5])
    (result,) = train(engine, operation)
    assert result.metrics["loss:sum"] == pytest.approx(-result.logprobs[0][[0, 5]].sum(), rel=1e-5)
    assert ask(engine, OptimStep, model_id=run).metrics["grad_norm"] > 0


def test_unknown_names_are_answered(engine):
    for command in (OptimStep, DropRun):
        with pytest.raises(InvalidInput, match="there is no run 'nobody'"):
            ask(engine, command, model_id="nobody")
    with pytest.raises(InvalidInput, match="'nodes'"):
        ask(engine, RegisterLoss, loss_id="l", inputs=[("logprobs", 1)], graph={})
    with pytest.raises(InvalidInput, match="there is no run 'nobody'"):
        train(engine, make_operation(new_id(), "nobody"))


# ── futures, streams, cancelling ──────────────────────────────────────────────────────────────────────


def test_streamed_tokens_come_before_the_result_and_are_the_same(engine, started):
    request_id = new_id()
    seen_at_end: list = []
    future = engine.submit(make_sample(request_id, max_tokens=12, num_samples=2, stream=True))
    future.add_done_callback(
        lambda _: seen_at_end.extend(
            event for event in started.events if isinstance(event, SampleProgress) and event.request_id == request_id
        )
    )
    result = future.result(PATIENCE)
    wait_until(lambda: seen_at_end)
    for index, sequence in enumerate(result.sequences):
        pieces = [event for event in seen_at_end if event.index == index]
        assert [token for piece in pieces for token in piece.tokens] == sequence.tokens.tolist()


def wait_until(is_true):
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_cancelled_sample_fails_and_others_go_on(engine, started):
    given_up = new_id()
    lost = engine.submit(make_sample(given_up, max_tokens=480, num_samples=8, stream=True))
    kept = engine.submit(make_sample(new_id(), max_tokens=20))
    wait_until(lambda: any(isinstance(e, SampleProgress) and e.request_id == given_up for e in started.events))
    engine.cancel(given_up)
    engine.cancel("never-there")
    assert isinstance(lost.exception(PATIENCE), Cancelled)
    assert len(kept.result(PATIENCE).sequences[0].tokens) == 20
    assert ask(engine, GetStatus).num_sampling == 0


def test_a_request_id_is_used_once_at_a_time(engine, run):
    first = engine.submit(make_sample("twice", max_tokens=400))
    with pytest.raises(InvalidInput, match="request id 'twice' is under way"):
        engine.submit(GetStatus(request_id="twice"))
    with pytest.raises(InvalidInput, match="request id 'twice' is under way"):
        engine.train(TrainBatch(operations=[make_operation("new", run), make_operation("twice", run)]))
    with pytest.raises(InvalidInput, match="hold an empty one or one twice"):
        engine.train(TrainBatch(operations=[make_operation("same", run), make_operation("same", run)]))
    with pytest.raises(InvalidInput, match="hold an empty one"):
        engine.submit(GetStatus(request_id=""))
    first.result(PATIENCE)
    # None of the refused commands has left a trace.
    for request_id in ("twice", "new", "same"):
        engine.submit(GetStatus(request_id=request_id)).result(PATIENCE)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (SampleRequest, {"prompt": np.array([object()])}),
        (SampleRequest, {"prompt": [1, 2, 3]}),
        (SampleRequest, {"prompt": np.arange(3), "params": SamplingParams(seed=2**70)}),
        (SampleRequest, {"prompt": np.arange(3), "num_samples": "3"}),
        (OptimStep, {"model_id": "\ud800"}),
        (OptimStep, {"model_id": "m", "params": {"learning_rate": None}}),
        (RegisterLoss, {"loss_id": "l", "inputs": [("logprobs", 1)], "graph": {"a": object()}}),
    ],
    ids=["objects", "list", "huge-seed", "text-number", "lone-surrogate", "no-number", "graph-of-objects"],
)
def test_what_cannot_be_sent_is_refused_at_the_door(engine, kind, fields):
    with pytest.raises(InvalidInput, match=f"{kind.__name__} cannot be sent"):
        ask(engine, kind, **fields)
    ask(engine, GetStatus)


def test_a_graph_without_end_is_refused_at_the_door(engine):
    graph: dict = {}
    for _ in range(100_000):
        graph = {"a": graph}
    with pytest.raises(InvalidInput, match="cannot be sent"):
        engine.submit(RegisterLoss(request_id="r", loss_id="l", inputs=[("logprobs", 1)], graph=graph))


@pytest.mark.parametrize("command", [TrainBatch(operations=[]), Cancel(request_id="r"), Shutdown()], ids=str)
def test_what_has_no_single_answer_is_not_submitted(engine, command):
    with pytest.raises(TypeError, match="is not submitted"):
        engine.submit(command)


def test_a_caller_that_goes_away_disturbs_nobody(engine):
    """A web request that is dropped cancels its future; the reply that still comes must find nobody and do no harm."""

    async def drop():
        waiting = asyncio.wrap_future(engine.submit(make_sample(new_id(), max_tokens=100)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(drop())
    future = engine.submit(make_sample(new_id()))
    assert not future.cancel()
    assert len(future.result(PATIENCE).sequences) == 1


def test_a_callback_may_send_the_next_command_whatever_its_size(engine):
    """Neither end may wait for the other to read: commands go out while replies come in, both larger than a pipe."""
    wide = np.zeros((510, 1000), np.int64)
    finished: Future = Future()
    rounds = count(1)

    def again(future):
        if future.exception() or next(rounds) > 3:
            finished.set_result(future.exception())
        else:
            engine.submit(request()).add_done_callback(again)

    def request():
        return make_sample(new_id(), prompt_length=511, max_tokens=1, target_prompt_logprobs=wide)

    for _ in range(3):
        engine.submit(request())
    engine.submit(request()).add_done_callback(again)
    assert finished.result(PATIENCE) is None


def test_sending_does_not_wait_for_the_engine(engine):
    """Commands of many megabytes leave immediately although the engine reads nothing."""
    data = make_operation("", "", lengths=[500] * 500).data
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        futures = []
        for _ in range(5):
            operation = ForwardBackward(request_id=new_id(), model_id="nobody", data=data, loss_fn="cross_entropy")
            futures += engine.train(TrainBatch(operations=[operation]))
        assert not any(future.done() for future in futures)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert {type(future.exception(PATIENCE)) for future in futures} == {InvalidInput}


def test_an_error_in_the_callback_for_events_stops_nothing(engine, started, monkeypatch, capfd):
    def fail(event):
        raise RuntimeError("the listener is broken")

    monkeypatch.setattr(engine, "_on_event", fail)
    result = engine.submit(make_sample(new_id(), stream=True)).result(PATIENCE)
    assert len(result.sequences[0].tokens) == 8
    assert "the listener is broken" in capfd.readouterr().err


def test_threads_share_the_door(engine, run):
    failures: list = []

    def work(thread):
        try:
            for i in range(5):
                prompt_seed = 10 * thread + i
                future = engine.submit(
                    make_sample(new_id(), prompt_seed=prompt_seed, max_tokens=3, prompt_logprobs=True)
                )
                assert len(future.result(PATIENCE).prompt_logprobs) == 20
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[i]) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ── ending ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_engine_fails_what_is_waiting_and_what_comes_later(started):
    engine = started.doomed
    engine.ready.result(PATIENCE)
    run = new_run(engine)
    futures = [engine.submit(make_sample(new_id(), max_tokens=480, num_samples=16)) for _ in range(3)]
    futures += engine.train(TrainBatch(operations=[make_operation(new_id(), run, lengths=[64] * 500)]))
    futures.append(engine.submit(OptimStep(request_id=new_id(), model_id=run)))
    os.kill(engine.pid, signal.SIGKILL)
    for future in futures:
        error = future.exception(PATIENCE)
        assert isinstance(error, EngineDied)
        assert str(error) == f"the engine process {engine.pid} ended with code -9"
    assert not engine.is_alive
    with pytest.raises(EngineDied, match="ended with code -9"):
        engine.submit(GetStatus(request_id="late"))
    with pytest.raises(EngineDied, match="ended with code -9"):
        engine.train(TrainBatch(operations=[make_operation("late", run)]))
    engine.cancel("late")
    engine.close()
    engine.close()
    assert not psutil.pid_exists(engine.pid)


def test_closing_an_engine_that_does_not_listen_kills_it(tmp_path):
    engine = EngineProcess(settings(tmp_path))
    while engine.pid is None:
        time.sleep(0.01)
    os.kill(engine.pid, signal.SIGSTOP)
    future = engine.submit(GetStatus(request_id="waiting"))
    engine.close(timeout_seconds=0.2)
    for error in (future.exception(0), engine.ready.exception(0)):
        assert isinstance(error, EngineDied)
        assert "ended with code -9" in str(error)
    assert not psutil.pid_exists(engine.pid)


def test_closing_a_busy_engine_ends_it_cleanly(started):
    engine = started.busy
    engine.ready.result(PATIENCE)
    run = new_run(engine)
    samples = [engine.submit(make_sample(new_id(), max_tokens=480, num_samples=16)) for _ in range(3)]
    futures = engine.train(TrainBatch(operations=[make_operation(new_id(), run, lengths=[64] * 2000)]))
    engine.close(timeout_seconds=PATIENCE)
    for future in [*samples, *futures]:
        error = future.exception(0)
        assert isinstance(error, EngineDied)
        assert "ended with code 0" in str(error)
    assert not psutil.pid_exists(engine.pid)


def test_an_engine_whose_owner_was_killed_ends_by_itself(started):
    pid = int(started.parent.stdout.readline())
    assert psutil.pid_exists(pid)
    started.parent.kill()
    started.parent.wait()
    assert has_ended(pid)
