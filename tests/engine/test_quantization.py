"""Weights in 8 and 4 bits against the definitions of their formats, written out in numpy, and against bitsandbytes."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

from lorimer.engine.model import quantization
from lorimer.engine.model.quantization import BLOCK, FORMATS, NF4, QuantizedWeight, stored_bytes
from tests.engine.quantized import rounded
from tests.engine.reference import on_device

SHAPES = [(5, 2 * BLOCK), (7, BLOCK + 6), (3, 10), (1, 1)]


def normal(*shape, seed=0):
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def difficult(rows, columns):
    """Rows of very different sizes, one of zeros, and a tiny number that no scale can represent."""
    weight = normal(rows, columns) * torch.logspace(-3, 3, rows)[:, None]
    weight[rows // 2] = 0
    weight[-1, -1] = 1e-45
    return weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_weight_is_the_nearest_level_times_its_scale(kind, shape):
    weight = difficult(*shape)
    found = QuantizedWeight(on_device(weight), kind, torch.float32)
    expected = rounded(weight.numpy(), kind)
    assert np.abs(found.dense().cpu().numpy() - expected).max() <= 1e-6 * np.abs(weight.numpy()).max()
    assert found.is_finite
    assert (found.num_weights, found.num_bytes) == (weight.numel(), stored_bytes(kind, *shape))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_weight_that_is_in_the_format_already_does_not_change(kind):
    once = QuantizedWeight(normal(6, 3 * BLOCK), kind, torch.float32).dense()
    again = QuantizedWeight(once, kind, torch.float32).dense()
    assert (again - once).abs().max() <= 1e-6


def test_the_code_book_of_nf4_is_that_of_its_definition():
    """QLoRA: quantiles of the normal distribution, eight below zero and nine from it on, with both ends at one."""
    quantile, end = NormalDist().inv_cdf, 0.9677083
    positive = [quantile(p) for p in np.linspace(end, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(end, 0.5, 8)[:-1]]
    levels = np.sort([*positive, 0.0, *negative]) / max(positive)
    assert np.abs(levels - np.array(NF4)).max() < 2e-7


def test_nf4_has_the_bytes_and_values_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = normal(96, 4 * BLOCK)
    codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    ours = QuantizedWeight(weight, "nf4", torch.float32)
    assert torch.equal(ours.codes.flatten(), codes.flatten())
    assert torch.equal(ours.scales.flatten(), state.absmax)
    assert torch.equal(ours.dense(), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_those_of_the_dense_weight(kind, num_chunks, monkeypatch):
    weight = on_device(normal(40, BLOCK + 6))
    found = QuantizedWeight(weight, kind, torch.float32)
    monkeypatch.setattr(quantization, "_CHUNK", {})
    monkeypatch.setattr(quantization, "_DEVICE_CHUNK", weight.numel() // num_chunks)
    assert len(list(found._chunks())) == num_chunks
    x, d_y = on_device(normal(9, weight.shape[1], seed=1)), on_device(normal(9, 40, seed=2))
    dense = found.dense().double()
    for ours, exact in (
        (found.multiply(x), x.double() @ dense.t()),
        (found.multiply_transposed(d_y), d_y.double() @ dense),
    ):
        assert ours.dtype == torch.float32
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()
    wide, narrow = found.multiply(x), QuantizedWeight(weight, kind, torch.bfloat16).multiply(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert (narrow - wide).abs().max() <= 0.02 * wide.abs().max()


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_experts_are_quantised_each_by_itself(kind, is_transposed):
    weight = on_device(normal(3, 20, BLOCK + 6))
    stored = weight.transpose(1, 2) if is_transposed else weight
    found = QuantizedWeight(stored, kind, torch.float32, is_transposed)
    assert (found.shape, found.stored_shape, found.dense().shape) == (weight.shape, stored.shape, stored.shape)
    for expert, own in enumerate(weight):
        alone = QuantizedWeight(own, kind, torch.float32).dense()
        assert torch.equal(found[expert], alone)
        assert torch.equal(found.dense()[expert], alone.t() if is_transposed else alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_that_are_not_finite_are_noticed(kind, value):
    weight = normal(4, 2 * BLOCK)
    weight[2, BLOCK + 3] = value
    assert not QuantizedWeight(weight, kind, torch.float32).is_finite
