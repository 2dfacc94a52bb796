"""Ranks that share a base model compute what one process does: real processes, gloo, float32.

One engine of two or three ranks for each architecture; the reference is an engine of one process in this one.
"""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from lorimer.engine.adapters import checkpoints
from lorimer.engine.adapters.adapters import FACTORS
from lorimer.engine.channel import Connection
from lorimer.engine.engine import Engine
from lorimer.engine.messages import (
    CreateRun,
    DropRun,
    LoadProgress,
    LoadState,
    LoraConfig,
    OptimStep,
    PublishSampler,
    SaveState,
    TrainBatch,
    Verdict,
)
from lorimer.engine.model.base_model import load_model
from lorimer.engine.process import EngineProcess
from lorimer.engine.sharding import GroupFailed, Shards
from lorimer.engine.training.losses import LOSSES
from lorimer.errors import EngineDied, EngineError, InvalidInput
from lorimer.models.debug import make_debug_model
from tests.engine.debug_vision import make_debug_vision_model
from tests.engine.operations import make_operation, make_sample, register_gather, settings
from tests.engine.reference import DEVICE, make_adapter

NUMBERS = count()
PATIENCE = 300
ENGINES = {"qwen2": 2, "gemma2": 3, "gpt_oss": 2}
"""Ranks by architecture: a head tied to the embedding, and biases; soft caps, and rows that three ranks cannot divide
evenly; experts with biases, stored transposed."""
BUDGET = 32


class Pair:
    """An engine of several ranks, and one of one process, that execute the same commands."""

    def __init__(self, folder, architecture, size):
        self.folder, self.size = folder, size
        make_debug_model(folder / "model", architecture=architecture)
        self.events: list = []
        ranks = settings(folder, model=str(folder / "model"), token_budget=BUDGET, seed=3, ranks=size)
        self.ranks = EngineProcess(ranks, self.events.append)
        self.alone = Engine(settings(folder, model=str(folder / "model"), token_budget=BUDGET, seed=3))

    def ask(self, kind, **fields):
        command = kind(request_id=f"request-{next(NUMBERS)}", **fields)
        return self.ranks.submit(command).result(PATIENCE)

    def new_run(self, rank, seed, **flags):
        """A run, the same in both engines, in which no factor is zero."""
        model_id = f"run-{next(NUMBERS)}"
        create = CreateRun(request_id=model_id, model_id=model_id, lora=LoraConfig(rank=rank, seed=seed, **flags))
        self.alone.create_run(create)
        self.ranks.submit(create).result(PATIENCE)
        directory = str(self.folder / f"start-{model_id}")
        adapter = make_adapter(self.alone.model, rank=rank, seed=seed, **flags)
        checkpoints.save(adapter, self.alone.model.targets, directory, base_model="", weights_only=True)
        load = LoadState(request_id=f"load-{model_id}", model_id=model_id, directory=directory, optimizer=False)
        self.alone.load_state(load)
        self.ranks.submit(load).result(PATIENCE)
        return model_id

    def train(self, *operations):
        """The results of both engines for the same batch: those of the ranks, and of one process."""
        futures = self.ranks.train(TrainBatch(operations=list(operations)))
        return [_outcome(future) for future in futures], self.alone.train(operations)

    def state(self, model_id):
        """What the ranks have saved of a run: weights, moments and gradient."""
        directory = self.folder / f"saved-{next(NUMBERS)}"
        self.ask(SaveState, model_id=model_id, directory=str(directory), weights_only=False)
        return load_file(directory / "training_state.safetensors")

    def assert_same_gradient(self, model_id):
        saved, run = self.state(model_id), self.alone._run(model_id)
        assert run.grads is not None
        for name, pair in run.grads.items():
            for factor, expected in zip(FACTORS[: len(pair)], pair, strict=True):
                found, expected = saved[f"grad/{name}/{factor}"], expected.numpy()
                assert np.linalg.norm(expected) > 0, name
                assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected), (name, factor)


def _outcome(future):
    try:
        return future.result(PATIENCE)
    except EngineDied:
        raise
    except (InvalidInput, EngineError) as error:
        return error


@pytest.fixture(scope="module", params=ENGINES)
def pair(request, tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp(request.param), request.param, ENGINES[request.param])
    with pair.ranks:
        pair.ranks.ready.result(PATIENCE)
        yield pair


def assert_same_results(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours.logprobs) == len(theirs.logprobs)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert ours.metrics.keys() == theirs.metrics.keys()
        for name, value in theirs.metrics.items():
            assert ours.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_all_losses_of_runs_with_different_ranks_in_one_batch(pair):
    """Two of them are DoRA runs, without experts, for which there is no DoRA."""
    dora = {"use_dora": True, "train_mlp": not any(target.num_experts for target in pair.alone.model.targets)}
    pair.alone.register_loss(register_gather("loss", "picked"))
    pair.ranks.submit(register_gather(f"loss-{next(NUMBERS)}", "picked")).result(PATIENCE)
    runs, operations = [], []
    for number, loss_fn in enumerate([*LOSSES, "custom"]):
        runs.append(pair.new_run(rank=(2, 8, 4)[number % 3], seed=number, **(dora if number in (1, 4) else {})))
        # Lengths that the budget cuts into several passes; one sequence is longer than the budget: checkpointed.
        config = {"loss_id": "picked"} if loss_fn == "custom" else {}
        request_id = f"op-{next(NUMBERS)}"
        operation = make_operation(request_id, runs[-1], loss_fn, (9, 17, 40, 5), number, loss_fn_config=config)
        if loss_fn == "custom":
            for datum in operation.data:
                datum.loss_fn_inputs["index"] = np.array([1, 4])
        operations.append(operation)
    found, expected = pair.train(*operations)
    assert_same_results(found, expected)
    for model_id in runs:
        pair.assert_same_gradient(model_id)


