"""Commands on an engine of the method ``full``: training, saving, loading and sampling of its one run."""

import gc
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorimer.engine import messages
from lorimer.engine.config import EngineConfig, VllmConfig
from lorimer.engine.engine import Engine
from lorimer.engine.reservations import reserve, reserved_bytes
from lorimer.errors import CheckpointError, InvalidInput, TooLarge, Unsupported
from lorimer.models.debug import make_debug_model
from tests.engine.operations import make_operation, make_sample, settings

OPTIMIZERS = ("adamw", "muon", "adafactor", "adamw8bit", "schedule_free_adamw")


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """No other process of this machine reserves memory where these tests look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("memory")))
        yield


@pytest.fixture(scope="module")
def engine(tmp_path_factory, alone):
    return Engine(settings(tmp_path_factory.mktemp("cache"), token_budget=64, method="full"))


@pytest.fixture
def empty(engine):
    """The engine without a run."""
    yield engine
    for model_id in list(engine._runs):
        engine.drop_run(messages.DropRun(request_id="r", model_id=model_id))


def create(engine, model_id="m", optimizer="adamw", **flags):
    optimizer = messages.OptimizerConfig(type=optimizer)
    full = messages.FullConfig(**flags)
    engine.create_run(messages.CreateRun(request_id="r", model_id=model_id, full=full, optimizer=optimizer))


def train(engine, model_id="m", seed=0):
    (result,) = engine.train([make_operation("r", model_id, seed=seed)])
    if isinstance(result, Exception):
        raise result
    return result


def step(engine, model_id="m"):
    return engine.optim_step(messages.OptimStep(request_id="r", model_id=model_id, params={"learning_rate": 1e-3}))


def save(engine, directory, model_id="m", **more):
    return engine.save_state(messages.SaveState(request_id="r", model_id=model_id, directory=str(directory), **more))


def load(engine, directory, model_id="m", optimizer=True):
    command = messages.LoadState(request_id="r", model_id=model_id, directory=str(directory), optimizer=optimizer)
    return engine.load_state(command)


def drop(engine, model_id="m"):
    engine.drop_run(messages.DropRun(request_id="r", model_id=model_id))


def state(engine, model_id="m"):
    return [tensor.clone() for tensor in engine._run(model_id).tensors()]


def publish(engine, sampler_id, model_id="m"):
    engine.publish_sampler(messages.PublishSampler(request_id="r", model_id=model_id, sampler_id=sampler_id))


def sample(engine, *sampler_ids, **more):
    for number, sampler_id in enumerate(sampler_ids):
        engine.add_sample(make_sample(f"s{number}", sampler_id=sampler_id, **more))
    found = {}
    while not engine.sampler.is_idle:
        for reply in engine.sampler.step():
            assert isinstance(reply, messages.Done), reply
            found[reply.request_id] = reply.result
    return [found[f"s{number}"] for number in range(len(sampler_ids))]


def is_equal(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("is_snapshot", [False, True], ids=["checkpoint", "snapshot"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_saved_run_goes_on_bit_for_bit(empty, tmp_path, optimizer, is_snapshot):
    create(empty, optimizer=optimizer)
    for seed in (0, 10):
        train(empty, seed=seed)
        step(empty)
    train(empty, seed=20)  # a gradient that is not applied yet is saved too
    save(empty, tmp_path / "saved", is_snapshot=is_snapshot)
    saved = state(empty)
    step(empty)
    train(empty, seed=30)
    step(empty)
    expected = state(empty)
    drop(empty)
    create(empty, "again", optimizer)
    load(empty, tmp_path / "saved", "again")
    assert is_equal(state(empty, "again"), saved)
    step(empty, "again")
    train(empty, "again", seed=30)
    step(empty, "again")
    assert is_equal(state(empty, "again"), expected)


def test_a_new_run_begins_with_the_base(empty):
    create(empty)
    first = train(empty)
    base = state(empty)[-len(empty._run("m").weights) :]
    step(empty)
    drop(empty)
    create(empty, "next")
    assert is_equal(state(empty, "next"), base)
    assert np.array_equal(train(empty, "next").logprobs[0], first.logprobs[0])


def test_a_saved_run_is_a_hugging_face_directory(empty, tmp_path):
    create(empty)
    train(empty)
    step(empty)
    save(empty, tmp_path / "saved")
    save(empty, tmp_path / "weights", weights_only=True)
    assert not list((tmp_path / "weights").glob("training_state*"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").eval()
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    for name, weight in empty._run("m").weights.items():
        assert torch.equal(plain.get_parameter(name), weight.cpu()), name
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("ab") == empty.tokenizer.encode("ab")
    publish(empty, "hf")
    (found,) = sample(empty, "hf", prompt_logprobs=True)
    prompt = torch.from_numpy(make_sample("r").prompt)[None]
    expected = plain(input_ids=prompt).logits[0].log_softmax(-1)[:-1].gather(1, prompt[0, 1:, None])[:, 0]
    assert np.abs(found.prompt_logprobs[1:] - expected.detach().numpy()).max() < 1e-4
    empty.drop_sampler(messages.DropSampler(request_id="r", sampler_id="hf"))
    fresh = Engine(EngineConfig(model=str(tmp_path / "weights"), device="cpu", dtype="float32", num_threads=1))
    assert fresh.info.num_parameters == empty.info.num_parameters


def test_published_weights_do_not_change_while_training_goes_on(empty, tmp_path):
    create(empty)
    train(empty)
    step(empty)
    publish(empty, "one")
    save(empty, tmp_path / "one", weights_only=True)
    (before,) = sample(empty, "one", max_tokens=12)
    for seed in (1, 2, 3):
        train(empty, seed=seed)
        step(empty)
    publish(empty, "two")
    # Both copies at the same time, with passes of the run between theirs.
    after, other = sample(empty, "one", "two", max_tokens=12)
    assert np.array_equal(before.sequences[0].tokens, after.sequences[0].tokens)
    assert np.array_equal(before.sequences[0].logprobs, after.sequences[0].logprobs)
    assert not np.array_equal(before.sequences[0].logprobs, other.sequences[0].logprobs)
    drop(empty)
    empty.load_sampler(messages.LoadSampler(request_id="r", sampler_id="read", directory=str(tmp_path / "one")))
    (read,) = sample(empty, "read", max_tokens=12)
    assert np.array_equal(before.sequences[0].logprobs, read.sequences[0].logprobs)
    for name in ("one", "two", "read"):
        empty.drop_sampler(messages.DropSampler(request_id="r", sampler_id=name))
    assert empty.sampler.num_sampled >= 4 * 12 and not empty.sampler._samplers


def test_sampling_in_between_does_not_change_training(empty):
    create(empty)
    train(empty)
    step(empty)
    publish(empty, "here")
    undisturbed = [train(empty, seed=5), state(empty)]
    drop(empty)
    create(empty, "again")
    train(empty, "again")
    step(empty, "again")
    empty.add_sample(make_sample("s", sampler_id="here", max_tokens=50))
    operation = make_operation("r", "again", seed=5)
    (result,) = empty.train([operation], between_passes=lambda: empty.sampler.step())
    empty.sampler.cancel("s")
    assert np.array_equal(result.logprobs[0], undisturbed[0].logprobs[0])
    assert is_equal(state(empty, "again"), undisturbed[1])
    empty.drop_sampler(messages.DropSampler(request_id="r", sampler_id="here"))


def test_what_a_full_engine_does_not_do_is_refused(empty, tmp_path):
    create(empty)
    with pytest.raises(InvalidInput, match="holds one full run at a time"):
        create(empty, "second")
    drop(empty)
    with pytest.raises(Unsupported, match="adapters are trained by others"):
        empty.create_run(messages.CreateRun(request_id="r", model_id="l", lora=messages.LoraConfig()))
    with pytest.raises(Unsupported, match="does not sample the base"):
        empty.add_sample(make_sample("s"))
    with pytest.raises(ValueError, match="method is 'full' with a sampler of vLLM"):
        EngineConfig(method="full", vllm=VllmConfig())


def test_a_directory_that_does_not_fit_changes_nothing(empty, tmp_path):
    create(empty)
    train(empty)
    step(empty)
    save(empty, tmp_path / "weights", weights_only=True)
    save(empty, tmp_path / "damaged")
    (shard,) = (tmp_path / "damaged").glob("training_state*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    train(empty, seed=7)
    before = state(empty)
    make_debug_model(tmp_path / "foreign")
    for name, message in (("weights", "weights only"), ("damaged", "is damaged"), ("foreign", "not a saved full run")):
        with pytest.raises(CheckpointError, match=message):
            load(empty, tmp_path / name)
    assert is_equal(state(empty), before)
    drop(empty)
    create(empty, "other", train_norms=False)
    with pytest.raises(CheckpointError, match="the saved run trains"):
        load(empty, tmp_path / "weights", "other", optimizer=False)


def inodes(directory, word=""):
    return {path.name: path.stat().st_ino for path in directory.glob("*.safetensors") if word in path.name}


def test_a_snapshot_has_only_what_is_trained_and_shares_what_did_not_change(empty, tmp_path):
    create(empty, train_attn=False, train_embed=False, train_unembed=False)
    train(empty)
    step(empty)
    a, b, c, d = (tmp_path / name for name in "abcd")
    save(empty, a, is_snapshot=True)
    kinds = {name.split("-", 1)[1].removesuffix("-00001.safetensors") for name in inodes(a)}
    assert kinds == {f"{kind}-{group}" for kind in ("weight", "exp_avg", "exp_avg_sq") for group in ("mlp", "norms")}
    for path in a.glob("*.safetensors"):
        assert load_file(path).keys() <= {f"{path.name.split('-')[1]}/{name}" for name in empty._run("m").weights}
    train(empty, seed=1)  # only the gradient differs
    save(empty, b, is_snapshot=True, shares_with=str(a))
    assert inodes(b).items() >= inodes(a).items() and len(inodes(b, "grad")) == 2
    # A file that two have is not shared by a third one, so there are always two copies on the disk.
    save(empty, c, is_snapshot=True, shares_with=str(a))
    assert not set(inodes(c).values()) & set(inodes(b).values())
    step(empty)
    save(empty, d, is_snapshot=True, shares_with=str(c))
    assert not set(inodes(d).values()) & set(inodes(c).values())
    expected = state(empty)
    for name in "abc":
        shutil.rmtree(tmp_path / name)
    drop(empty)
    create(empty, train_attn=False, train_embed=False, train_unembed=False)
    load(empty, d)
    assert is_equal(state(empty), expected)
    # A missing snapshot to share with is not an error; a base with other weights is.
    save(empty, a, is_snapshot=True, shares_with=str(tmp_path / "gone"))
    embedding = empty.model.transformer.get_input_embeddings().weight
    before = embedding[0, 0].item()
    with torch.no_grad():
        embedding[0, 0] += 1
    empty._run("m").__dict__.pop("frozen_sha256", None)
    with pytest.raises(CheckpointError, match="have changed since the snapshot was written"):
        load(empty, a)
    with torch.no_grad():
        embedding[0, 0] = before
    with pytest.raises(CheckpointError, match="is a snapshot"):
        empty.load_sampler(messages.LoadSampler(request_id="r", sampler_id="s", directory=str(a)))


def test_memory_of_training_stays_reserved_until_it_is_taken(empty):
    state_bytes = 12 * empty.info.num_parameters
    before = reserved_bytes() - empty._reservation.outstanding
    create(empty)
    assert empty._reservation.outstanding == state_bytes
    train(empty)
    assert empty._reservation.outstanding == state_bytes * 2 // 3
    step(empty)
    assert empty._reservation.outstanding == state_bytes // 3  # the next gradient
    assert reserved_bytes() == before + state_bytes // 3
    drop(empty)
    assert empty._reservation.outstanding == state_bytes


def test_an_engine_counts_on_nothing_that_another_has_reserved(tmp_path, monkeypatch, engine):
    free = 2 * 16 * engine.info.num_parameters
    monkeypatch.setattr("lorimer.engine.full.memory_need.free_bytes", lambda device: free)
    taken = reserve("cpu", outstanding=free - reserved_bytes() - 1000)
    with pytest.raises(TooLarge, match=r"full fine-tuning of .* needs \d+\.\d MiB, 0\.0 MiB free"):
        Engine(settings(tmp_path, method="full"))
    taken.close()
    assert Engine(settings(tmp_path, method="full")).info.num_parameters == engine.info.num_parameters


def test_memory_is_checked_first(tmp_path, monkeypatch, engine):
    gc.collect()  # engines of earlier tests give back what they have reserved
    free = (1 << 16) + reserved_bytes()
    monkeypatch.setattr("lorimer.engine.full.memory_need.free_bytes", lambda device: free)
    with pytest.raises(TooLarge, match=r"needs \d+\.\d MiB, 0\.1 MiB free"):
        Engine(settings(tmp_path, method="full"))
    create(engine)
    with pytest.raises(TooLarge, match="a copy of the weights for sampling needs"):
        publish(engine, "large")
    drop(engine)
