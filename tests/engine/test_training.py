"""Packed training against plain transformers with PEFT, padded by nothing, one sequence at a time."""

from dataclasses import replace

import pytest
import torch
from msgspec import UNSET
from torch.utils._python_dispatch import TorchDispatchMode

from lorimer.engine.adapters.adapters import FACTORS
from lorimer.engine.model.base_model import BaseModel, register_implementations
from lorimer.engine.training import optim
from lorimer.engine.training.custom_loss import CustomLoss
from lorimer.engine.training.optimizers import OPTIMIZERS
from lorimer.engine.training.trainer import Trainer, TrainItem
from lorimer.models.debug import tiny_model
from tests.engine.reference import (
    DENSE,
    DEVICE,
    MOE,
    checked,
    make_adapter,
    make_datum,
    open_pair,
    reference_of,
    relative_error,
    run_reference,
)

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
LENGTHS = (9, 17, 5, 12)


def run(model, work, budget=64):
    results = Trainer(model, budget).run(work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def assert_same_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, pair in expected.items():
        for factor, ours, theirs in zip(FACTORS[: len(pair)], found[name], pair, strict=True):
            assert relative_error(ours, theirs) < tolerance, f"{name} {factor}"


# A loss sees logprobs alone, so each architecture is compared with one loss, and each loss with one architecture: the
# one that caps its logits.
PAIRS = [*((name, "cross_entropy") for name in (*DENSE, *MOE)), *(("gemma2", name) for name in LOSSES[1:])]


@pytest.mark.parametrize(("architecture", "loss_fn"), PAIRS)
def test_loss_logprobs_and_gradients_equal_the_reference(architecture, loss_fn):
    model, plain = open_pair(architecture)
    adapter = make_adapter(model)
    data = [make_datum(loss_fn, n, seed, model.vocab_size) for seed, n in enumerate(LENGTHS)]
    (result,) = run(model, [TrainItem(checked(data, loss_fn, model.vocab_size), adapter)])
    loss, logprobs, gradients = run_reference(reference_of(plain, model, adapter, architecture), data, loss_fn)
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        assert abs(ours - theirs).max() < 1e-4
    assert_same_gradients(adapter.grads, gradients, 1e-4)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen3_moe"])
def test_rslora_equals_the_reference_beside_a_plain_adapter(architecture):
    model, plain = open_pair(architecture)
    adapters = [make_adapter(model, seed=seed, use_rslora=kind) for seed, kind in ((0, True), (1, UNSET))]
    assert (adapters[0].scale, adapters[1].scale) == (32 / 2, 32 / 4)
    data = [make_datum("cross_entropy", n, seed, model.vocab_size) for seed, n in enumerate(LENGTHS)]
    items = [TrainItem(checked(data, "cross_entropy", model.vocab_size), adapter) for adapter in adapters]
    for result, adapter in zip(run(model, items), adapters, strict=True):
        loss, logprobs, gradients = run_reference(
            reference_of(plain, model, adapter, architecture), data, "cross_entropy"
        )
        assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
        for ours, theirs in zip(result.logprobs, logprobs, strict=True):
            assert abs(ours - theirs).max() < 1e-4
        assert_same_gradients(adapter.grads, gradients, 1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_that_fill_a_pair_of_a_lower_rank_stay_zeros(name):
    """A pair that PEFT gave a lower rank than the others is trained as if it had that rank."""
    model, _ = open_pair("llama")
    adapter = make_adapter(model, optimizer=name)
    filled = adapter.weights[model.targets[0].name]
    filled[0][2:], filled[1][:, 2:] = 0.0, 0.0
    data = [make_datum("cross_entropy", n, seed, model.vocab_size) for seed, n in enumerate(LENGTHS)]
    for _ in range(3):
        run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), adapter)])
        assert optim.apply(adapter, {"learning_rate": 0.01})["skipped"] == 0.0
    assert not filled[0][2:].any() and not filled[1][:, 2:].any()
    assert filled[0][:2].all() and filled[1][:, :2].all()


