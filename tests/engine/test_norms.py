"""Fused norms against the models' own, and which norms are left alone."""

import pytest
import torch
from torch import nn

from lorimer.engine.model.norms import FrozenRMSNorm, replace_norms
from lorimer.models.debug import ARCHITECTURES, tiny_model

pytestmark = pytest.mark.usefixtures("rows")


def norms_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_norm_of_the_model_is_replaced_and_equals_it(architecture):
    model = tiny_model(architecture).requires_grad_(False)
    originals = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")}
    assert replace_norms(model) == len(originals) > 0
    for name, norm in originals.items():
        ours = model.get_submodule(name)
        assert isinstance(ours, FrozenRMSNorm)
        x = torch.randn(3, 5, len(norm.weight), generator=torch.Generator().manual_seed(0))
        d_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        values, gradients = [], []
        for module in (norm, ours):
            leaf = x.clone().requires_grad_()
            values.append(module(leaf))
            gradients.append(torch.autograd.grad(values[-1], leaf, d_out)[0])
        assert torch.allclose(values[0], values[1], atol=1e-5)
        assert torch.allclose(gradients[0], gradients[1], atol=1e-5)


class StrangeRMSNorm(nn.Module):
    """Named like the others, and different."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight


def test_a_norm_that_differs_is_left_alone():
    model = nn.Sequential(StrangeRMSNorm(), nn.LayerNorm(4))
    assert replace_norms(model) == 0
    assert isinstance(model[0], StrangeRMSNorm)
