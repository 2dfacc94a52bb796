"""Full runs on ranks that share weights, gradient and optimiser state: real processes, gloo, float32.

One engine of two or three ranks for each architecture; the reference is an engine of one process in this one.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lorimer.engine.engine import Engine
from lorimer.engine.messages import (
    CreateRun,
    DropRun,
    FullConfig,
    LoadProgress,
    LoadState,
    LoraConfig,
    OptimizerConfig,
    OptimStep,
    PublishSampler,
    SaveState,
    TrainBatch,
)
from lorimer.engine.process import EngineProcess
from lorimer.engine.training.losses import LOSSES
from lorimer.engine.training.optimizers import OPTIMIZERS
from lorimer.errors import CheckpointError, EngineDied, EngineError, InvalidInput
from lorimer.models.debug import make_debug_model
from tests.engine.operations import make_operation, make_sample, register_gather, settings

NUMBERS = count()
PATIENCE = 300
ENGINES = {"qwen2": 2, "gpt_oss": 3, "gemma2": 2}
"""Ranks by architecture: a head tied to the embedding, and biases; routers, sinks, biases and four experts, of which
three ranks have two, two and none; soft caps."""
BUDGET = 32


class Pair:
    """An engine of several ranks, and one of one process, that hold the same full run."""

    def __init__(self, folder, architecture, size, **more):
        self.folder, self.size = folder, size
        make_debug_model(folder / "model", architecture=architecture)
        fields = {"model": str(folder / "model"), "token_budget": BUDGET, "seed": 3, "method": "full"} | more
        self.events: list = []
        self.ranks = EngineProcess(settings(folder, ranks=size, **fields), self.events.append)
        self.alone = Engine(settings(folder, **fields))

    def ask(self, kind, **fields):
        """Let the ranks execute a command; raise as the engine of one process would."""
        return self.ranks.submit(kind(request_id=f"request-{next(NUMBERS)}", **fields)).result(PATIENCE)

    def create(self, optimizer="adamw", **flags):
        for model_id in list(self.alone._runs):
            self.both(DropRun, model_id=model_id)
        fields = {"full": FullConfig(**flags), "optimizer": OptimizerConfig(type=optimizer)}
        self.both(CreateRun, model_id="run", **fields)

    def both(self, kind, **fields):
        command = kind(request_id=f"request-{next(NUMBERS)}", **fields)
        handlers: dict[type, Callable] = {
            CreateRun: self.alone.create_run,
            DropRun: self.alone.drop_run,
            OptimStep: self.alone.optim_step,
            LoadState: self.alone.load_state,
        }
        return self.ranks.submit(command).result(PATIENCE), handlers[kind](command)

    def train(self, *operations):
        """The results of both engines for the same batch: those of the ranks, and of one process."""
        futures = self.ranks.train(TrainBatch(operations=list(operations)))
        return [_outcome(future) for future in futures], self.alone.train(operations)

    def operation(self, loss_fn="cross_entropy", lengths=(9, 17, 40, 5), seed=0, **more):
        # Lengths that the budget cuts into several passes; one sequence is longer than the budget: checkpointed.
        return make_operation(f"op-{next(NUMBERS)}", "run", loss_fn, lengths, seed, **more)

    def save(self, **more):
        directory = self.folder / f"saved-{next(NUMBERS)}"
        self.ask(SaveState, model_id="run", directory=str(directory), **more)
        return directory

    def save_alone(self, **more):
        directory = self.folder / f"alone-{next(NUMBERS)}"
        self.alone.save_state(SaveState(request_id="save", model_id="run", directory=str(directory), **more))
        return directory

    def assert_same_run(self, tolerance=1e-5):
        """Weights, gradient and moments are those of one process."""
        found = state_of(self.save(is_snapshot=True))
        expected = state_of(self.save_alone(is_snapshot=True))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert np.linalg.norm(found[key] - tensor) <= tolerance * np.linalg.norm(tensor), key


def _outcome(future):
    try:
        return future.result(PATIENCE)
    except EngineDied:
        raise
    except (InvalidInput, EngineError) as error:
        return error


def state_of(directory: Path):
    files = sorted(directory.glob("training_state-*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def files_of(directory: Path):
    """Sizes and checksums of all files of a saved run."""
    return json.loads((directory / "lorimer.json").read_text())["files"]


def assert_same_results(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert ours.metrics.keys() == theirs.metrics.keys()
        for name, value in theirs.metrics.items():
            assert ours.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.fixture(scope="module", params=ENGINES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))  # where these two engines reserve memory, and nobody else
        pair = Pair(folder, request.param, ENGINES[request.param])
        with pair.ranks:
            pair.ranks.ready.result(PATIENCE)
            yield pair


@pytest.mark.parametrize("loss_fn", [*LOSSES, "custom"])
def test_losses_and_gradients_are_those_of_one_process(pair, loss_fn):
    pair.create()
    operation = pair.operation(loss_fn)
    if loss_fn == "custom":
        name = f"picked-{next(NUMBERS)}"
        pair.alone.register_loss(register_gather("loss", name))
        pair.ranks.submit(register_gather(f"loss-{next(NUMBERS)}", name)).result(PATIENCE)
        operation = pair.operation(loss_fn, loss_fn_config={"loss_id": name})
        for datum in operation.data:
            datum.loss_fn_inputs["index"] = np.array([1, 4])
    assert_same_results(*pair.train(operation))
    pair.assert_same_run()


def test_fewer_sequences_than_ranks_and_operations_without_a_gradient(pair):
    """One sequence trains at one rank while the others have none; gradients of several batches are added."""
    pair.create()
    assert_same_results(*pair.train(pair.operation("dro", (7,))))
    forward = pair.operation("ppo", (12, 3, 30), forward_only=True)
    masked = pair.operation("cross_entropy", (6,), seed=4)
    masked.data[0].loss_fn_inputs["weights"][:] = 0
    assert_same_results(*pair.train(forward, masked, pair.operation("cispo", (33,), seed=5)))
    pair.assert_same_run()


@pytest.mark.parametrize("flag", ["train_attn", "train_mlp", "train_unembed", "train_norms"])
def test_a_run_trains_the_groups_it_is_asked_to_and_no_others(pair, flag):
    is_tied = pair.alone.model.transformer.get_output_embeddings().weight is (
        pair.alone.model.transformer.get_input_embeddings().weight
    )
    flags = dict.fromkeys(("train_attn", "train_mlp", "train_unembed", "train_embed", "train_norms"), False)
    pair.create(**flags | {flag: True} | ({"train_embed": True} if is_tied and flag == "train_unembed" else {}))
    assert_same_results(*pair.train(pair.operation()))
    ours, theirs = pair.both(OptimStep, model_id="run", params={"learning_rate": 1e-3, "eps": 1e-3})
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
    pair.assert_same_run()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_with_clipping_are_those_of_one_process(pair, optimizer):
    """The gradient's norm is that of all parts: a step that clipped by its own part's would be too long."""
    pair.create(optimizer)
    params = {"learning_rate": 1e-2, "grad_clip_norm": 0.5, "weight_decay": 0.1, "lr_multipliers": {"mlp": 0.5}}
    for seed in range(3):
        assert_same_results(*pair.train(pair.operation(seed=10 * seed)))
        more = {"eps": 1e-3} if optimizer == "adamw" else {"momentum": 0.9}
        ours, theirs = pair.both(OptimStep, model_id="run", params=params | more)
        assert theirs.metrics["grad_norm"] > 0.5 and not theirs.metrics["skipped"]
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
    pair.assert_same_run()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimiser_and_every_file_is_the_same_on_any_number_of_ranks(pair, optimizer):
    """Of the same gradient ranks make the same step; what they save one process saves, to the bit, and vice versa."""
    pair.create(optimizer)
    params = {"learning_rate": 1e-3} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    pair.train(pair.operation())
    pair.ask(OptimStep, model_id="run", params=params)
    pair.ranks.train(TrainBatch(operations=[pair.operation(seed=20)]))[0].result(PATIENCE)
    checkpoint, snapshot = pair.save(), pair.save(is_snapshot=True)
    for directory, more in ((checkpoint, {}), (snapshot, {"is_snapshot": True})):
        load = LoadState(request_id="load", model_id="run", directory=str(directory), optimizer=True)
        pair.alone.load_state(load)
        assert files_of(pair.save_alone(**more)) == files_of(directory)
    ours, theirs = pair.both(OptimStep, model_id="run", params=params)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-6)
    assert not ours.metrics["skipped"] and ours.metrics["update_norm"] > 0
    after = pair.save_alone()
    if pair.size == 2:
        assert files_of(pair.save()) == files_of(after)
    pair.assert_same_run(1e-6)  # vectors of the processor may end elsewhere in a third of a weight, and round otherwise
    pair.create(optimizer)
    pair.ask(LoadState, model_id="run", directory=str(after), optimizer=True)
    again = pair.save()
    assert files_of(again) == files_of(after)
    assert files_of(pair.save(weights_only=True)).items() <= files_of(after).items()
    for directory in (after, again, checkpoint, snapshot):
        shutil.rmtree(directory)


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(pair):
    pair.create("lion")
    pair.train(pair.operation())
    ours, theirs = pair.both(OptimStep, model_id="run", params={"learning_rate": 1e38})
    assert ours.metrics["skipped"] == theirs.metrics["skipped"] == 1
    pair.assert_same_run()


def test_an_operation_that_fails_at_one_rank_fails_alone(pair):
    pair.create()
    overflow = pair.operation("importance_sampling", (11,))
    overflow.data[0].loss_fn_inputs["logprobs"][:] = -1e4
    good = pair.operation("cross_entropy", (8,), seed=3)
    found, expected = pair.train(overflow, good)
    assert isinstance(found[0], InvalidInput) and str(found[0]) == str(expected[0])
    assert_same_results(found[1:], expected[1:])
    pair.assert_same_run()


def test_what_cannot_be_written_or_read_changes_nothing(pair):
    pair.create()
    pair.train(pair.operation())
    pair.both(OptimStep, model_id="run", params={"learning_rate": 1e-3, "eps": 1e-3})
    saved = pair.save()
    with pytest.raises(InvalidInput, match="already exists and is not an empty directory"):
        pair.ask(SaveState, model_id="run", directory=str(saved))
    pair.train(pair.operation(seed=1))
    (shard,) = saved.glob("training_state*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    load = LoadState(request_id="load", model_id="run", directory=str(saved), optimizer=True)
    with pytest.raises(InvalidInput, match="is damaged"):
        pair.ranks.submit(load).result(PATIENCE)
    with pytest.raises(CheckpointError, match="is damaged"):
        pair.alone.load_state(load)
    pair.assert_same_run()


def test_a_new_run_begins_with_the_base(pair):
    pair.create()
    first = files_of(pair.save(weights_only=True))
    pair.train(pair.operation())
    pair.both(OptimStep, model_id="run", params={"learning_rate": 1e-3})
    assert files_of(pair.save(weights_only=True)) != first
    pair.create()
    assert files_of(pair.save(weights_only=True)) == first


def test_samples_and_adapters_are_refused_by_name(pair):
    pair.create()
    with pytest.raises(InvalidInput, match=rf"trained by {pair.size} ranks.*serve the directory as a base model"):
        pair.ask(PublishSampler, model_id="run", sampler_id="s")
    for max_tokens in (1, 4):
        with pytest.raises(InvalidInput, match="so they do not sample"):
            pair.ranks.submit(make_sample(f"sample-{next(NUMBERS)}", max_tokens=max_tokens)).result(PATIENCE)
    with pytest.raises(InvalidInput, match="adapters are trained by others"):
        pair.ask(CreateRun, model_id="other", lora=LoraConfig())


def outstanding(folder):
    """What the processes of the engines have reserved and not taken, of the ranks first."""
    found = [json.loads(path.read_text()) for path in folder.glob("lorimer-memory-*/*.json")]
    return [size for _, size in sorted((record["pid"] == os.getpid(), record["outstanding"]) for record in found)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw8bit"])
def test_each_rank_has_its_part_of_weights_gradient_and_optimiser(pair, optimizer):
    """An engine reserves what its gradient and moments have not taken, so its files say how much they are."""
    pair.create(optimizer)
    shapes = [parameter.shape for parameter in pair.alone.model.transformer.parameters()]
    number, largest = sum(map(math.prod, shapes)), max(map(math.prod, shapes))
    most = sum(-(-shape[0] // pair.size) * math.prod(shape[1:]) for shape in shapes)
    stages = [event.stage for event in pair.events if isinstance(event, LoadProgress)]
    assert f"each of {pair.size} ranks has {4 * most} of {4 * number} bytes of the base" in stages
    assert outstanding(pair.folder) == [12 * most] * pair.size + [12 * number]
    pair.train(pair.operation())
    _, theirs = pair.both(OptimStep, model_id="run", params={"learning_rate": 1e-3})
    *left, left_alone = outstanding(pair.folder)
    taken = [12 * most - one for one in left]
    whole = theirs.metrics["optimizer_state_bytes"]
    assert sum(taken) == whole == 12 * number - left_alone
    if optimizer == "adamw":
        assert max(taken) == 8 * most
    else:  # the owner of a weight has all of its state
        assert max(taken) <= whole / pair.size + 4 * largest


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2", "gpt_oss"])
def test_passes_in_bfloat16_are_those_of_one_process(tmp_path, monkeypatch, architecture):
    """Ranks gather float32 rows as bfloat16, and round a gradient once for each pass, of which they have others."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pair = Pair(tmp_path, architecture, ENGINES[architecture], dtype="bfloat16")
    with pair.ranks:
        assert pair.ranks.ready.result(PATIENCE).dtype == "bfloat16"
        pair.create()
        for seed in (0, 10):
            assert_same_results(*pair.train(pair.operation(seed=seed)))
            pair.assert_same_run(1e-2)
            params = {"learning_rate": 1e-3, "eps": 1e-3}
            ours, theirs = pair.both(OptimStep, model_id="run", params=params)
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-2)
            # What ranks save one process loads, and goes on as they do.
            for is_snapshot in (False, True):
                saved = pair.save(is_snapshot=is_snapshot)
                load = LoadState(request_id="load", model_id="run", directory=str(saved), optimizer=True)
                pair.alone.load_state(load)
                assert files_of(pair.save_alone(is_snapshot=is_snapshot)) == files_of(saved)
        number = pair.alone.model.num_parameters
        stages = [event.stage for event in pair.events if isinstance(event, LoadProgress)]
        assert any(stage.endswith(f"of {4 * number} bytes of the base") for stage in stages)


@pytest.mark.slow
def test_ranks_that_find_their_token_budget_keep_a_part_of_the_weights(tmp_path):
    """Measuring activations must not hold what sharding is to free."""
    make_debug_model(tmp_path / "model", architecture="gpt_oss")
    config = settings(tmp_path, model=str(tmp_path / "model"), ranks=2, method="full")
    with EngineProcess(config, lambda event: None) as engine:
        assert engine.ready.result(PATIENCE).token_budget > 0
