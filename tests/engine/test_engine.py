"""Commands on an engine in this process: what each changes, what it refuses, and that a refusal changes nothing."""

import re
from itertools import count

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load

from lorimer.engine.engine import Engine
from lorimer.engine.messages import (
    CreateRun,
    Datum,
    Done,
    DropRun,
    DropSampler,
    LoadSampler,
    LoadState,
    LoraConfig,
    OptimizerConfig,
    OptimStep,
    PublishSampler,
    SampleRequest,
    SamplingParams,
    SaveState,
)
from lorimer.errors import CheckpointError, InvalidInput, NotFound, Unsupported
from lorimer.models.debug import VOCAB_SIZE
from tests.engine.operations import make_operation, make_sample, register_gather, settings
from tests.engine.reference import DEVICE, relative_error

NUMBERS = count()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(settings(tmp_path_factory.mktemp("cache"), token_budget=64))
    engine.register_loss(register_gather("r", "gather"))
    return engine


@pytest.fixture(scope="module")
def new_run(engine):
    """Makes a run that has taken a step and holds a gradient, so that there is something to lose."""

    def make(rank=4, seed=0, **flags):
        model_id = f"run-{next(NUMBERS)}"
        engine.create_run(CreateRun(request_id="r", model_id=model_id, lora=LoraConfig(rank=rank, seed=seed, **flags)))
        train(engine, make_operation("r", model_id, seed=seed))
        engine.optim_step(OptimStep(request_id="r", model_id=model_id, params={"learning_rate": 1e-2}))
        train(engine, make_operation("r", model_id, seed=seed + 50))
        return model_id

    return make


@pytest.fixture(scope="module")
def state(engine, tmp_path_factory):
    """All bytes of a run: weights, moments, gradient, step."""

    def read(model_id):
        directory = tmp_path_factory.mktemp("state") / "saved"
        engine.save_state(SaveState(request_id="r", model_id=model_id, directory=str(directory)))
        return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}

    return read


def train(engine, *operations):
    results = engine.train(list(operations))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def step(engine, model_id, **params):
    return engine.optim_step(OptimStep(request_id="r", model_id=model_id, params=params)).metrics


def sample(engine, *requests):
    """Results by request id."""
    for request in requests:
        engine.add_sample(request)
    replies = []
    while not engine.sampler.is_idle:
        replies += engine.sampler.step()
    assert all(isinstance(reply, Done) for reply in replies), replies
    return {reply.request_id: reply.result for reply in replies}


def publish(engine, model_id):
    sampler_id = f"sampler-{next(NUMBERS)}"
    engine.publish_sampler(PublishSampler(request_id="r", model_id=model_id, sampler_id=sampler_id))
    return sampler_id


def tokens_and_logprobs(result):
    return [(s.tokens.tolist(), s.logprobs.tolist()) for s in result.sequences]


# ── the engine itself ─────────────────────────────────────────────────────────────────────────────────


def test_it_says_what_it_serves(engine):
    info = engine.info
    assert (info.model_name, info.architecture) == ("lorimer/debug", "Qwen3ForCausalLM")
    assert (info.vocab_size, info.max_context, info.token_budget) == (VOCAB_SIZE, 512, 64)
    assert (info.dtype, info.device, info.eos_token_ids) == ("float32", DEVICE.type, [2])
    assert {"q_proj", "down_proj", "lm_head"} <= set(info.target_modules)


def test_context_can_be_shortened_but_not_stretched(tmp_path):
    with pytest.raises(InvalidInput, match="max_context 513 is more than the model's 512"):
        Engine(settings(tmp_path, max_context=513))
    engine = Engine(settings(tmp_path, max_context=10))
    engine.create_run(CreateRun(request_id="r", model_id="a", lora=LoraConfig(rank=1)))
    (error,) = engine.train([make_operation("r", "a", lengths=[11])])
    assert "11 tokens; at most 10" in str(error)
    with pytest.raises(InvalidInput, match="exceed the context length 10"):
        engine.add_sample(make_sample("r", prompt_length=8, max_tokens=3))


def test_a_seed_makes_everything_repeatable(tmp_path):
    def run(seed):
        engine = Engine(settings(tmp_path, seed=seed))
        engine.create_run(CreateRun(request_id="r", model_id="a", lora=LoraConfig(rank=2)))
        train(engine, make_operation("r", "a"))
        step(engine, "a", learning_rate=0.1)
        result = sample(engine, make_sample("s", seed=None, num_samples=2, sampler_id=publish(engine, "a")))["s"]
        return tokens_and_logprobs(result)

    assert run(1) == run(1) != run(2)
    assert run(None) != run(None)


