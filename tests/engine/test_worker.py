"""The worker's loop at the end of a real socket, on a thread of this process: order, fairness, failures, leaving.

The same loop in a process of its own is in ``test_process.py``.
"""

import socket
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from lorimer.engine.channel import Connection
from lorimer.engine.engine import Engine
from lorimer.engine.messages import (
    Cancel,
    CreateRun,
    Done,
    DropRun,
    DropSampler,
    Failed,
    GetStatus,
    LoadSampler,
    LoadState,
    LoraConfig,
    OptimStep,
    PublishSampler,
    RegisterLoss,
    SampleProgress,
    SaveState,
    Shutdown,
    Status,
    TrainBatch,
    decode_reply,
    encode,
)
from lorimer.engine.sampling import sampler
from lorimer.engine.sampling.constraints import Constraint
from lorimer.engine.sampling.kv_cache import PrefixStore
from lorimer.engine.sampling.prompts import PromptScores
from lorimer.engine.worker import Worker
from tests.engine.operations import make_operation, make_sample, register_gather, settings

NUMBERS = count()
PASS_TOKENS = 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(settings(tmp_path_factory.mktemp("cache"), token_budget=PASS_TOKENS))


class Client:
    """The other end: sends commands and takes replies in the order they come."""

    def __init__(self, engine):
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60)
        self.connection = Connection(self._socket)
        self.thread = threading.Thread(target=self._serve, args=[engine, Connection(theirs)])
        self.thread.start()

    def _serve(self, engine, connection):
        try:
            Worker(engine, connection).run()
        finally:
            connection.close()

    def send(self, *commands):
        """In one piece, so that the worker has all of them together."""
        messages = [encode(command) for command in commands]
        self._socket.sendall(b"".join(len(m).to_bytes(8, "little") + m for m in messages))

    def next(self):
        data = self.connection.receive()
        assert data is not None, "the worker is gone or silent"
        return decode_reply(data)

    def take_until(self, *request_ids):
        """Every reply up to the last of those that answer ``request_ids``."""
        waiting, replies = set(request_ids), []
        while waiting:
            replies.append(self.next())
            if isinstance(replies[-1], Done | Failed):
                waiting.discard(replies[-1].request_id)
        return replies

    def ask(self, command):
        self.send(command)
        return self.take_until(command.request_id)[-1]

    def has_left(self):
        self.thread.join(60)
        return not self.thread.is_alive()


@pytest.fixture
def client(engine):
    client = Client(engine)
    yield client
    client.connection.close()
    assert client.has_left()


@pytest.fixture
def run(client):
    model_id = f"run-{next(NUMBERS)}"
    reply = client.ask(CreateRun(request_id="create", model_id=model_id, lora=LoraConfig(rank=4, seed=1)))
    assert isinstance(reply, Done)
    return model_id


def long_batch(request_id, run, num_passes):
    """A batch of one operation that takes ``num_passes`` passes."""
    return TrainBatch(operations=[make_operation(request_id, run, lengths=[PASS_TOKENS] * num_passes)])


def answers(replies):
    return [reply.request_id for reply in replies if isinstance(reply, Done | Failed)]


# ── order ─────────────────────────────────────────────────────────────────────────────────────────────


def test_training_commands_run_in_the_order_they_came(client, run):
    commands = [
        TrainBatch(operations=[make_operation("a", run), make_operation("b", run, "ppo")]),
        OptimStep(request_id="c", model_id=run),
        OptimStep(request_id="d", model_id=run),
        PublishSampler(request_id="e", model_id=run, sampler_id=f"sampler-{next(NUMBERS)}"),
        DropRun(request_id="f", model_id=run),
        OptimStep(request_id="g", model_id=run),
    ]
    client.send(*commands)
    replies = client.take_until("g")
    assert answers(replies) == ["a", "b", "c", "d", "e", "f", "g"]
    assert [type(reply) for reply in replies] == [Done] * 6 + [Failed]
    steps = [reply.result.metrics["optimizer_step"] for reply in replies[2:4]]
    assert steps == [1, 2]


