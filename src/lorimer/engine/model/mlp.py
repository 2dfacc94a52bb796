"""Gated MLPs that keep less for their backward pass.

``down(act(gate(x)) * up(x))`` as transformers writes it keeps four tensors of the inner size for each token, which is
the largest part of a pass's memory. Here the activation and the product are computed again, and two are kept. A
model's MLP is changed only when our function gives the same numbers on a probe. On a CPU compiled functions compute the
usual activation (``native/rowwise.py``).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorimer.engine.model.linear import FrozenLinear, backpropagate, multiply_with_adapters, unscale_gradient
from lorimer.engine.native.library import LANES
from lorimer.engine.native.rowwise import functions_for
from lorimer.engine.training.batch import AdapterSlice, PassSlot

Activation = Callable[[Tensor], Tensor]


class GatedForward:
    """Replaces the ``forward`` of an MLP."""

    def __init__(self, mlp: Any, slot: PassSlot) -> None:
        self._forward, self._slot = mlp.forward, slot
        self._gate, self._up, self._down, self._act = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn

    def __call__(self, x: Tensor) -> Tensor:
        current = self._slot.current
        if not (torch.is_grad_enabled() and current.is_trained):
            return self._forward(x)
        return self.multiply(x, current.slices)

    def multiply(self, x: Tensor, slices: list[AdapterSlice]) -> Tensor:
        gate, up = (layer(x).view(-1, layer.out_features) for layer in (self._gate, self._up))
        y: Tensor = _GatedDown.apply(gate, up, self._act, self._down, slices)
        return y.view(*x.shape[:-1], self._down.out_features)


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, act: Activation, down: FrozenLinear, slices: list[AdapterSlice]
    ) -> Tensor:
        functions = functions_for(gate) if is_silu(act) and gate.shape[1] % LANES == 0 else None
        ctx.functions = functions if functions is not None and functions.accepts(gate, up) else None
        product = act(gate).mul_(up) if ctx.functions is None else ctx.functions.gate_apart(gate, up)
        y, ctx.products = multiply_with_adapters(product, down.matrix, down.targets, slices)
        ctx.save_for_backward(gate, up)
        ctx.act, ctx.down = act, down
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        if ctx.functions is not None:
            product = ctx.functions.gate_apart(gate, up)
            d_product = _backpropagate_down(ctx, product, grads[0])
            ctx.functions.gate_gradient(gate, up, d_product, product)
            return d_product, product, None, None, None
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            acted = ctx.act(leaf)
        value = acted.detach()
        product = value * up
        d_product = _backpropagate_down(ctx, product, grads[0])
        d_up = torch.mul(d_product, value, out=product)
        (d_gate,) = torch.autograd.grad(acted, leaf, d_product.mul_(up))
        return d_gate, d_up, None, None, None


def _backpropagate_down(ctx: Any, product: Tensor, d_y: Tensor) -> Tensor:
    d_y = unscale_gradient(d_y, ctx.products)
    d_product: Tensor = ctx.down.matrix.multiply_transposed(d_y)
    backpropagate(product, d_y, ctx.products, d_product)
    ctx.down.matrix.add_gradient(product, d_y)
    return d_product


def is_silu(act: Any) -> bool:
    return act is F.silu or type(act).__name__ in ("SiLU", "SiLUActivation")


def replace_gated_mlps(model: nn.Module, slot: PassSlot) -> int:
    """Replace the forward of every MLP that gives the same numbers; return how many were replaced."""
    replaced = 0
    for mlp in model.modules():
        layers = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if all(isinstance(layer, FrozenLinear) for layer in layers) and hasattr(mlp, "act_fn"):
            ours = GatedForward(mlp, slot)
            if _is_same(mlp, ours):
                mlp.forward = ours
                replaced += 1
    return replaced


def _is_same(mlp: Any, ours: GatedForward) -> bool:
    weight = mlp.gate_proj.weight
    probe = torch.linspace(-2, 3, 4 * weight.shape[1], device=weight.device).view(1, 4, -1).to(weight.dtype)
    with torch.no_grad():
        expected = mlp(probe)
        found = ours.multiply(probe, [])
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return False
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())