@pytest.mark.parametrize("num_targets", [1, 3], ids=["K=1", "K=3"])
def test_cross_entropy_takes_several_targets_at_a_position(num_targets):
    model, plain = open_pair("llama")
    adapter = make_adapter(model)
    data = [make_datum("cross_entropy", n, seed, model.vocab_size, num_targets) for seed, n in enumerate((6, 11))]
    (result,) = run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), adapter)])
    loss, logprobs, gradients = run_reference(reference_of(plain, model, adapter, "llama"), data, "cross_entropy")
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert [p.shape for p in result.logprobs] == [(6, num_targets), (11, num_targets)]
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        assert abs(ours - theirs).max() < 1e-4
    assert_same_gradients(adapter.grads, gradients, 1e-4)


@pytest.mark.parametrize(
    "flags",
    [{"train_attn": False}, {"train_mlp": False}, {"train_unembed": False}, {"train_attn": False, "train_mlp": False}],
    ids=["no-attn", "no-mlp", "no-unembed", "unembed-only"],
)
@pytest.mark.parametrize("architecture", ["qwen2", "phi3", "qwen3_moe"])
def test_groups_that_are_not_trained_get_no_adapter(architecture, flags):
    model, plain = open_pair(architecture, tie_word_embeddings=True)
    adapter = make_adapter(model, **flags)
    data = [make_datum("cross_entropy", 8, 0, model.vocab_size)]
    run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), adapter)])
    _, _, gradients = run_reference(reference_of(plain, model, adapter, architecture), data, "cross_entropy")
    groups = {t.group for t in model.targets if t.name in adapter.weights}
    assert groups == {g for g in ("attn", "mlp", "unembed") if flags.get(f"train_{g}", True)}
    assert_same_gradients(adapter.grads, gradients, 1e-4)


def eight_runs(model):
    """Other runs of other ranks and losses, each with its own data."""
    ranks = (1, 2, 3, 4, 8, 16, 5)
    losses = (*LOSSES, "cross_entropy")
    return [
        TrainItem(
            checked([make_datum(loss, 5 + i, 50 + i, model.vocab_size) for _ in range(2)], loss, model.vocab_size),
            make_adapter(model, rank=rank, seed=20 + i),
        )
        for i, (rank, loss) in enumerate(zip(ranks, losses, strict=True))
    ]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo", "gspo"])
def test_gradients_do_not_depend_on_how_data_is_split_or_what_else_runs(architecture, loss_fn):
    model, _ = open_pair(architecture)
    data = [make_datum(loss_fn, 3 + 2 * i, i, model.vocab_size) for i in range(8)]

    def gradient(num_parts, order=1, together=False, crowd=(), budget=64):
        adapter = make_adapter(model)
        size = len(data) // num_parts
        parts = [data[i : i + size] for i in range(0, len(data), size)][::order]
        work = [TrainItem(checked(part, loss_fn, model.vocab_size), adapter) for part in parts]
        if together:
            half = len(crowd) // 2
            run(model, [*crowd[:half], *work, *crowd[half:]], budget)
        else:
            for one in work:
                run(model, [one], budget)
        return adapter.grads

    expected = gradient(1)
    for num_parts in (2, 4, 8):
        for order in (1, -1):
            assert_same_gradients(gradient(num_parts, order), expected, 1e-5)
            assert_same_gradients(gradient(num_parts, order, together=True), expected, 1e-5)
    assert_same_gradients(gradient(2, together=True, crowd=eight_runs(model)), expected, 1e-5)
    assert_same_gradients(gradient(1, budget=9), expected, 1e-5)
    assert_same_gradients(gradient(1, budget=10_000), expected, 1e-5)


