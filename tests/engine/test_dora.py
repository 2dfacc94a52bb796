"""DoRA against PEFT's own layers: in mixed batches, over steps, saved and resumed, sampled, quantised, stored."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import UNSET
from peft import PeftModel

from lorimer.engine.adapters import checkpoints
from lorimer.engine.adapters.adapters import create_adapter, flatten, snapshot
from lorimer.engine.adapters.dora import BaseRows
from lorimer.engine.adapters.lora import find_targets
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.grouped import GroupedSlices
from lorimer.engine.model.linear import FrozenMatrix, add_products, backpropagate, unscale_gradient
from lorimer.engine.training import optim
from lorimer.engine.training.batch import AdapterSlice
from lorimer.engine.training.optimizers import OPTIMIZERS
from lorimer.engine.training.trainer import Trainer, TrainItem
from lorimer.errors import CheckpointError, Unsupported
from lorimer.models.debug import tiny_model
from tests.engine.quantized import open_quantized
from tests.engine.reference import (
    DEVICE,
    PeftReference,
    checked,
    make_adapter,
    make_datum,
    open_pair,
    relative_error,
    run_reference,
)
from tests.engine.test_linear import IN, OUT, TARGETS, make_layer, make_slice
from tests.engine.test_sampling import finish, make_sampler, prompt_of, request, trainer_logprobs
from tests.engine.test_training import LENGTHS, assert_same_gradients, run

KINDS = [{"use_dora": True}, {}, {"use_rslora": True}, {"use_dora": True, "use_rslora": True}]
CASES = [("qwen2", {}), ("phi3", {}), ("llama", {"tie_word_embeddings": True}), ("gemma2", {})]
"""Biases; fused projections; a tied head; capped logits."""

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")


def batch_of(model, loss_fn="cross_entropy", lengths=LENGTHS):
    data = [make_datum(loss_fn, n, seed, model.vocab_size) for seed, n in enumerate(lengths)]
    return data, checked(data, loss_fn, model.vocab_size)


@pytest.mark.parametrize(("architecture", "overrides"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_logprobs_and_gradients_in_a_mixed_batch_equal_pefts_and_those_alone(architecture, overrides):
    """A loss that takes the head twice; a budget that cuts the batch into several passes, and recomputes layers."""
    model, plain = open_pair(architecture, **overrides)
    data, operation = batch_of(model, "gspo")
    adapters = [make_adapter(model, rank=2 + i, seed=i, **kind) for i, kind in enumerate(KINDS)]
    results = run(model, [TrainItem(operation, adapter) for adapter in adapters], budget=16)
    for i, (kind, adapter, result) in enumerate(zip(KINDS, adapters, results, strict=True)):
        loss, logprobs, gradients = run_reference(PeftReference(plain, model, adapter), data, "gspo")
        assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
        for ours, theirs in zip(result.logprobs, logprobs, strict=True):
            assert abs(ours - theirs).max() < 1e-4
        assert_same_gradients(adapter.grads, gradients, 1e-4)
        alone = make_adapter(model, rank=2 + i, seed=i, **kind)
        run(model, [TrainItem(operation, alone)])
        assert_same_gradients(adapter.grads, alone.grads, 1e-5)


@pytest.mark.parametrize(("architecture", "overrides"), CASES[:3], ids=[name for name, _ in CASES[:3]])
def test_ten_steps_equal_those_of_peft_and_torch(architecture, overrides):
    model, plain = open_pair(architecture, **overrides)
    data, operation = batch_of(model)
    adapter = create_adapter(
        model.targets, LoraConfig(rank=4, seed=0, use_dora=True), OptimizerConfig(), DEVICE.handle, model.rows
    )
    for target in model.targets:
        expected = torch.linalg.norm(plain.get_submodule(target.module).weight, dim=1)[target.rows]
        assert relative_error(adapter.weights[target.name][2], expected) < 1e-6
    reference = PeftReference(plain, model, adapter)
    parameters = [p for name, p in reference.model.named_parameters() if "lora_" in name]
    torch_adamw = torch.optim.AdamW(parameters, lr=5e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.05)
    for _ in range(10):
        run(model, [TrainItem(operation, adapter)])
        torch_adamw.zero_grad()
        run_reference(reference, data, "cross_entropy")
        drop_gradients_between_parts(reference)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        fields = {"learning_rate": 5e-3, "eps": 1e-8, "weight_decay": 0.05, "grad_clip_norm": 1.0}
        metrics = optim.apply(adapter, fields)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["skipped"] == 0
        torch_adamw.step()
    (result,) = run(model, [TrainItem(operation, adapter)])
    _, logprobs, _ = run_reference(reference, data, "cross_entropy")
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        assert abs(ours - theirs).max() < 1e-3
    assert_same_magnitudes(reference, adapter, 1e-4)
    moved = [pair[2] - model.rows[name].squares_O.sqrt() for name, pair in adapter.weights.items()]
    assert min(one.abs().max() for one in moved) > 1e-3


def drop_gradients_between_parts(reference):
    """Keep the pairs of a fused weight apart, as ours are: PEFT would fill the whole of the B in which they stand."""
    rank = reference._adapter.rank
    for name, group in reference._parts.items():
        gradient = reference.model.get_submodule(f"base_model.model.{name}").lora_B["default"].weight.grad
        kept = torch.zeros_like(gradient)
        for i, target in enumerate(group):
            kept[target.rows, i * rank : (i + 1) * rank] = 1
        gradient.mul_(kept)


def assert_same_magnitudes(reference, adapter, tolerance):
    for name, group in reference._parts.items():
        theirs = reference.model.get_submodule(f"base_model.model.{name}").lora_magnitude_vector["default"].weight
        for target in group:
            assert relative_error(adapter.weights[target.name][2], theirs.detach()[target.rows]) < tolerance


@pytest.mark.parametrize("name", ["qwen2", "phi3"])
def test_a_fresh_run_computes_exactly_what_the_base_does(name):
    model, _ = open_pair(name)
    _, operation = batch_of(model)
    found = []
    for kind in ({"use_dora": True}, {}):
        adapter = create_adapter(
            model.targets, LoraConfig(rank=4, seed=0, **kind), OptimizerConfig(), DEVICE.handle, model.rows
        )
        (result,) = run(model, [TrainItem(operation, adapter)])
        found.append(np.concatenate(result.logprobs))
    np.testing.assert_array_equal(*found)


def test_norms_are_exact_where_the_adapter_nearly_cancels_the_weight_and_zero_rows_stay_zero():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, IN, generator=generator), torch.randn(OUT, 3, generator=generator)
    weight = -2.0 * b @ a
    weight[::2] += 1e-3 * torch.randn(OUT // 2, IN, generator=generator)
    weight[7], b[7] = 0.0, 0.0
    rows = BaseRows(FrozenMatrix(weight, None), 0, OUT, IN)
    expected = (weight.double() + 2.0 * b.double() @ a.double()).norm(dim=1)
    found = rows.norms(a, b, 2.0).double()
    assert ((found - expected).abs() <= 1e-6 * expected).all()
    assert found[7] == 0 < expected[::2].max() < 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_run_continues_to_the_bit_with_every_optimiser(name, tmp_path):
    model, _ = open_pair("phi3")
    _, operation = batch_of(model, lengths=(9, 5))
    straight = make_adapter(model, optimizer=name, use_dora=True)
    rates = {"learning_rate": 1e-2, "lr_multipliers": {"lora_magnitude": 2.0, "lora_B": 4.0, "unembed": 0.5}}
    for step in range(3):
        run(model, [TrainItem(operation, straight)])
        if step == 1:
            checkpoints.save(straight, model.targets, str(tmp_path / "s"), base_model="tiny", weights_only=False)
            resumed = make_adapter(model, seed=5, optimizer=name, use_dora=True)
            run(model, [TrainItem(operation, resumed)])  # has norms of other weights
            checkpoints.load(resumed, model.targets, str(tmp_path / "s"), optimizer=True)
        assert optim.apply(straight, rates)["skipped"] == 0
    optim.apply(resumed, rates)
    run(model, [TrainItem(operation, resumed)])
    optim.apply(resumed, rates)
    assert all(torch.equal(x, y) for x, y in zip(resumed.tensors(), straight.tensors(), strict=True))
    for weights in (snapshot(straight).weights, straight.weights):
        assert all(len(pair) == 3 for pair in weights.values())
    vectors = {key.rpartition("/")[2] for tensors in straight.moments.values() for key in tensors}
    assert name == "sgd" or vectors == {"A", "B", "magnitude"}


def test_learning_rate_of_magnitudes_can_be_zero():
    model, _ = open_pair("llama")
    _, operation = batch_of(model)
    adapter = make_adapter(model, use_dora=True)
    before = [pair[2].clone() for pair in adapter.weights.values()]
    run(model, [TrainItem(operation, adapter)])
    optim.apply(adapter, {"lr_multipliers": {"lora_magnitude": 0}})
    assert all(torch.equal(x, pair[2]) for x, pair in zip(before, adapter.weights.values(), strict=True))


@pytest.mark.parametrize("architecture", ["qwen2", "phi3"])
def test_logprobs_of_samples_beside_other_adapters_are_the_trainers(architecture):
    model, _ = open_pair(architecture)
    runs = {str(i): make_adapter(model, rank=3 + i, seed=i, **kind) for i, kind in enumerate(KINDS)}
    frozen = {name: snapshot(adapter) for name, adapter in runs.items()}
    prompt = prompt_of(21)
    asked = [request(name or "base", prompt, name, 2, prompt_logprobs=True) for name in (*runs, None)]
    results = finish(make_sampler(model), *asked, adapters=frozen)
    for name, adapter in runs.items():
        for sequence in results[name].sequences:
            expected = trainer_logprobs(model, np.concatenate([prompt, sequence.tokens]), adapter)
            assert abs(sequence.logprobs - expected[len(prompt) - 1 :]).max() < 1e-4
            assert abs(results[name].prompt_logprobs[1:] - expected[: len(prompt) - 1]).max() < 1e-4


@pytest.mark.parametrize("architecture", ["qwen2", "phi3"])
def test_peft_reads_what_we_save_and_we_read_what_peft_saves(architecture, tmp_path):
    model, plain = open_pair(architecture)
    adapter = make_adapter(model, use_dora=True)
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    checkpoints.save(adapter, model.targets, ours, base_model="tiny", weights_only=True)
    loaded = PeftModel.from_pretrained(plain, ours).eval()
    tokens = torch.arange(20) * 7 % model.vocab_size
    expected = PeftReference(open_pair(architecture)[1], model, adapter).logits(tokens)
    torch.testing.assert_close(loaded(tokens[None]).logits[0], expected, rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(theirs, save_embedding_layers=False)
    config = checkpoints.read_config(theirs)
    assert (config.use_dora, config.use_rslora) == (True, UNSET)
    again = checkpoints.load_weights(theirs, model.targets, config)
    assert all(torch.equal(x, y.cpu()) for x, y in zip(flatten(again), flatten(adapter.weights), strict=True))
    for directory in (ours, theirs):
        with pytest.raises(CheckpointError, match="saved adapter has use_dora=True, the run has use_dora=False"):
            checkpoints.load_weights(directory, model.targets, LoraConfig(rank=4))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_norms_of_a_quantised_base_are_those_of_its_dequantised_weights(kind, tmp_path):
    model, plain = open_quantized(tmp_path, "qwen2", kind)
    data, operation = batch_of(model)
    adapter = make_adapter(model, use_dora=True)
    (result,) = run(model, [TrainItem(operation, adapter)])
    loss, _, gradients = run_reference(PeftReference(plain, model, adapter), data, "cross_entropy")
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert_same_gradients(adapter.grads, gradients, 1e-4)


def test_experts_are_refused_and_the_rest_of_their_model_is_trained():
    model, plain = open_pair("qwen3_moe")
    with pytest.raises(Unsupported, match=r"use_dora is not available for the experts .*train_mlp=False"):
        make_adapter(model, use_dora=True)
    adapter = make_adapter(model, use_dora=True, train_mlp=False)
    data, operation = batch_of(model)
    run(model, [TrainItem(operation, adapter), TrainItem(operation, make_adapter(model, seed=1))])
    _, _, gradients = run_reference(PeftReference(plain, model, adapter), data, "cross_entropy")
    assert_same_gradients(adapter.grads, gradients, 1e-4)
    assert find_targets(plain)[-1].name in adapter.weights


def test_grouped_products_leave_dora_slices_to_their_own():
    linear, layer, _ = make_layer()
    base = {target.name: BaseRows.of(layer.matrix, target) for target in TARGETS}
    x = torch.randn(20, IN, generator=torch.Generator().manual_seed(3))
    d_y = torch.randn(20, OUT, generator=torch.Generator().manual_seed(4))
    found = []
    for arrange in (list, lambda slices: GroupedSlices(slices, x.device)):
        slices = [make_slice(0, 6, 5, 1), make_dora_slice(base, 6, 14, 4, 2), make_slice(14, 20, 8, 3)]
        y, d_x = linear(x).detach(), torch.zeros_like(x)
        products = add_products(x, y, TARGETS, arrange(slices), layer.matrix)
        backpropagate(x, unscale_gradient(d_y, products), products, d_x)
        found.append([y, d_x, *(g for part in slices for pair in part.grads.values() for g in pair)])
    assert len(found[0]) == 2 + 3 * 2 * 2 + 3 * 3
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def make_dora_slice(base, start, stop, rank, seed):
    plain = make_slice(start, stop, rank, seed)
    adapter = create_adapter(TARGETS, LoraConfig(rank=rank, seed=seed, use_dora=True), OptimizerConfig(), "cpu", base)
    adapter.weights = {name: (*pair, adapter.weights[name][2]) for name, pair in plain.weights.items()}
    return AdapterSlice(
        start, stop, adapter.weights, adapter.scale, adapter.new_gradient(), row_scales=adapter.row_scales
    )


def test_a_pass_whose_dora_activations_do_not_fit_is_checkpointed(monkeypatch):
    model, _ = open_pair("llama")
    passes, hidden = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda *args: passes.append(args[2].is_checkpointed) or hidden(*args))
    _, operation = batch_of(model, lengths=(40,))
    for use_dora, fitting in ((True, 39), (True, 40), (UNSET, 39)):
        Trainer(model, 64, 100, fitting).run([TrainItem(operation, make_adapter(model, use_dora=use_dora))])
    assert passes == [True, False, False]


def test_bfloat16_passes_stay_close_to_float32():
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = BaseModel(tiny_model("qwen2").to(dtype), replace(DEVICE, dtype=dtype), name="qwen2")
        adapter = make_adapter(model, use_dora=True)
        run(model, [TrainItem(batch_of(model)[1], adapter)])
        gradients.append(torch.cat([one.flatten() for one in flatten(adapter.grads)]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.98
