"""Full runs whose passes compute in bfloat16, with copies of float32 weights: against independent references."""

import copy
import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from lorimer.engine import messages
from lorimer.engine.engine import Engine
from lorimer.engine.full.full_run import apply_step
from lorimer.engine.model.base_model import BaseModel, register_implementations
from lorimer.engine.model.masters import add_product
from lorimer.engine.model.norms import FrozenRMSNorm
from lorimer.engine.reservations import reserved_bytes
from lorimer.errors import ModelRefused, TooLarge
from lorimer.models.debug import make_debug_model, tiny_model
from tests.engine import test_full_engine as commands
from tests.engine.operations import make_sample, settings
from tests.engine.reference import DEVICE, literal_loss, relative_error
from tests.engine.rounded_llama import RoundedLlama
from tests.engine.test_full import make_data, make_run, run_plain, train

NARROW = replace(DEVICE, dtype=torch.bfloat16)


def open_pair(architecture, **overrides):
    """The engine's model, which computes in bfloat16, and an untouched float32 copy of the same weights."""
    register_implementations()
    plain = tiny_model(architecture, **overrides)
    plain.config._attn_implementation = "eager"
    return BaseModel(copy.deepcopy(plain), NARROW, name=architecture, trains_base=True), plain.eval()


def is_rounded(model):
    """Whether passes compute with the masters, rounded to nearest."""
    masters = model.masters.tensors()
    return all(torch.equal(p, masters[name].bfloat16()) for name, p in model.transformer.named_parameters())


@pytest.mark.parametrize(("architecture", "is_tied"), [("llama", True), ("qwen2", False)])
def test_gradients_equal_a_model_that_rounds_at_the_same_points(architecture, is_tied):
    model, plain = open_pair(architecture, tie_word_embeddings=is_tied)
    run, data = make_run(model), make_data(model)
    result = train(model, run, data)
    masters = {name: p.detach().clone().requires_grad_() for name, p in plain.named_parameters()}
    reference = RoundedLlama(plain.config, masters)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        all_logprobs = reference.logits(torch.from_numpy(datum.tokens)).log_softmax(-1)
        chosen = all_logprobs.gather(1, torch.from_numpy(datum.loss_fn_inputs["target_tokens"])[:, None])[:, 0]
        literal_loss("cross_entropy", chosen, datum).backward()
        assert np.abs(logprobs - chosen.detach().numpy()).max() < 1e-4
    _, _, wide = run_plain(plain, data)
    for name, master in masters.items():
        assert run.grads[name].dtype == run.weights[name].dtype == torch.float32
        assert torch.equal(run.weights[name].cpu(), master)
        # A CPU rounds the product of each pass once more.
        assert relative_error(run.grads[name], master.grad) < 2**-8 < 5e-3 < relative_error(run.grads[name], wide[name])


@pytest.mark.parametrize(("narrow", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_a_scaled_product_is_added_to_a_float32_gradient(narrow, tolerance):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(300, size, generator=generator).to(narrow) for size in (16, 24))
    found = torch.full((16, 24), 1000.0)
    add_product(found, left, right, alpha=0.3)
    expected = 0.3 * left.double().t() @ right.double()
    # The sum keeps bits that bfloat16 would lose: near 1000 its numbers are 4 apart.
    assert ((found - 1000).double() - expected).abs().max() <= tolerance * expected.abs().max() + 1e-4


@pytest.mark.parametrize("architecture", ["gemma3_text", "gemma2", "phi3", "olmo2", "gpt_oss", "qwen3_moe"])
def test_gradients_are_as_close_to_float32_as_those_of_a_bfloat16_copy(architecture):
    """Norms with an offset, scaled embeddings, fused projections, sinks, routers and experts."""
    model, plain = open_pair(architecture, tie_word_embeddings=False)
    run, data = make_run(model), make_data(model)
    result = train(model, run, data)
    narrow = copy.deepcopy(plain)
    for parameter in narrow.parameters():
        parameter.data = parameter.data.bfloat16()
    loss, _, wide = run_plain(plain, data)
    _, _, found = run_plain(narrow, data)
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=0.02)
    assert run.grads.keys() == wide.keys()
    assert all(".router." in name or ".gate." in name for name in model._native)  # autograd rounds these only
    for name, expected in wide.items():
        ours, theirs = (relative_error(one[name].float(), expected) for one in (run.grads, found))
        assert ours < max(0.06, 2 * theirs), name