def test_loading_reports_what_it_does(tmp_path):
    stages = []
    Engine(settings(tmp_path), lambda stage, fraction: stages.append((stage, fraction)))
    assert ("loading lorimer/debug", None) in stages


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lora", "optimizer", "error", "message"),
    [
        (LoraConfig(rank=0), OptimizerConfig(), InvalidInput, "rank 0 is not between 1 and 512"),
        (LoraConfig(rank=513), OptimizerConfig(), InvalidInput, "rank 513"),
        (
            LoraConfig(train_attn=False, train_mlp=False, train_unembed=False),
            OptimizerConfig(),
            InvalidInput,
            "nothing to train",
        ),
        (LoraConfig(), OptimizerConfig(type="dimuon"), Unsupported, "'dimuon' is not supported"),
        (LoraConfig(), OptimizerConfig(type="rprop"), Unsupported, "'rprop' is not known; known are 'adamw'"),
    ],
    ids=["rank-0", "rank-513", "nothing", "dimuon", "unknown"],
)
def test_a_run_that_cannot_be_is_not_created(engine, lora, optimizer, error, message):
    before = engine.status().num_runs
    with pytest.raises(error, match=message):
        engine.create_run(CreateRun(request_id="r", model_id="impossible", lora=lora, optimizer=optimizer))
    assert engine.status().num_runs == before


def test_a_name_is_given_once(engine, new_run, state):
    model_id = new_run()
    before = state(model_id)
    with pytest.raises(InvalidInput, match=f"run '{model_id}' exists already"):
        engine.create_run(CreateRun(request_id="r", model_id=model_id, lora=LoraConfig()))
    assert state(model_id) == before
    engine.drop_run(DropRun(request_id="r", model_id=model_id))
    engine.create_run(CreateRun(request_id="r", model_id=model_id, lora=LoraConfig(rank=1)))


@pytest.mark.parametrize("command", [OptimStep, DropRun], ids=lambda kind: kind.__name__)
def test_an_unknown_run_is_named(engine, command):
    method = {OptimStep: engine.optim_step, DropRun: engine.drop_run}[command]
    with pytest.raises(NotFound, match="there is no run 'nobody'"):
        method(command(request_id="r", model_id="nobody"))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"momentum": 0.9}, "no parameter 'momentum'"),
    ],
    ids=["nan", "range", "unknown"],
)
def test_a_refused_step_keeps_the_gradient(engine, new_run, state, params, message):
    model_id = new_run()
    before = state(model_id)
    with pytest.raises(InvalidInput, match=message):
        step(engine, model_id, **params)
    assert state(model_id) == before


# ── saved states ──────────────────────────────────────────────────────────────────────────────────────


def test_a_loaded_run_goes_on_as_if_it_had_not_stopped(engine, new_run, state, tmp_path):
    first, second = new_run(seed=3), new_run(seed=4)
    saved = engine.save_state(SaveState(request_id="r", model_id=first, directory=str(tmp_path / "a")))
    assert saved.step == 1
    assert saved.size_bytes == sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    loaded = engine.load_state(
        LoadState(request_id="r", model_id=second, directory=str(tmp_path / "a"), optimizer=True)
    )
    assert loaded.step == 1
    for i in range(3):
        results = [train(engine, make_operation("r", run, seed=100 + i))[0] for run in (first, second)]
        assert results[0].metrics == results[1].metrics
        assert step(engine, first, learning_rate=0.01) == step(engine, second, learning_rate=0.01)
    ours, theirs = state(first), state(second)
    for name in ("adapter_model.safetensors", "training_state.safetensors"):
        assert ours[name] == theirs[name]


def test_weights_alone_begin_anew(engine, new_run, state, tmp_path):
    first, second = new_run(seed=3), new_run(seed=4)
    directory = str(tmp_path / "weights")
    engine.save_state(SaveState(request_id="r", model_id=first, directory=directory, weights_only=True))
    before = state(second)
    with pytest.raises(CheckpointError, match="holds weights only"):
        engine.load_state(LoadState(request_id="r", model_id=second, directory=directory, optimizer=True))
    assert state(second) == before
    assert engine.load_state(LoadState(request_id="r", model_id=second, directory=directory)).step == 0
    assert state(second)["adapter_model.safetensors"] == state(first)["adapter_model.safetensors"]
    # Neither the moments nor the gradient it had before are left: a step of rate zero changes nothing.
    assert step(engine, second, learning_rate=0.0)["grad_norm"] == 0