def test_every_run_of_a_mixed_batch_gets_what_it_gets_alone():
    model, _ = open_pair("qwen3")
    alone = [(run(model, [work])[0], work.adapter.grads) for work in eight_runs(model)]
    batch = eight_runs(model)
    for result, work, (expected, gradients) in zip(run(model, batch), batch, alone, strict=True):
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
        assert_same_gradients(work.adapter.grads, gradients, 1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "qwen3_moe"])
def test_grouped_products_of_many_adapters_give_the_same(architecture):
    model, _ = open_pair(architecture)
    found = []
    for is_used in (False, True):
        model.grouping.is_used = is_used
        batch = eight_runs(model)
        found.append((run(model, batch, budget=512), batch))
    for ours, theirs, one, other in zip(*found[1], *found[0], strict=True):
        assert ours.metrics == pytest.approx(one.metrics, rel=1e-5, abs=1e-6)
        assert_same_gradients(theirs.adapter.grads, other.adapter.grads, 1e-5)


def test_recomputing_activations_changes_nothing():
    model, _ = open_pair("gemma2")
    data = [make_datum("cross_entropy", 40, 0, model.vocab_size)]
    kept, recomputed = make_adapter(model), make_adapter(model)
    run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), kept)], budget=64)
    # A sequence longer than the budget is recomputed layer by layer.
    run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), recomputed)], budget=16)
    assert_same_gradients(recomputed.grads, kept.grads, 1e-6)


def test_forward_only_scores_and_leaves_no_gradient():
    model, _ = open_pair("llama")
    data = [make_datum("ppo", 9, 0, model.vocab_size)]
    adapter = make_adapter(model)
    (forward,) = run(model, [TrainItem(checked(data, "ppo", model.vocab_size, forward_only=True), adapter)])
    assert adapter.grads is None
    (both,) = run(model, [TrainItem(checked(data, "ppo", model.vocab_size), adapter)])
    assert forward.metrics == pytest.approx(both.metrics, rel=1e-5)
    assert abs(forward.logprobs[0] - both.logprobs[0]).max() < 1e-5


def test_gradients_accumulate_as_sums():
    model, _ = open_pair("llama")
    adapter = make_adapter(model)
    work = TrainItem(
        checked([make_datum("cross_entropy", 9, 0, model.vocab_size)], "cross_entropy", model.vocab_size), adapter
    )
    run(model, [work])
    once = {name: (a.clone(), b.clone()) for name, (a, b) in adapter.grads.items()}
    run(model, [work])
    assert_same_gradients(adapter.grads, {name: (2 * a, 2 * b) for name, (a, b) in once.items()}, 1e-6)


def test_all_zero_weights_give_zero_loss_and_no_gradient():
    model, _ = open_pair("llama")
    adapter = make_adapter(model)
    datum = make_datum("cross_entropy", 9, 0, model.vocab_size)
    datum.loss_fn_inputs["weights"][:] = 0
    (result,) = run(model, [TrainItem(checked([datum], "cross_entropy", model.vocab_size), adapter)])
    assert result.metrics["loss:sum"] == 0
    assert adapter.grads is None


def test_an_overflowing_operation_fails_alone():
    model, _ = open_pair("llama")
    good, bad = make_adapter(model), make_adapter(model, seed=3)
    datum = make_datum("importance_sampling", 9, 0, model.vocab_size)
    broken = make_datum("importance_sampling", 9, 0, model.vocab_size)
    broken.loss_fn_inputs["logprobs"][:] = -1e30
    batch = [
        TrainItem(checked([broken], "importance_sampling", model.vocab_size), bad),
        TrainItem(checked([datum], "importance_sampling", model.vocab_size), good),
    ]
    failure, result = Trainer(model, 64).run(batch)
    assert "not finite" in str(failure)
    assert bad.grads is None
    alone = make_adapter(model)
    (expected,) = run(model, [TrainItem(batch[1].operation, alone)])
    assert result.metrics == expected.metrics
    assert_same_gradients(good.grads, alone.grads, 1e-6)


