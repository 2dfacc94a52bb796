"""The token embedding of a full run, whose gradient goes to the rows that a pass has used.

torch's own backward makes a second tensor of the size of the embedding for each pass, which for a small model is the
largest of all. Where the model's embedding is anything but rows times a factor, it stays as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def replace_embedding(embedding: nn.Module) -> bool:
    """Replace the forward of the embedding; return whether its gradient no longer needs autograd.

    In either case its output has a gradient, so that autograd records the first layer.
    """
    first = next(embedding.parameters())
    scale, probe = getattr(embedding, "embed_scale", 1.0), torch.arange(3, device=first.device)
    if isinstance(scale, Tensor):
        scale = scale.to(first.dtype)
    with torch.no_grad():
        is_same = isinstance(embedding, nn.Embedding) and torch.equal(
            embedding(probe), F.embedding(probe, embedding.weight) * scale
        )
    own: Callable[[Tensor], Tensor] = embedding.forward
    anchor = torch.empty(0, device=probe.device, requires_grad=True)

    def forward(tokens: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return own(tokens)
        if is_same:
            rows: Tensor = _Rows.apply(tokens, anchor, embedding)
            return rows * scale
        rows = own(tokens)
        return rows if rows.requires_grad else rows.requires_grad_()

    embedding.forward = forward
    return is_same


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, anchor: Tensor, embedding: nn.Embedding) -> Tensor:
        # The weight itself: ranks that share it have only a part in its place when the backward pass comes.
        ctx.tokens, ctx.weight, ctx.padding_idx = tokens, embedding.weight, embedding.padding_idx
        return F.embedding(tokens, embedding.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        buffer = ctx.weight.grad
        if buffer is not None:
            tokens, d_rows = ctx.tokens.flatten(), grads[0].reshape(-1, buffer.shape[1])
            if ctx.padding_idx is not None:  # torch gives this row no gradient
                is_token = tokens != ctx.padding_idx
                tokens, d_rows = tokens[is_token], d_rows[is_token]
            # Unlike index_add_, this adds in a fixed order on CUDA too, so that a replay gives the same bits.
            buffer.index_put_((tokens,), d_rows.to(buffer.dtype), accumulate=True)
        return None, None, None