def test_what_does_not_fit_leaves_the_run_as_it_was(engine, new_run, state, tmp_path):
    run = new_run(rank=4)
    engine.save_state(SaveState(request_id="r", model_id=new_run(rank=8), directory=str(tmp_path / "other")))
    before = state(run)
    with pytest.raises(CheckpointError, match=r"rank=8.*rank=4"):
        engine.load_state(LoadState(request_id="r", model_id=run, directory=str(tmp_path / "other"), optimizer=True))
    with pytest.raises(CheckpointError, match=r"there is no directory '.*nowhere'"):
        engine.load_state(LoadState(request_id="r", model_id=run, directory=str(tmp_path / "nowhere")))
    with pytest.raises(CheckpointError, match="already exists"):
        engine.save_state(SaveState(request_id="r", model_id=run, directory=str(tmp_path / "other")))
    assert state(run) == before


# ── bad operations among good ones ────────────────────────────────────────────────────────────────────


def damaged(operation, **inputs):
    """The operation with inputs of its last datum replaced, or taken out where ``None``."""
    datum = operation.data[-1]
    fields = {k: v for k, v in (datum.loss_fn_inputs | inputs).items() if v is not None}
    tokens = fields.pop("tokens", datum.tokens)
    data = [*operation.data[:-1], Datum(tokens=tokens, loss_fn_inputs=fields)]
    return msgspec.structs.replace(operation, data=data)


def policy(loss_fn="importance_sampling"):
    return make_operation("bad", "bad", loss_fn)


PLAIN = make_operation("bad", "bad")
CUSTOM = make_operation("bad", "bad", "custom", loss_fn_config={"loss_id": "gather"})
BAD = {
    "token-out-of-vocabulary": (damaged(PLAIN, tokens=np.full(5, VOCAB_SIZE)), r"data\[2\].*tokens.* is 272"),
    "negative-target": (damaged(PLAIN, target_tokens=np.full(5, -100)), r"data\[2\].*target_tokens.* is -100"),
    "float-tokens": (damaged(PLAIN, tokens=np.full(5, 0.5)), r"data\[2\].*tokens"),
    "nan-weight": (damaged(PLAIN, weights=np.full(5, np.nan)), r"data\[2\].*weights.* is nan"),
    "infinite-advantage": (damaged(policy(), advantages=np.full(5, np.inf)), r"data\[2\].*advantages.* is inf"),
    "short-targets": (damaged(PLAIN, target_tokens=np.arange(4)), r"target_tokens'\] has shape \(4,\)"),
    "long-weights": (damaged(PLAIN, weights=np.ones(6)), r"weights'\] has shape \(6,\)"),
    "two-dimensional-tokens": (damaged(PLAIN, tokens=np.ones((5, 1), int)), r"tokens has shape \(5, 1\)"),
    "scalar-tokens": (damaged(PLAIN, tokens=np.array(1)), r"tokens has shape \(\)"),
    "no-targets": (damaged(PLAIN, target_tokens=None), "target_tokens'] is missing"),
    "no-advantages": (damaged(policy(), advantages=None), "advantages'] is missing"),
    "unknown-input": (damaged(PLAIN, mask=np.ones(5)), "'mask'"),
    "empty": (msgspec.structs.replace(PLAIN, data=[]), "data is empty"),
    "too-long": (make_operation("bad", "bad", lengths=[513]), "513 tokens; at most 512"),
    "unknown-loss": (msgspec.structs.replace(PLAIN, loss_fn="mse"), "'mse'"),
    "stable-reinforce": (msgspec.structs.replace(policy(), loss_fn="stable_reinforce"), "stable_reinforce"),
    "unknown-setting": (msgspec.structs.replace(PLAIN, loss_fn_config={"clip": 1.0}), "'clip'"),
    "nan-setting": (msgspec.structs.replace(policy("dro"), loss_fn_config={"beta": float("nan")}), "beta'] is nan"),
    "unknown-run": (msgspec.structs.replace(PLAIN, model_id="nobody"), "there is no run 'nobody'"),
    "unknown-custom-loss": (msgspec.structs.replace(CUSTOM, loss_fn_config={"loss_id": "x"}), "'x' names no loss"),
    "overflowing-ratio": (damaged(policy(), logprobs=np.full(5, -1e4), advantages=np.ones(5)), "overflows"),
    "overflowing-sequence-ratio": (
        damaged(policy("gspo"), logprobs=np.full(5, -1e4), advantages=-np.ones(5), sequence_ratio_mask=np.ones(5)),
        "overflows",
    ),
    "custom-index": (
        msgspec.structs.replace(
            CUSTOM,
            data=[
                Datum(tokens=d.tokens, loss_fn_inputs=d.loss_fn_inputs | {"index": np.full(3, index)})
                for d, index in zip(CUSTOM.data, (0, 1, 77), strict=True)
            ],
        ),
        "custom loss node 'a'",
    ),
}


