"""Muon's update of matrices: the momentum of the gradient, orthogonalised by a Newton-Schulz iteration.

torch's own function iterates in bfloat16, which a CPU without bfloat16 units emulates many times slower than it
multiplies in float32. There the same iteration multiplies in float32 and rounds where torch rounds. Products of two
bfloat16 numbers are exact in float32, and torch sums them in float32, so numbers differ only where the order of a sum
decides how it is rounded. `optimizers.py` chooses the matrices.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, muon


def update(
    matrices: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    fields: Mapping[str, Any],
    product_dtype: torch.dtype,
) -> None:
    """Change matrices and momentum buffers in place; ``product_dtype`` is what bfloat16 numbers are multiplied in."""
    lr, momentum, coefficients = fields["learning_rate"], fields["momentum"], tuple(fields["ns_coefficients"])
    if product_dtype is torch.bfloat16:
        muon(
            matrices,
            grads,
            buffers,
            lr=lr,
            weight_decay=fields["weight_decay"],
            momentum=momentum,
            nesterov=fields["nesterov"],
            ns_coefficients=coefficients,
            ns_steps=int(fields["ns_steps"]),
            eps=fields["eps"],
            adjust_lr_fn=fields["adjust_lr_fn"],
            has_complex=False,
        )
        return
    for matrix, grad, buffer in zip(matrices, grads, buffers, strict=True):
        buffer.lerp_(grad, 1 - momentum)
        direction = grad.lerp(buffer, momentum) if fields["nesterov"] else buffer
        direction = orthogonalize(direction, coefficients, int(fields["ns_steps"]), fields["eps"])
        matrix.mul_(1 - lr * fields["weight_decay"])
        matrix.add_(direction, alpha=-_adjust_lr(lr, fields["adjust_lr_fn"], matrix.shape))


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the bfloat16 numbers, as float32, that torch's iteration in bfloat16 gives but for the order of sums."""
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    narrow = matrix.bfloat16()
    narrow = narrow.T if is_tall else narrow  # the products of the shorter side are smaller
    x = narrow.div_(narrow.norm().clamp(min=eps)).float()
    for _ in range(steps):
        gram = _round(x @ x.T)
        x = _round(torch.addmm(x, _round(torch.addmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    return x.T if is_tall else x


def _round(tensor: Tensor) -> Tensor:
    """Round float32 to bfloat16 numbers in place."""
    return tensor.copy_(tensor.bfloat16())