def test_ranks_share_prefixes_and_divide_a_tree_that_is_most_of_the_batch(pair):
    """One tree, which no rank computes alone; then several, whole; also across the operations of a run."""
    rng = np.random.default_rng(0)
    for num_trees in (1, 5):
        run, operations = pair.new_run(4, num_trees), []
        prompts = [rng.integers(0, 250, 18) for _ in range(num_trees)]
        for loss_fn in ("ppo", "gspo"):
            operation = make_operation(f"op-{next(NUMBERS)}", run, loss_fn, [18 + 2 * i for i in range(8)])
            for i, datum in enumerate(operation.data):
                datum.tokens[:18] = prompts[i % num_trees]
            operations.append(operation)
        found, expected = pair.train(*operations)
        computed = [sum(r.metrics.pop("tokens_computed:sum") for r in results) for results in (found, expected)]
        total = sum(r.metrics["tokens:sum"] for r in expected)
        assert max(computed) < 0.9 * total
        assert_same_results(found, expected)
        pair.assert_same_gradient(run)


def test_fewer_sequences_than_ranks_and_operations_without_a_gradient(pair):
    """One sequence trains at one rank while the other has none; a forward pass is dealt like any other."""
    run, other = pair.new_run(4, 1), pair.new_run(2, 2)
    names = [f"op-{next(NUMBERS)}" for _ in range(4)]
    alone = make_operation(names[0], run, "dro", (7,))
    assert_same_results(*pair.train(alone))
    forward = make_operation(names[1], run, "ppo", (12, 3, 30), forward_only=True)
    masked = make_operation(names[2], other, "cross_entropy", (6,))
    masked.data[0].loss_fn_inputs["weights"][:] = 0
    assert_same_results(*pair.train(forward, masked, make_operation(names[3], other, "cispo", (33,))))
    for model_id in (run, other):
        pair.assert_same_gradient(model_id)


def test_an_operation_that_fails_at_one_rank_fails_alone(pair):
    """Loss and custom loss fail while a rank scores, after the forward pass that all ranks share."""
    runs = [pair.new_run(rank, rank) for rank in (2, 4, 8)]
    overflow, bad, good = (
        make_operation(f"op-{next(NUMBERS)}", run, loss_fn, (11,))
        for run, loss_fn in zip(runs, ("importance_sampling", "custom", "cross_entropy"), strict=True)
    )
    overflow.data[0].loss_fn_inputs["logprobs"][:] = -1e4
    pair.alone.register_loss(register_gather("loss", "other"))
    pair.ranks.submit(register_gather(f"loss-{next(NUMBERS)}", "other")).result(PATIENCE)
    bad = make_operation(f"op-{next(NUMBERS)}", runs[1], "custom", (5,), loss_fn_config={"loss_id": "other"})
    bad.data[0].loss_fn_inputs["index"] = np.array([99])
    refused = make_operation(f"op-{next(NUMBERS)}", "nobody", "cross_entropy", (4,))
    found, expected = pair.train(overflow, bad, refused, good)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert isinstance(ours, InvalidInput) and isinstance(theirs, InvalidInput)
        assert str(ours) == str(theirs)
    assert_same_results(found[3:], expected[3:])
    pair.assert_same_gradient(runs[2])
    for run in runs[:2]:
        assert not pair.state(run), "a failed operation leaves no gradient"


def test_steps_and_snapshots_of_all_ranks_are_the_same(pair):
    """Saving compares the weights of the ranks, so a second step that differed at one of them would end the engine."""
    run = pair.new_run(4, 5)
    for number in range(2):
        pair.train(make_operation(f"op-{next(NUMBERS)}", run, "cross_entropy", (9, 14, 3), seed=number))
        step = OptimStep(request_id=f"step-{next(NUMBERS)}", model_id=run, params={"learning_rate": 1e-3})
        ours, theirs = pair.ranks.submit(step).result(PATIENCE), pair.alone.optim_step(step)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
    saved = pair.state(run)
    for name, tensor in pair.alone._run(run).moments["exp_avg"].items():
        expected = tensor.numpy()
        assert np.linalg.norm(saved[f"exp_avg/{name}"] - expected) <= 1e-5 * np.linalg.norm(expected), name
    pair.ask(PublishSampler, model_id=run, sampler_id=run)
    directory = pair.folder / f"again-{run}"
    pair.ask(SaveState, model_id=run, directory=str(directory), weights_only=False)
    pair.ask(LoadState, model_id=run, directory=str(directory), optimizer=True)
    assert pair.state(run).keys() == saved.keys()
    with pytest.raises(InvalidInput, match="there is no run"):
        pair.ask(DropRun, model_id="nobody")
    pair.ask(DropRun, model_id=run)