def assert_same_state(ours, theirs):
    """Equal weights, moments and step to the bit; equal gradients as far as rounding goes, whatever shares a pass."""
    assert ours["adapter_model.safetensors"] == theirs["adapter_model.safetensors"]
    found, wanted = (load(each["training_state.safetensors"]) for each in (ours, theirs))
    assert found.keys() == wanted.keys()
    assert any(name.startswith("grad/") for name in wanted)
    for name, tensor in wanted.items():
        if name.startswith("grad/"):
            assert relative_error(found[name], tensor) < 1e-5, name
        else:
            assert torch.equal(found[name], tensor), name


class Crew:
    """Four runs with good operations and one that will be given a bad one, all put back before each test."""

    def __init__(self, engine, new_run, state, directory):
        self._engine, self._directory = engine, directory
        self.runs, self.victim = [new_run(rank=rank, seed=rank) for rank in (2, 3, 4, 7)], new_run(seed=9)
        for run in (*self.runs, self.victim):
            engine.save_state(SaveState(request_id="r", model_id=run, directory=str(directory / run)))
        self.victim_state = state(self.victim)
        self.expected = train(engine, *self.operations())
        self.expected_states = [state(run) for run in self.runs]

    def operations(self):
        losses = ("cross_entropy", "ppo", "gspo", "cispo")
        return [make_operation(run, run, loss, seed=10 * len(run)) for run, loss in zip(self.runs, losses, strict=True)]

    def put_back(self):
        for run in (*self.runs, self.victim):
            directory = str(self._directory / run)
            self._engine.load_state(LoadState(request_id="r", model_id=run, directory=directory, optimizer=True))


@pytest.fixture(scope="module")
def crew(engine, new_run, state, tmp_path_factory):
    return Crew(engine, new_run, state, tmp_path_factory.mktemp("crew"))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_operation_fails_alone(engine, crew, state, name):
    bad, message = BAD[name]
    crew.put_back()
    if bad.model_id == "bad":
        bad = msgspec.structs.replace(bad, model_id=crew.victim)
    first, second, third, fourth = crew.operations()
    results = engine.train([first, second, bad, third, fourth])
    error = results.pop(2)
    assert isinstance(error, InvalidInput)
    assert re.search(message, str(error))
    for found, wanted in zip(results, crew.expected, strict=True):
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5)
        for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
            assert np.allclose(ours, theirs, atol=1e-5)
    for run, wanted in zip(crew.runs, crew.expected_states, strict=True):
        assert_same_state(state(run), wanted)
    assert state(crew.victim) == crew.victim_state


def test_a_bad_operation_does_not_touch_a_good_one_of_its_own_run(engine, new_run, state):
    first, second = new_run(seed=5), new_run(seed=5)
    bad = msgspec.structs.replace(BAD["overflowing-ratio"][0], model_id=first)
    results = engine.train([make_operation("a", first), bad, make_operation("b", first, seed=7)])
    assert [isinstance(result, Exception) for result in results] == [False, True, False]
    train(engine, make_operation("a", second), make_operation("b", second, seed=7))
    assert_same_state(state(first), state(second))


def test_two_bad_operations_leave_the_rest(engine, new_run, state):
    first, second = new_run(seed=6), new_run(seed=6)
    bad = [msgspec.structs.replace(BAD[name][0], model_id=first) for name in ("overflowing-ratio", "custom-index")]
    results = engine.train([bad[0], make_operation("a", first), bad[1], BAD["unknown-run"][0]])
    assert [isinstance(result, Exception) for result in results] == [True, False, True, True]
    train(engine, make_operation("a", second))
    assert_same_state(state(first), state(second))