def test_status_does_not_wait_for_training(client, run):
    client.send(long_batch("train", run, 20), GetStatus(request_id="status"))
    replies = client.take_until("train", "status")
    assert answers(replies) == ["status", "train"]
    assert isinstance(replies[0].result, Status)


def test_an_empty_batch_is_nothing(client):
    client.send(TrainBatch(operations=[]))
    assert isinstance(client.ask(GetStatus(request_id="status")), Done)


# ── fairness ──────────────────────────────────────────────────────────────────────────────────────────


def test_training_and_sampling_advance_together(client, run):
    """Under a long batch, short samples end before it does; under long samples, the batch ends before they do."""
    longs = [f"long-{i}" for i in range(4)]
    client.send(
        *(make_sample(name, max_tokens=480, prompt_seed=i, stream=True) for i, name in enumerate(longs)),
        *(make_sample(f"short-{i}", max_tokens=5, prompt_seed=i) for i in range(8)),
        long_batch("batch", run, 40),
    )
    replies = client.take_until("batch", *longs)
    order = answers(replies)
    assert set(order[:8]) == {f"short-{i}" for i in range(8)}
    assert order[8] == "batch"
    assert set(order[9:]) == set(longs)
    cut = next(i for i, reply in enumerate(replies) if isinstance(reply, Done) and reply.request_id == "batch")
    num_before = sum(isinstance(reply, SampleProgress) for reply in replies[:cut])
    assert 40 <= num_before <= 4 * 480 - 40


def test_small_commands_are_not_kept_waiting_by_samples(client, run):
    client.send(
        *(make_sample(f"long-{i}", max_tokens=480, prompt_seed=i) for i in range(4)),
        *(
            c
            for i in range(10)
            for c in (long_batch(f"batch-{i}", run, 1), OptimStep(request_id=f"step-{i}", model_id=run))
        ),
    )
    order = answers(client.take_until(*(f"step-{i}" for i in range(10)), *(f"long-{i}" for i in range(4))))
    assert order[:20] == [f"{kind}-{i}" for i in range(10) for kind in ("batch", "step")]


def test_samples_are_not_kept_waiting_by_small_commands(client, run):
    client.send(
        *(OptimStep(request_id=f"step-{i}", model_id=run) for i in range(200)), make_sample("sample", max_tokens=10)
    )
    order = answers(client.take_until("sample", "step-199"))
    assert order[-1] == "step-199"


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────


def test_every_command_that_cannot_be_done_says_so(client, run, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    commands = {
        "there is no run 'x'": [
            OptimStep(request_id="", model_id="x"),
            SaveState(request_id="", model_id="x", directory=nowhere),
            LoadState(request_id="", model_id="x", directory=nowhere),
            DropRun(request_id="", model_id="x"),
            PublishSampler(request_id="", model_id="x", sampler_id="s"),
        ],
        "there is no sampler 'x'": [
            DropSampler(request_id="", sampler_id="x"),
            make_sample("", sampler_id="x"),
        ],
        "there is no directory": [
            LoadSampler(request_id="", sampler_id="s", directory=nowhere),
            LoadState(request_id="", model_id=run, directory=nowhere),
        ],
        "exists already": [CreateRun(request_id="", model_id=run, lora=LoraConfig())],
        "'format' 1 and 'nodes'": [RegisterLoss(request_id="", loss_id="l", inputs=[("logprobs", 1)], graph={})],
    }
    for message, group in commands.items():
        for command in group:
            reply = client.ask(command)
            assert isinstance(reply, Failed), command
            assert (reply.category, message in reply.error) == ("user", True), reply


def test_a_batch_answers_each_operation_for_itself(client, run):
    client.send(
        TrainBatch(operations=[make_operation("a", run), make_operation("b", "x"), make_operation("c", run, "gspo")])
    )
    replies = client.take_until("a", "b", "c")
    assert [type(reply) for reply in replies] == [Done, Failed, Done]
    assert (replies[1].category, replies[1].error) == ("user", "there is no run 'x'")


@pytest.mark.parametrize("error", [MemoryError("no memory left"), ValueError("no reason")], ids=["memory", "other"])
def test_an_error_of_nobody_fails_the_work_and_not_the_worker(client, run, engine, monkeypatch, capfd, error):
    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "hidden", fail)
        client.send(TrainBatch(operations=[make_operation("a", run), make_operation("b", run)]), make_sample("c"))
        replies = client.take_until("a", "b", "c")
    assert {(type(reply), reply.category) for reply in replies} == {(Failed, "server")}
    assert all(str(error) in reply.error for reply in replies)
    assert str(error) in capfd.readouterr().err
    client.send(TrainBatch(operations=[make_operation("a", run)]), make_sample("c"))
    assert {type(reply) for reply in client.take_until("a", "c")} == {Done}
    assert client.ask(OptimStep(request_id="step", model_id=run)).result.metrics["optimizer_step"] == 1