def test_prompts_are_scored_and_samples_refused_by_name(pair):
    run = pair.new_run(4, 6)
    pair.ask(PublishSampler, model_id=run, sampler_id=run)
    pair.alone.publish_sampler(PublishSampler(request_id="publish", model_id=run, sampler_id=run))
    for sampler_id in (None, run, run):
        score = make_sample(f"score-{next(NUMBERS)}", 70, max_tokens=1, prompt_logprobs=True, sampler_id=sampler_id)
        pair.alone.add_sample(score)
        (done,) = pair.alone.sampler.step()
        found = pair.ranks.submit(score).result(PATIENCE)
        np.testing.assert_allclose(found.prompt_logprobs, done.result.prompt_logprobs, rtol=1e-4, atol=1e-4)
        assert found.sequences[0].tokens == done.result.sequences[0].tokens
    for refused in ({"max_tokens": 2}, {"max_tokens": 1, "stream": True}):
        with pytest.raises(InvalidInput, match=rf"trained by {pair.size} ranks.*needs a vLLM sampler"):
            pair.ranks.submit(make_sample(f"sample-{next(NUMBERS)}", **refused)).result(PATIENCE)


def test_each_rank_keeps_its_part_of_the_base_only(pair):
    stages = [event.stage for event in pair.events if isinstance(event, LoadProgress)]
    found = re.search(rf"each of {pair.size} ranks has (\d+) of (\d+) bytes of the base", "\n".join(stages))
    assert found is not None
    local, whole = map(int, found.groups())
    assert whole == pair.alone.model.local_bytes
    assert 1 <= local / whole * pair.size <= 1.05, "rank 0 has the larger part where rows cannot be divided evenly"


# ── the group ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def group():
    """The two places of a group, in this process; each is to be used on a thread of its own."""
    ours, theirs = socket.socketpair()
    first, second = Shards(0, 2, [Connection(ours)]), Shards(1, 2, [Connection(theirs)])
    yield first, second
    ours.close()
    theirs.close()


def both(group, work):
    """Do ``work`` at both places; return what came of it, by rank."""

    def outcome(shards):
        try:
            return work(shards)
        except (GroupFailed, Exception) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(outcome, group))


def test_an_error_of_one_rank_is_the_error_of_all(group):
    def work(shards):
        with shards.agreed():
            if shards.rank:
                raise ValueError("no room")

    first, second = both(group, work)
    assert isinstance(first, RuntimeError) and str(first) == "ValueError: no room"
    assert isinstance(second, ValueError)
    verdicts = [Verdict(error="a", is_user=True), None, Verdict(error="b", is_user=True, item=2)]
    agreed = both(group, lambda shards: shards.agree(verdicts if shards.rank else [None, None, verdicts[0]]))
    assert agreed == [[verdicts[0], None, verdicts[0]]] * 2


def test_ranks_that_differ_end(group):
    weights = torch.arange(6.0)
    assert both(group, lambda shards: shards.compare("the weights", [weights])) == [None, None]
    for error in both(group, lambda shards: shards.compare("the weights", [weights + 1e-6 * shards.rank])):
        assert isinstance(error, GroupFailed) and "the weights differs between the 2 ranks" in str(error)
    assert both(group, lambda shards: shards.confirm(True)) == [None, None]
    for error in both(group, lambda shards: shards.confirm(bool(shards.rank))):
        assert isinstance(error, GroupFailed)


def test_an_error_between_collectives_ends_the_rank(group):
    with pytest.raises(GroupFailed), group[1].together():
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError), Shards().together():
        raise RuntimeError("out of memory")


def test_images_are_refused_by_name(tmp_path):
    make_debug_vision_model(tmp_path / "model")
    model = load_model(tmp_path / "model", DEVICE, "seeing", is_sharded=True)
    assert model.no_images == "its base is shared by several ranks, which read text only"
    with pytest.raises(InvalidInput, match="'seeing' reads no images: its base is shared"):
        _ = model.vision


@pytest.mark.slow
def test_ranks_that_find_their_token_budget_keep_a_part_of_the_base(tmp_path):
    """Measuring activations must not hold what sharding is to free."""
    make_debug_model(tmp_path / "model", architecture="gpt_oss")
    with EngineProcess(settings(tmp_path, model=str(tmp_path / "model"), ranks=2), lambda event: None) as engine:
        assert engine.ready.result(PATIENCE).token_budget > 0


@pytest.mark.slow
def test_a_model_that_cannot_be_served_is_refused_with_its_reason(tmp_path):
    make_debug_model(tmp_path / "model", architecture="llama")
    with EngineProcess(settings(tmp_path, model=str(tmp_path / "model"), ranks=2, max_context=100_000)) as engine:
        error = engine.ready.exception(PATIENCE)
        assert isinstance(error, InvalidInput) and "max_context 100000 is more than the model's" in str(error)
