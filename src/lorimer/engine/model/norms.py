"""RMS norms in fewer passes over memory than the models' own, with a frozen weight or, for a full run, a trained one.

A model's norm is replaced only when it has the usual shape and our function gives the same numbers on a probe; so a
norm that is different in any way simply stays as it is.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        if x.dtype == weight.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return (x.float() * _inverse_rms(x, self.eps)).mul_(weight).to(x.dtype)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, trained: Tensor) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.trained = trained
        return (x.float() * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        wide = x.float()
        if ctx.trained.grad is not None:
            ctx.trained.grad += (grads[0].float() * wide).mul_(inverse).flatten(0, -2).sum(0)
        d = grads[0].float() * weight
        along = (d * wide).sum(-1, keepdim=True).mul_(inverse.pow(3)).div_(-x.shape[-1])
        return d.mul_(inverse).addcmul_(wide, along).to(x.dtype), None, None, None


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
