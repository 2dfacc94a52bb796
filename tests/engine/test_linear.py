"""Frozen layers with adapters of several runs against products written out, in both layouts of the weight."""

import pytest
import torch
from torch import nn

from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.model.linear import ANY_ROWS, FEW_ROWS, FrozenLinear, FrozenMatrix, fastest_packed_rows
from lorimer.engine.training.batch import AdapterSlice, Pass, PassSlot

IN, OUT = 24, 36
# A fused layer: two parts, one after the other.
TARGETS = [LoraTarget("l:q", "l", "attn", IN, 20), LoraTarget("l:k", "l", "attn", IN, 16, 20)]


def make_layer(max_packed_rows=0, bias=True):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(IN, OUT, bias=bias)
    for parameter in linear.parameters():
        parameter.data.normal_(generator=generator)
    slot = PassSlot()
    return linear, FrozenLinear(linear, TARGETS, slot, max_packed_rows), slot


def make_slice(start, stop, rank, seed, names=("l:q", "l:k")):
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


@pytest.mark.parametrize("max_packed_rows", [0, ANY_ROWS], ids=["plain", "packed"])
@pytest.mark.parametrize("has_input_gradient", [True, False])
def test_outputs_and_gradients_equal_autograd(max_packed_rows, has_input_gradient):
    linear, layer, slot = make_layer(max_packed_rows)
    slices = [make_slice(0, 4, 3, 1), make_slice(4, 9, 8, 2, ("l:k",))]
    x = torch.randn(12, IN, generator=torch.Generator().manual_seed(3))
    d_y = torch.randn(12, OUT, generator=torch.Generator().manual_seed(4))
    ours, theirs = (x.clone().requires_grad_(has_input_gradient) for _ in range(2))
    slot.current = Pass(slices)
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


def test_the_layout_is_chosen_by_rows():
    weight = torch.randn(OUT, IN)
    matrix = FrozenMatrix(weight, None, 4)
    for rows in (1, 4, 5, 50):
        x = torch.randn(rows, IN)
        assert torch.allclose(matrix.multiply(x), x @ weight.t(), atol=1e-4)
    assert fastest_packed_rows(weight) in (0, FEW_ROWS, ANY_ROWS)
    assert fastest_packed_rows(weight.to("meta")) == 0
