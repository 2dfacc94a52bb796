"""The token budget: how it follows memory, and that its estimate is what real passes take."""

import gc
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lorimer.engine.messages import Datum, ForwardBackward
from lorimer.engine.model.attention import group_sequences
from lorimer.engine.model.memory import (
    MAX_BUDGET,
    MAX_DEVICE_BUDGET,
    MAX_FULL_BUDGET,
    MIN_BUDGET,
    activation_bytes_per_token,
    choose_token_budget,
    count_fitting_tokens,
)
from lorimer.engine.training.batch import AdapterSlice, Pass
from lorimer.engine.training.trainer import Trainer, TrainItem
from lorimer.engine.validation import check_operation
from tests.engine.reference import DEVICE, MOE, make_adapter, on_device, open_pair, relative_error
from tests.memory import resident_peak

WIDE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 8192}


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text", "qwen3_moe"])
def model(request):
    return open_pair(request.param, **WIDE, **({"moe_intermediate_size": 256} if "moe" in request.param else {}))[0]


@pytest.fixture(scope="module")
def small_model():
    return open_pair("qwen3")[0]


def test_budget_grows_with_memory_between_its_bounds(small_model):
    per_token = activation_bytes_per_token(small_model)
    sizes = [0, 10 * per_token, 500.5 * per_token, 1000.5 * per_token, 2000.5 * per_token, 1e6 * per_token]
    fitting = [count_fitting_tokens(small_model, int(size)) for size in sizes]
    assert fitting == [0, 10, 500, 1000, 2000, 1_000_000]
    cpu = replace(DEVICE, handle=torch.device("cpu"))
    budgets = [choose_token_budget(tokens, cpu) for tokens in fitting]
    assert budgets == [MIN_BUDGET, MIN_BUDGET, 500, 1000, 2000, MAX_BUDGET]
    assert choose_token_budget(fitting[-1], replace(DEVICE, handle=torch.device("cuda"))) == MAX_DEVICE_BUDGET
    full = [choose_token_budget(tokens, cpu, is_full=True) for tokens in fitting]
    assert full == [MIN_BUDGET, MIN_BUDGET, 500, *[MAX_FULL_BUDGET] * 3]
    narrow = replace(cpu, dtype=torch.bfloat16)
    assert choose_token_budget(fitting[-1], narrow, is_full=True) == 2 * MAX_FULL_BUDGET


def test_a_pass_is_checkpointed_only_if_its_activations_do_not_fit(small_model, monkeypatch):
    """A sequence longer than the budget keeps its activations where there is memory for them."""
    passes = []
    hidden = small_model.hidden
    monkeypatch.setattr(small_model, "hidden", lambda *args: passes.append(args[2].is_checkpointed) or hidden(*args))
    datum = Datum(tokens=np.arange(40), loss_fn_inputs={"target_tokens": np.arange(40)})
    message = ForwardBackward(request_id="r", model_id="m", data=[datum], loss_fn="cross_entropy")
    operation = check_operation(message, vocab_size=small_model.vocab_size, max_context=512, custom_losses={})
    gradients = []
    for fitting in (0, 39, 40):
        adapter = make_adapter(small_model)
        Trainer(small_model, 16, fitting).run([TrainItem(operation, adapter)])
        gradients.append(adapter.grads)
    assert passes == [True, True, False]
    for name, pair in gradients[0].items():
        assert all(relative_error(a, b) < 1e-5 for a, b in zip(pair, gradients[2][name], strict=True))


def test_a_deeper_model_takes_more_for_each_token(small_model):
    deep, _ = open_pair("qwen3", num_hidden_layers=8)
    assert 3 < activation_bytes_per_token(deep) / activation_bytes_per_token(small_model) < 5


def test_measuring_leaves_nothing_behind(small_model):
    activation_bytes_per_token(small_model)
    assert small_model.slot.current.slices == []
    assert all(p.grad is None for p in small_model.decoder.parameters())


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", *MOE])
def test_measuring_holds_no_weight(architecture):
    """What still refers to a weight would keep all of it in every rank that is to keep a part."""
    measured, _ = open_pair(architecture)
    activation_bytes_per_token(measured)
    weights = [(name, StorageWeakRef(p.untyped_storage())) for name, p in measured.transformer.named_parameters()]
    del measured, _
    gc.collect()
    assert [name for name, weight in weights if not weight.expired()] == []


def test_estimate_is_what_a_longer_pass_keeps(model):
    lengths, rank = [700, 300, 24], 32
    adapter = make_adapter(model, rank)
    frozen = {p.untyped_storage().data_ptr() for p in model.decoder.parameters()}
    kept: dict[int, int] = {}

    def count(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    size = sum(lengths)
    current = Pass(
        [AdapterSlice(0, size, adapter.weights, adapter.scale)], group_sequences(lengths, [0, 700, 1000], DEVICE.handle)
    )
    positions = on_device(torch.cat([torch.arange(n) for n in lengths]))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        hidden = model.hidden(on_device(torch.arange(size) % model.vocab_size), positions, current)
    assert hidden.requires_grad
    # The estimate holds what is kept twice over.
    assert 1 < activation_bytes_per_token(model) * size / sum(kept.values()) < 4


# ── peak memory of the whole process ──────────────────────────────────────────────────────────────────


def run(model, lengths, budget):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, model.vocab_size, n) for n in lengths]
    data = [Datum(tokens=t, loss_fn_inputs={"target_tokens": t}) for t in tokens]
    operation = check_operation(
        ForwardBackward(request_id="r", model_id="m", data=data, loss_fn="cross_entropy"),
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        custom_losses={},
    )
    (result,) = Trainer(model, budget).run([TrainItem(operation, make_adapter(model, rank=32))])
    assert not isinstance(result, Exception), result


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="peak memory can be reset only on Linux")


@linux_only
@pytest.mark.parametrize("lengths", [[1024], [128] * 8], ids=["one", "eight"])
def test_peak_of_a_pass_is_near_the_estimate(model, lengths):
    run(model, [64], 8192)
    with resident_peak() as peak:
        run(model, lengths, 8192)
    assert 0.5 < peak.num_bytes / (sum(lengths) * activation_bytes_per_token(model)) < 1


@linux_only
def test_a_sequence_longer_than_the_budget_takes_less_than_its_share():
    deep, _ = open_pair("qwen3", **WIDE, num_hidden_layers=8)
    run(deep, [64], 8192)
    with resident_peak() as whole:
        run(deep, [1024], 8192)
    with resident_peak() as recomputed:
        run(deep, [1024], 256)
    assert recomputed.num_bytes < 0.5 * whole.num_bytes
