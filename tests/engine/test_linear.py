"""Frozen layers with adapters of several runs against products written out, by compiled functions and by torch."""

import pytest
import torch
from torch import nn

from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.model import grouped
from lorimer.engine.model.grouped import GroupedSlices
from lorimer.engine.model.linear import (
    FrozenLinear,
    Grouping,
    add_products,
    backpropagate,
)
from lorimer.engine.training.batch import AdapterSlice, Pass, PassSlot

IN, OUT = 32, 44
# A fused layer: parts one after the other, the last of a size that grouped products do not have.
TARGETS = [
    LoraTarget("l:q", "l", "attn", IN, 16),
    LoraTarget("l:k", "l", "attn", IN, 8, 16),
    LoraTarget("l:v", "l", "attn", IN, 20, 24),
]


def make_layer(bias=True):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(IN, OUT, bias=bias)
    for parameter in linear.parameters():
        parameter.data.normal_(generator=generator)
    slot = PassSlot()
    return linear, FrozenLinear(linear, TARGETS, slot), slot


def make_slice(start, stop, rank, seed, names=("l:q", "l:k", "l:v")):
    generator = torch.Generator().manual_seed(seed)
    weights = {
        t.name: (torch.randn(rank, IN, generator=generator), torch.randn(t.out_features, rank, generator=generator))
        for t in TARGETS
        if t.name in names
    }
    grads = {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in weights.items()}
    return AdapterSlice(start, stop, weights, 32 / rank, grads)


def reference(linear, x, slices):
    """Output and leaves, with autograd."""
    y = linear(x)
    leaves = []
    for part in slices:
        for target in TARGETS:
            if target.name in part.weights:
                a, b = (f.clone().requires_grad_() for f in part.weights[target.name])
                leaves.append((part, target.name, a, b))
                update = torch.zeros(len(x), OUT)
                update[part.start : part.stop, target.rows] = part.scale * (x[part.start : part.stop] @ a.t() @ b.t())
                y = y + update
    return y, leaves


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("has_input_gradient", [True, False])
@pytest.mark.parametrize("is_grouped", [False, True], ids=["each", "grouped"])
def test_outputs_and_gradients_equal_autograd(has_input_gradient, is_grouped):
    linear, layer, slot = make_layer()
    slices = [make_slice(0, 4, 3, 1), make_slice(4, 9, 8, 2, ("l:k",))]
    x = torch.randn(12, IN, generator=torch.Generator().manual_seed(3))
    d_y = torch.randn(12, OUT, generator=torch.Generator().manual_seed(4))
    ours, theirs = (x.clone().requires_grad_(has_input_gradient) for _ in range(2))
    slot.current = Pass(GroupedSlices(slices, x.device) if is_grouped else slices)
    y = layer(ours.unsqueeze(0))[0]
    expected, leaves = reference(linear, theirs, slices)
    assert torch.allclose(y, expected, atol=1e-4)
    y.backward(d_y)
    expected.backward(d_y)
    if has_input_gradient:
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-3)
    for part, name, a, b in leaves:
        assert torch.allclose(part.grads[name][0], a.grad, atol=1e-3)
        assert torch.allclose(part.grads[name][1], b.grad, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_products_equal_those_of_each_slice(dtype):
    """Rows before, between and after slices, a slice without pairs, ranks that are no multiple of eight."""
    x = torch.randn(40, IN, generator=torch.Generator().manual_seed(3)).to(dtype)
    d_y = torch.randn(40, OUT, generator=torch.Generator().manual_seed(4)).to(dtype)
    found = []
    for arrange in (list, lambda slices: GroupedSlices(slices, x.device)):
        slices = [make_slice(3, 9, 5, 1), make_slice(9, 20, 8, 2, ("l:k",)), make_slice(24, 25, 2, 5, ())]
        slices += [make_slice(25, 31, 17, 3)]
        y, d_x = torch.zeros(40, OUT, dtype=dtype), torch.zeros_like(x)
        products = add_products(x, y, TARGETS, arrange(slices))
        backpropagate(x, d_y, products, d_x)
        found.append([y, d_x, *(g for part in slices for pair in part.grads.values() for g in pair)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(*found, strict=True):
        assert theirs.abs().max() > 0
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_grouping_is_for_several_adapters_on_a_device_where_it_was_chosen():
    grouping, slices = (
        Grouping(torch.device("cpu"), torch.float32, IN),
        [make_slice(0, 4, 3, 1), make_slice(4, 9, 8, 2)],
    )
    assert not grouping.is_used
    assert grouping.arrange(slices) is slices
    grouping.is_used = True
    assert isinstance(grouping.arrange(slices), GroupedSlices)
    assert grouping.arrange(slices[:1]) == slices[:1]
    assert not isinstance(grouping.arrange(slices[:1]), GroupedSlices)


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_grouped_products_that_differ_are_not_chosen(monkeypatch, error):
    """The choice compares gradients before it measures, here with a clock that always says that grouped is faster."""
    monkeypatch.setattr("lorimer.engine.model.grouped._seconds", lambda run, *_: 1.0 if run is grouped._run else 2.0)
    multiply = grouped.multiply

    def inexact(x, y, target, slices):
        return multiply(x, y, target, slices) * (1 + error)

    monkeypatch.setattr("lorimer.engine.model.grouped.multiply", inexact)

    def alone(x, target, slices):
        y = torch.zeros_like(x)
        backpropagate(x, y, add_products(x, y, [target], slices), torch.zeros_like(x))

    is_better, reason = grouped.compare(torch.device("cpu"), torch.float32, 16, alone)
    assert is_better == (error == 0)
    assert reason == (
        "grouped ones differ by 1.0e-01 of the largest value" if error else "grouped ones are 2.0 times as fast"
    )


def test_the_base_weight_never_gets_a_gradient():
    linear, layer, slot = make_layer()
    slot.current = Pass([make_slice(0, 3, 2, 1)])
    layer(torch.randn(3, IN)).sum().backward()
    assert linear.weight.grad is None
    assert linear.bias.grad is None


def test_without_adapters_the_layer_is_the_base():
    linear, layer, _ = make_layer(bias=False)
    x = torch.randn(2, 5, IN)
    assert torch.allclose(layer(x), linear(x), atol=1e-5)