def plant(patch, engine, place):
    """Have the engine fail at what it does for the request ``bad``, whose prompt alone holds token 7 nine times."""
    is_bad = lambda tokens: (np.asarray(tokens) == 7).sum() >= 9  # noqa: E731
    wanted: dict[str, tuple[Any, Callable[..., bool]]] = {
        "find": (PrefixStore, lambda self, salt, weights, tokens, most: is_bad(tokens)),
        "put": (PrefixStore, lambda self, salt, weights, tokens, cache: is_bad(tokens)),
        "shared pass": (engine.model, lambda tokens, *_: is_bad(tokens.cpu().numpy())),
        "result": (sampler, lambda request: request.message.request_id == "bad"),
        "progress": (sampler, lambda sequence: sequence.request.message.request_id == "bad"),
        "add": (PromptScores, lambda self, *_: is_bad(self._message.prompt)),
        "advance": (Constraint, lambda self, token: True),
        "allowed": (Constraint, lambda self, vocab_size: True),
    }
    owner, is_it = wanted[place]
    name = "hidden" if place == "shared pass" else place
    original = getattr(owner, name)

    def planted(*args):
        if is_it(*args):
            raise KeyError("planted")
        return original(*args)

    patch.setattr(owner, name, planted)


@pytest.mark.parametrize("place", ["find", "put", "shared pass", "result", "progress", "add", "advance", "allowed"])
def test_an_error_in_the_work_for_one_request_fails_that_request_alone(client, engine, monkeypatch, capfd, place):
    good = [make_sample(f"good-{i}", prompt_seed=i, max_tokens=40, num_samples=2) for i in range(3)]
    alone = [client.ask(request).result.sequences for request in good]
    options = {"stream": place == "progress", "prompt_logprobs": place == "add"}
    grammar = "start: /[a-z]*/" if place in ("advance", "allowed") else ""
    bad = make_sample("bad", num_samples=3, prompt_seed=100 + next(NUMBERS), grammar=grammar, **options)
    bad.prompt[:9] = 7
    with monkeypatch.context() as patch:
        plant(patch, engine, place)
        client.send(*good[:2], bad, good[2])
        replies = {r.request_id: r for r in client.take_until("bad", *(g.request_id for g in good))}
    assert isinstance(replies["bad"], Failed)
    assert (replies["bad"].category, "planted" in replies["bad"].error) == ("server", True)
    assert "planted" in capfd.readouterr().err
    for request, expected in zip(good, alone, strict=True):
        found = replies[request.request_id].result.sequences
        assert [s.tokens.tolist() for s in found] == [s.tokens.tolist() for s in expected]
    assert isinstance(client.ask(bad), Done), "another attempt succeeds"
    status = client.ask(GetStatus(request_id="status")).result
    assert (status.num_sampling, status.num_waiting) == (0, 0)