def test_a_norm_adds_its_offset_to_the_weight_in_float32():
    x, weight = torch.randn(5, 64).bfloat16(), (0.01 * torch.randn(64)).bfloat16()
    wide = x.float()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight.float())
    found = FrozenRMSNorm(weight, 1e-6, 1.0, is_trained=True)(x)
    # A sum in another order may round the other way, rarely.
    assert (found != expected.bfloat16()).float().mean() < 0.02


def test_gradients_of_many_passes_are_added_in_float32():
    """Twenty sums in bfloat16 would be off by 1e-2."""
    model, _ = open_pair("llama")
    run, data = make_run(model), make_data(model, (12,))
    train(model, run, data)
    once = {name: grad.clone() for name, grad in run.grads.items()}
    for _ in range(19):
        train(model, run, data)
    for name, grad in run.grads.items():
        assert relative_error(grad, 20 * once[name]) < 1e-5, name


def test_updates_too_small_for_bfloat16_add_up_in_the_masters():
    model, plain = open_pair("llama")
    run = make_run(model)
    rate, steps = 1e-6, 10
    wide = {name: torch.nn.Parameter(weight.cpu().clone()) for name, weight in run.weights.items()}
    reference = torch.optim.AdamW(wide.values(), lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    fields = {"learning_rate": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    before = {name: weight.detach().clone() for name, weight in wide.items()}
    for step in range(steps):
        train(model, run, make_data(model, first_seed=10 * step))
        for name, parameter in wide.items():
            parameter.grad = run.grads[name].cpu().clone()
        apply_step(run, {**fields, "grad_clip_norm": 0.0})
        reference.step()
    assert is_rounded(model)
    for name, parameter in wide.items():
        moved = run.weights[name].cpu() - before[name]
        has_gradient = run.moments["exp_avg_sq"][name].cpu() > 1e-20
        assert moved[has_gradient].count_nonzero() > 0.9 * has_gradient.sum(), name
        # The difference of weights of about 1 has few digits.
        assert relative_error(moved, (parameter - before[name]).detach()) < 0.05, name
    # The same steps on bfloat16 weights are lost, but for weights near zero.
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()
    start = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(steps):
        run_plain(plain, make_data(model, first_seed=10 * step))
        optimizer.step()
    lost = torch.cat([(p.detach() == start[name]).flatten() for name, p in plain.named_parameters()])
    assert lost.float().mean() > 0.9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bfloat16")
    # Weights that bfloat16 does not hold, as those of a checkpoint in float32.
    make_debug_model(folder / "model", architecture="gemma2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield folder


def open_engine(folder, **more):
    fields = {"token_budget": 64, "method": "full", "dtype": "bfloat16", "seed": 3}
    return Engine(settings(folder, model=str(folder / "model"), **fields | more))


@pytest.fixture(scope="module")
def engine(folder):
    return open_engine(folder)


@pytest.fixture
def empty(engine):
    yield engine
    for model_id in list(engine._runs):
        commands.drop(engine, model_id)


@pytest.mark.parametrize("is_snapshot", [False, True], ids=["checkpoint", "snapshot"])
@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free_adamw"])
def test_a_new_engine_replays_a_saved_run_to_the_bit(empty, folder, tmp_path, optimizer, is_snapshot):
    commands.create(empty, optimizer=optimizer)
    for seed in (0, 10):
        commands.train(empty, seed=seed)
        commands.step(empty)
    commands.train(empty, seed=20)
    commands.save(empty, tmp_path / "saved", is_snapshot=is_snapshot)
    commands.step(empty)
    expected = commands.train(empty, seed=30).logprobs, commands.state(empty)
    fresh = open_engine(folder)
    commands.create(fresh, optimizer=optimizer)
    commands.load(fresh, tmp_path / "saved")
    assert is_rounded(fresh.model)
    commands.step(fresh)
    found = commands.train(fresh, seed=30).logprobs, commands.state(fresh)
    assert all(np.array_equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert commands.is_equal(found[1], expected[1])
    # The next run of the same engine begins with the base again.
    commands.drop(fresh)
    commands.create(fresh)
    assert is_rounded(fresh.model)
    wide = open_engine(folder, dtype="float32").model.masters.tensors()
    assert all(torch.equal(tensor, wide[name]) for name, tensor in fresh.model.masters.tensors().items())


def test_files_hold_the_masters_whatever_passes_compute_in(empty, folder, tmp_path):
    commands.create(empty, train_embed=False, train_unembed=False)
    commands.train(empty)
    commands.step(empty)
    for is_snapshot in (False, True):
        commands.save(empty, tmp_path / f"{is_snapshot}", is_snapshot=is_snapshot)
    expected = commands.state(empty)
    wide = open_engine(folder, dtype="float32")
    commands.create(wide, train_embed=False, train_unembed=False)
    for is_snapshot in (False, True):
        # Frozen weights are compared with the base's, which has more digits than the copies.
        commands.load(wide, tmp_path / f"{is_snapshot}")
        assert commands.is_equal(commands.state(wide), expected)
    commands.save(wide, tmp_path / "wide")
    for path in sorted((tmp_path / "wide").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "False" / path.name).read_bytes(), path.name
    assert (tmp_path / "wide" / "config.json").read_text() == (tmp_path / "False" / "config.json").read_text()


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free_adamw"])
def test_samplers_give_the_logprobs_of_the_trainer(empty, tmp_path, optimizer):
    commands.create(empty, optimizer=optimizer)
    for seed in (0, 1):
        commands.train(empty, seed=seed)
        commands.step(empty)
    commands.publish(empty, "here")
    commands.save(empty, tmp_path / "saved", weights_only=True)
    empty.load_sampler(messages.LoadSampler(request_id="r", sampler_id="read", directory=str(tmp_path / "saved")))
    here, read = (empty._samplers[name][1].weights for name in ("here", "read"))
    assert {tensor.dtype for tensor in here.values()} == {torch.bfloat16}
    assert here.keys() == read.keys() and all(torch.equal(here[name], read[name]) for name in here)
    sampled = commands.sample(empty, "here", "read", max_tokens=30, prompt_logprobs=True)
    prompt = make_sample("r").prompt
    tokens = np.concatenate([prompt, sampled[0].sequences[0].tokens])
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    operation = messages.ForwardBackward(
        request_id="r",
        model_id="m",
        data=[messages.Datum(tokens=tokens[:-1], loss_fn_inputs=inputs)],
        loss_fn="cross_entropy",
        forward_only=True,
    )
    # The weights of adamw are those that the run computes with; the average of the other is not.
    with empty.model.with_weights(here if optimizer == "schedule_free_adamw" else {}):
        (scored,) = empty.train([operation])
    for one in sampled:
        assert np.abs(one.prompt_logprobs[1:] - scored.logprobs[0][: len(prompt) - 1]).max() < 1e-4
        assert np.abs(one.sequences[0].logprobs - scored.logprobs[0][len(prompt) - 1 :]).max() < 1e-4
    for name in ("here", "read"):
        empty.drop_sampler(messages.DropSampler(request_id="r", sampler_id=name))


def test_copies_are_reserved_with_the_rest(empty, folder, monkeypatch):
    number = empty.info.num_parameters
    tensors = [*empty.model.masters.tensors().values(), *empty.model.transformer.parameters()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    commands.create(empty)
    commands.train(empty)
    state = empty._run("m").memory_bytes
    commands.step(empty)
    state += empty._run("m").memory_bytes
    assert sum(storages.values()) + state == 18 * number
    gc.collect()  # engines of other tests
    free = reserved_bytes() + 18 * number
    monkeypatch.setattr("lorimer.engine.full.memory_need.free_bytes", lambda device: free)
    assert open_engine(folder).info.dtype == "bfloat16"
    gc.collect()  # its reservation
    free -= 1
    with pytest.raises(TooLarge):
        open_engine(folder)
    gc.collect()
    # A copy for sampling is in bfloat16; an average of the weights is float32 before it is rounded.
    free = reserved_bytes() + 2 * number
    commands.publish(empty, "small")
    empty.drop_sampler(messages.DropSampler(request_id="r", sampler_id="small"))
    commands.drop(empty)
    commands.create(empty, optimizer="schedule_free_adamw")
    with pytest.raises(TooLarge):
        commands.publish(empty, "averaged")


def test_parameters_that_an_architecture_keeps_in_float32_have_no_copy():
    register_implementations()
    plain = tiny_model("gemma2")
    plain._keep_in_fp32_modules_strict = {"input_layernorm"}
    model = BaseModel(plain, NARROW, name="gemma2", trains_base=True)
    run = make_run(model)
    train(model, run, make_data(model))
    apply_step(run, {"learning_rate": 1e-3})
    kept = {name for name, p in model.transformer.named_parameters() if p.dtype == torch.float32}
    assert kept == {f"model.layers.{number}.input_layernorm.weight" for number in range(2)}
    for name in kept:
        assert run.weights[name].data_ptr() == model.transformer.get_parameter(name).data_ptr()
    with pytest.raises(ModelRefused, match=r"computes 'model.layers.0.input_layernorm.weight' in float32"):
        model.masters.drop_copies()
