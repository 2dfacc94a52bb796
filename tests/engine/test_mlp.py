"""Gated MLPs that compute their product again: the same values and gradients, fewer tensors kept."""

import pytest
import torch
from torch import nn

from lorimer.engine.model.mlp import GatedForward, replace_gated_mlps
from lorimer.engine.training.batch import AdapterSlice, Pass
from tests.engine.reference import make_adapter, on_device, open_pair

pytestmark = pytest.mark.usefixtures("rows")


def mlp_of(model):
    return next(m for m in model.decoder.modules() if isinstance(m.__dict__.get("forward"), GatedForward))


def run(model, mlp, forward):
    """Output, gradient of the input, gradients of the adapters, and how many bytes were kept for them."""
    adapter = make_adapter(model, rank=4)
    grads = {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in adapter.weights.items()}
    generator = torch.Generator().manual_seed(0)
    x = on_device(torch.randn(1, 12, mlp.gate_proj.in_features, generator=generator)).requires_grad_()
    d_y = on_device(torch.randn(1, 12, mlp.down_proj.out_features, generator=generator))
    kept = {}

    def count(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.slot.current = Pass([AdapterSlice(0, 12, adapter.weights, adapter.scale, grads)])
    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            y = forward(x)
        (d_x,) = torch.autograd.grad(y, x, d_y)
    finally:
        model.slot.current = Pass([])
    return [y.detach(), d_x, *(g for pair in grads.values() for g in pair)], sum(kept.values())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "olmo2"])
def test_values_and_gradients_are_those_of_the_models_own(architecture):
    model, _ = open_pair(architecture)
    mlp = mlp_of(model)
    (ours, kept), (theirs, kept_by_theirs) = (run(model, mlp, f) for f in (mlp.forward, mlp.forward._forward))
    assert any(g.abs().max() > 0 for g in ours[2:])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)
    assert kept < 0.75 * kept_by_theirs


def test_an_mlp_that_differs_is_left_alone():
    model, _ = open_pair("llama")
    mlp = mlp_of(model)
    del mlp.forward
    strange = nn.Module()
    for name in ("gate_proj", "up_proj", "down_proj", "act_fn"):
        setattr(strange, name, getattr(mlp, name))
    strange.forward = lambda x: 2 * type(mlp).forward(mlp, x)
    assert replace_gated_mlps(strange, model.slot) == 0
    assert replace_gated_mlps(mlp, model.slot) == 1