def test_a_cancelled_sample_ends_and_the_others_go_on(client):
    alone = client.ask(make_sample("kept", max_tokens=60)).result.sequences[0]
    client.send(make_sample("given-up", max_tokens=480, num_samples=3, stream=True))
    while not isinstance(client.next(), SampleProgress):
        pass
    client.send(make_sample("kept", max_tokens=60), Cancel(request_id="given-up"))
    replies = client.take_until("given-up", "kept")
    (failed,) = (reply for reply in replies if isinstance(reply, Failed))
    done = replies[-1]
    assert (failed.request_id, failed.category) == ("given-up", "cancelled")
    assert done.result.sequences[0].tokens.tolist() == alone.tokens.tolist()
    after = replies[replies.index(failed) :]
    assert not any(isinstance(reply, SampleProgress) for reply in after)
    assert client.ask(GetStatus(request_id="status")).result.num_sampling == 0


def test_cancelling_what_is_not_under_way_is_no_event(client):
    client.send(Cancel(request_id="never"), make_sample("done"))
    assert answers(client.take_until("done")) == ["done"]
    client.send(Cancel(request_id="done"))
    assert client.ask(GetStatus(request_id="status")).request_id == "status"


def test_a_streamed_sample_is_its_result_in_pieces(client):
    request = make_sample("stream", max_tokens=12, num_samples=3, stream=True)
    client.send(request)
    *progress, done = client.take_until("stream")
    assert all(isinstance(reply, SampleProgress) for reply in progress)
    for index, sequence in enumerate(done.result.sequences):
        pieces = [reply for reply in progress if reply.index == index]
        assert [token for piece in pieces for token in piece.tokens] == sequence.tokens.tolist()
        assert [x for piece in pieces for x in piece.logprobs] == pytest.approx(sequence.logprobs.tolist())


# ── leaving ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["shutdown", "gone"])
@pytest.mark.parametrize("busy_with", ["nothing", "training", "sampling", "both"])
def test_it_leaves_when_told_or_when_nobody_is_left(engine, how, busy_with):
    client, run = Client(engine), f"run-{next(NUMBERS)}"
    client.ask(CreateRun(request_id="create", model_id=run, lora=LoraConfig(rank=1, seed=0)))
    num_tokens = engine.trainer.num_tokens
    if busy_with in ("sampling", "both"):
        client.send(make_sample("sample", max_tokens=480, num_samples=16))
    if busy_with in ("training", "both"):
        client.send(long_batch("batch", run, 2000), OptimStep(request_id="step", model_id=run))
    time.sleep(0.05)  # what it is busy with has begun when it answers the after that
    client.ask(GetStatus(request_id="status"))
    if how == "shutdown":
        client.send(Shutdown())
    else:
        client.connection.close()
    assert client.has_left()
    client.connection.close()
    # The batch was given up between two passes: nothing of it has happened.
    assert engine.trainer.num_tokens == num_tokens
    fresh = Client(engine)
    assert fresh.ask(OptimStep(request_id="step", model_id=run)).result.metrics["grad_norm"] == 0
    fresh.send(Shutdown(), OptimStep(request_id="late", model_id=run))
    assert fresh.has_left()
    fresh.connection.close()
    engine.sampler.fail_all(RuntimeError("left"))


def test_custom_losses_live_as_long_as_the_engine(client, run):
    assert isinstance(client.ask(register_gather("register", "picked")), Done)
    operation = make_operation("train", run, "custom", lengths=[6], loss_fn_config={"loss_id": "picked"})
    operation.data[0].loss_fn_inputs["index"] = operation.data[0].tokens[:2] * 0 + [1, 4]
    client.send(TrainBatch(operations=[operation]))
    (reply,) = client.take_until("train")
    picked = reply.result.logprobs[0][[1, 4]].sum()
    assert reply.result.metrics["loss:sum"] == pytest.approx(-picked, rel=1e-5)
    assert reply.result.metrics["custom/picked:sum"] == pytest.approx(picked, rel=1e-5)
