"""RMS norms in fewer passes over memory than the models' own, with a frozen weight or, for a full run, a trained one.

On a CPU compiled functions compute them (``native/rowwise.py``).

A model's norm is replaced only when it has the usual shape and our function gives the same numbers on a probe; so a
norm that is different in any way simply stays as it is.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorimer.engine.native.rowwise import Rowwise, functions_for


class FrozenRMSNorm(nn.Module):
    """Computes ``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0, is_trained: bool = False) -> None:
        """With ``is_trained`` keep the parameter itself, under the name that it has in the model."""
        super().__init__()
        if is_trained:
            self.weight, self.offset = weight, offset
        else:
            self.weight, self.offset = weight.detach() + offset if offset else weight.detach(), 0.0
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight
        if torch.is_grad_enabled() and x.requires_grad:
            return _RMSNorm.apply(x, weight, self.eps, self.weight)
        if (functions := _functions_for(x, weight)) is not None:
            return functions.normalise(weight, self.eps, x.contiguous())
        if x.dtype == weight.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return (x.float() * _inverse_rms(x, self.eps)).mul_(weight).to(x.dtype)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _functions_for(x: Tensor, weight: Tensor) -> Rowwise | None:
    functions = functions_for(x)
    return functions if functions is not None and functions.can_normalise(x, weight) else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, trained: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.trained, ctx.functions = eps, trained, _functions_for(x, weight)
        if ctx.functions is not None:
            y: Tensor = ctx.functions.normalise(weight, eps, x.contiguous())
            return y
        return (x.float() * _inverse_rms(x, eps)).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        is_trained = ctx.trained.grad is not None
        if ctx.functions is not None:
            d_y = grads[0].contiguous()
            d_x, d_weight = ctx.functions.normalise_gradient(weight, ctx.eps, x.contiguous(), d_y, is_trained)
        else:
            d_x, d_weight = _gradient(x, weight, ctx.eps, grads[0], is_trained)
        if d_weight is not None:
            ctx.trained.grad += d_weight
        return d_x, None, None, None


def _gradient(x: Tensor, weight: Tensor, eps: float, d_y: Tensor, is_trained: bool) -> tuple[Tensor, Tensor | None]:
    wide, inverse = x.float(), _inverse_rms(x, eps)
    d_weight = (d_y.float() * wide).mul_(inverse).flatten(0, -2).sum(0) if is_trained else None
    d = d_y.float() * weight
    along = (d * wide).sum(-1, keepdim=True).mul_(inverse.pow(3)).div_(-x.shape[-1])
    return d.mul_(inverse).addcmul_(wide, along).to(x.dtype), d_weight


def replace_norms(model: nn.Module, is_trained: bool = False) -> int:
    """Replace norms that ``FrozenRMSNorm`` equals; return how many were replaced."""
    replaced = 0
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            ours = _same_norm(norm, is_trained) if type(norm).__name__.endswith("RMSNorm") else None
            if ours is not None:
                setattr(parent, name, ours)
                replaced += 1
    return replaced


def _same_norm(norm: nn.Module, is_trained: bool) -> FrozenRMSNorm | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return None
    probe = torch.linspace(-2, 3, 4 * len(weight), device=weight.device).view(4, -1).to(weight.dtype)
    with torch.no_grad():
        expected = norm(probe).float()
        # Gemma keeps the weight's distance from one.
        for offset in (0.0, 1.0):
            ours = FrozenRMSNorm(
                weight.float() if offset and not is_trained else weight, float(eps), offset, is_trained
            )
            if torch.allclose(ours(probe).float(), expected, rtol=1e-5 if weight.dtype == torch.float32 else 2e-2):
                return ours
    return None