def test_a_batch_of_bad_operations_only_answers_each(engine):
    results = engine.train([BAD["unknown-run"][0], BAD["empty"][0]])
    assert ["nobody" in str(results[0]), "empty" in str(results[1])] == [True, True]
    assert engine.train([]) == []


def test_an_exploding_gradient_stays_with_its_run(engine, new_run, state):
    wild, mixed, alone = new_run(seed=8), new_run(seed=5), new_run(seed=5)
    weights = {"weights": np.full(5, 1e36, np.float32)}
    train(engine, damaged(make_operation("a", wild), **weights), make_operation("b", mixed))
    train(engine, make_operation("b", alone))
    assert_same_state(state(mixed), state(alone))
    before = state(wild)["adapter_model.safetensors"]
    metrics = step(engine, wild)
    assert metrics["skipped"] == 1
    assert metrics["optimizer_step"] == 1
    assert state(wild)["adapter_model.safetensors"] == before
    # The gradient is gone with the step, and the run goes on.
    train(engine, make_operation("a", wild))
    assert step(engine, wild)["skipped"] == 0


# ── samplers ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_sampler_keeps_its_weights_while_the_run_goes_on(engine, new_run):
    run = new_run()
    sampler_id = publish(engine, run)
    before = sample(engine, make_sample("s", sampler_id=sampler_id))["s"]
    train(engine, make_operation("r", run))
    step(engine, run, learning_rate=0.5)
    after, moved = (sample(engine, make_sample("s", sampler_id=i))["s"] for i in (sampler_id, publish(engine, run)))
    assert tokens_and_logprobs(after) == tokens_and_logprobs(before) != tokens_and_logprobs(moved)


def test_sampling_leaves_training_untouched(engine, new_run, state):
    run = new_run()
    before = state(run)
    sample(engine, make_sample("s", sampler_id=publish(engine, run), num_samples=3))
    assert state(run) == before


def test_a_saved_adapter_samples_like_the_run_it_was(engine, new_run, tmp_path):
    run = new_run(rank=6)
    published = publish(engine, run)
    engine.save_state(SaveState(request_id="r", model_id=run, directory=str(tmp_path / "a"), weights_only=True))
    engine.load_sampler(LoadSampler(request_id="r", sampler_id="loaded", directory=str(tmp_path / "a")))
    results = sample(engine, make_sample("a", sampler_id=published), make_sample("b", sampler_id="loaded"))
    assert results["a"].sequences[0].tokens.tolist() == results["b"].sequences[0].tokens.tolist()
    assert np.allclose(results["a"].sequences[0].logprobs, results["b"].sequences[0].logprobs, atol=1e-5)
    engine.drop_sampler(DropSampler(request_id="r", sampler_id="loaded"))
    with pytest.raises(NotFound, match="there is no sampler 'loaded'"):
        engine.add_sample(make_sample("s", sampler_id="loaded"))


def test_a_name_that_comes_again_has_its_new_weights(engine, new_run):
    """Prompts computed with the old weights are not taken for prompts of the new ones, even while the old still run."""
    old, new = new_run(seed=1), new_run(seed=2)
    step(engine, new, learning_rate=0.5)
    expected_old, expected_new = (
        tokens_and_logprobs(sample(engine, make_sample("s", prompt_length=64, sampler_id=publish(engine, run)))["s"])
        for run in (old, new)
    )
    assert expected_old != expected_new
    engine.publish_sampler(PublishSampler(request_id="r", model_id=old, sampler_id="again"))
    assert (
        tokens_and_logprobs(sample(engine, make_sample("s", prompt_length=64, sampler_id="again"))["s"]) == expected_old
    )
    engine.add_sample(make_sample("old", prompt_length=64, sampler_id="again"))
    engine.drop_sampler(DropSampler(request_id="r", sampler_id="again"))
    engine.publish_sampler(PublishSampler(request_id="r", model_id=new, sampler_id="again"))
    results = sample(engine, make_sample("new", prompt_length=64, sampler_id="again"))
    for found, expected in ((results["old"], expected_old), (results["new"], expected_new)):
        for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(
            tokens_and_logprobs(found), expected, strict=True
        ):
            assert tokens == expected_tokens
            # Several rows round differently from one row, but not with the packed weights of a CPU without AVX-512.
            has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
            allowed = 1e-4 if DEVICE.type != "cpu" else 1e-5 if has_avx512 else 0
            assert logprobs == pytest.approx(expected_logprobs, rel=0, abs=allowed)