def test_moe_layers_report_their_balance():
    model, _ = open_pair("qwen3_moe")
    work = TrainItem(
        checked([make_datum("cross_entropy", 30, 0, model.vocab_size)], "cross_entropy", model.vocab_size),
        make_adapter(model),
    )
    (result,) = run(model, [work])
    names = {name for name in result.metrics if name.startswith("e_")}
    assert names == {
        "e_frac_with_tokens:mean",
        "e_frac_oversubscribed:mean",
        "e_max_violation:mean",
        "e_max_violation:max",
        "e_min_violation:mean",
    }
    assert 0 < result.metrics["e_frac_with_tokens:mean"] <= 1
    assert result.metrics["e_min_violation:mean"] <= 0 <= result.metrics["e_max_violation:max"]


def test_every_metric_name_has_exactly_one_colon():
    model, _ = open_pair("qwen3_moe")
    for result in run(model, eight_runs(model)):
        assert all(name.count(":") == 1 for name in result.metrics)


def test_the_full_logits_never_exist():
    model, _ = open_pair("llama", vocab_size=150_000)
    adapter = make_adapter(model)
    data = [make_datum("cross_entropy", 400, 0, model.vocab_size)]
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                largest = max(largest, made.numel())
            return made

    with Watch():
        run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), adapter)], budget=512)
    assert 16 * 150_000 <= largest < 400 * 150_000 / 2


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_a_bfloat16_base_trains_float32_adapters_close_to_float32(architecture):
    data = [make_datum("cross_entropy", n, n, 200) for n in LENGTHS]
    gradients, losses = [], []
    for dtype in (torch.float32, torch.bfloat16):
        register_implementations()
        model = BaseModel(tiny_model(architecture).to(dtype), replace(DEVICE, dtype=dtype))
        adapter = make_adapter(model)
        (result,) = run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), adapter)])
        assert all(f.dtype == torch.float32 for pair in adapter.grads.values() for f in pair)
        gradients.append(torch.cat([f.flatten() for pair in adapter.grads.values() for f in pair]))
        losses.append(result.metrics["loss:sum"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.98


def test_an_uploaded_loss_gives_the_gradients_of_its_formula():
    """-(weights * logprobs).sum(), sent as a graph, is cross entropy."""
    model, plain = open_pair("llama")
    adapter = make_adapter(model)
    data = [make_datum("cross_entropy", n, n, model.vocab_size) for n in (7, 12)]
    names = ("logprobs", "weights")
    graph = {
        "format": 1,
        "nodes": [
            *({"op": "placeholder", "name": n, "target": n, "args": [], "kwargs": {}} for n in names),
            {"op": "call_function", "name": "mul", "target": "operator.mul", "args": [{"ref": n} for n in names]},
            {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "mul"}]},
            {"op": "call_function", "name": "neg", "target": "operator.neg", "args": [{"ref": "sum_1"}]},
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "neg"}, {"dict": {"custom/total:sum": {"ref": "sum_1"}}}]}],
            },
        ],
    }
    trainer = Trainer(model, 64)
    trainer.custom_losses["mine"] = CustomLoss.parse([(n, 1) for n in names], graph)
    operation = checked(data, "custom", model.vocab_size, config={"loss_id": "mine"}, custom=trainer.custom_losses)
    (result,) = trainer.run([TrainItem(operation, adapter)])
    loss, logprobs, gradients = run_reference(reference_of(plain, model, adapter, "llama"), data, "cross_entropy")
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert result.metrics["custom/total:sum"] == pytest.approx(-loss, rel=1e-4)
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        assert abs(ours - theirs).max() < 1e-4
    assert_same_gradients(adapter.grads, gradients, 1e-4)


def test_the_same_batch_gives_the_same_bits():
    model, _ = open_pair("qwen3_moe")
    first, second = eight_runs(model), eight_runs(model)
    run(model, first)
    run(model, second)
    for a, b in zip(first, second, strict=True):
        for name, pair in a.adapter.grads.items():
            assert all(torch.equal(x, y) for x, y in zip(pair, b.adapter.grads[name], strict=True))