def test_samplers_are_never_replaced(engine, new_run, tmp_path):
    run = new_run()
    sampler_id = publish(engine, run)
    engine.save_state(SaveState(request_id="r", model_id=run, directory=str(tmp_path / "a")))
    for name in (sampler_id, ""):
        with pytest.raises(InvalidInput, match="taken or empty"):
            engine.publish_sampler(PublishSampler(request_id="r", model_id=run, sampler_id=name))
        with pytest.raises(InvalidInput, match="taken or empty"):
            engine.load_sampler(LoadSampler(request_id="r", sampler_id=name, directory=str(tmp_path / "a")))
    with pytest.raises(NotFound, match="there is no run 'nobody'"):
        engine.publish_sampler(PublishSampler(request_id="r", model_id="nobody", sampler_id="new"))
    with pytest.raises(NotFound, match="there is no sampler 'nobody'"):
        engine.drop_sampler(DropSampler(request_id="r", sampler_id="nobody"))
    with pytest.raises(CheckpointError, match="there is no directory"):
        engine.load_sampler(LoadSampler(request_id="r", sampler_id="new", directory=str(tmp_path / "nowhere")))
    with pytest.raises(NotFound, match="there is no sampler 'new'"):
        engine.add_sample(make_sample("s", sampler_id="new"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": np.array([], int)}, "prompt has shape"),
        ({"prompt": np.array([1, VOCAB_SIZE])}, "prompt.* is 272"),
        ({"prompt": np.array([1.5])}, "prompt"),
        ({"prompt": np.zeros(512, int)}, "exceed the context length 512"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 10**6}, "num_samples is 1000000"),
        ({"params": SamplingParams(max_tokens=0)}, "max_tokens is 0"),
        ({"params": SamplingParams(temperature=float("nan"))}, "temperature is nan"),
        ({"params": SamplingParams(top_p=0.0)}, "top_p is 0"),
        ({"params": SamplingParams(stop=["a", 1])}, "stop mixes"),
        ({"topk_prompt_logprobs": 10**4}, "topk_prompt_logprobs is 10000"),
        ({"target_prompt_logprobs": np.zeros((9, 2), int)}, "target_prompt_logprobs has shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_sample_that_cannot_be_is_refused_before_it_begins(engine, fields, message):
    request = SampleRequest(**{"request_id": "s", "prompt": np.arange(5)} | fields)
    with pytest.raises(InvalidInput, match=message):
        engine.add_sample(request)
    assert engine.sampler.is_idle


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-45),
        SamplingParams(temperature=1e30),
        SamplingParams(top_p=1e-300),
        SamplingParams(top_k=10**9),
        SamplingParams(top_k=1, top_p=1e-9, temperature=0.0),
        SamplingParams(seed=-(2**63)),
        SamplingParams(seed=2**64 - 1),
        SamplingParams(stop="\x00"),
        SamplingParams(stop=[]),
    ],
    ids=str,
)
def test_extreme_settings_give_tokens_and_finite_logprobs(engine, params):
    request = msgspec.structs.replace(make_sample("s"), params=msgspec.structs.replace(params, max_tokens=4))
    beside = make_sample("beside")
    alone = tokens_and_logprobs(sample(engine, beside)["beside"])
    results = sample(engine, request, beside)
    sequence = results["s"].sequences[0]
    assert 1 <= len(sequence.tokens) == len(sequence.logprobs) <= 4
    assert ((sequence.tokens >= 0) & (sequence.tokens < VOCAB_SIZE)).all()
    assert np.isfinite(sequence.logprobs).all()
    assert [tokens for tokens, _ in tokens_and_logprobs(results["beside"])] == [tokens for tokens, _ in alone]


def test_status_counts(engine, new_run):
    before = engine.status()
    run = new_run()
    publish(engine, run)
    sample(engine, make_sample("s", max_tokens=6, num_samples=2))
    after = engine.status()
    assert (after.num_runs - before.num_runs, after.num_samplers - before.num_samplers) == (1, 1)
    assert after.train_tokens - before.train_tokens == 2 * (9 + 17 + 5)
    assert after.sampled_tokens - before.sampled_tokens == 12
    assert (after.num_sampling, after.num_waiting) == (0, 0)
    assert after.memory_bytes > 0
