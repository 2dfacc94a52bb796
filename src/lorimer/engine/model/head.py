"""The output head: log probabilities of chosen tokens, and their gradient, without the full logits ever existing.

Rows are taken a chunk at a time. Where the loss at a position depends on that position alone, the gradient is made
from the same chunk of logits; where it needs the whole datum, the chunk is computed a second time. Rows that cannot
have a gradient never come here for one. Sampling asks for whole rows of logits, of which it has few.

Legend: N rows, H hidden size, V vocabulary, K targets at a position.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.linear import Products, backpropagate, multiply_with_adapters
from lorimer.engine.training.batch import AdapterSlice

CHUNK_BYTES = 64 << 20

Gradient = Callable[[slice, Tensor], Tensor]
"""Maps rows and their log probabilities to the gradient of the loss with respect to these."""


class Head:
    def __init__(self, model: BaseModel) -> None:
        self._matrix, self._targets, self._map = model.head, [model.head_target], model.logit_map
        self._device = model.device
        self._chunk_rows = max(16, CHUNK_BYTES // (4 * model.vocab_size))

    def logits(self, x_NH: Tensor, slices: list[AdapterSlice]) -> Tensor:
        """Return float32 logits ``(N, V)`` as the model defines them, on a device that has float64."""
        return self._device.with_float64(self._forward(x_NH, slices)[0])

    def logprobs(self, x_NH: Tensor, targets: Tensor, adapter: AdapterSlice | None) -> Tensor:
        """Return the log probabilities of ``targets``, ``(N,)`` or ``(N, K)``."""
        parts = [
            _choose(self._forward(x_NH[rows], _whole(adapter, rows))[0].log_softmax(-1), targets[rows])
            for rows in self._chunks(len(x_NH))
        ]
        return torch.cat(parts) if parts else targets.new_empty(targets.shape, dtype=torch.float32)

    def backpropagate(
        self, x_NH: Tensor, targets: Tensor, adapter: AdapterSlice | None, gradient: Gradient
    ) -> tuple[Tensor, Tensor]:
        """Return the log probabilities of ``targets`` and the loss's gradient with respect to ``x_NH``.

        ``gradient`` is called once for each chunk of rows; the adapter's gradients are added to its buffers.
        """
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=x_NH.device)
        d_x_NH = torch.empty_like(x_NH)
        for rows in self._chunks(len(x_NH)):
            x = x_NH[rows]
            logits_NV, products = self._forward(x, _whole(adapter, rows))
            all_logprobs_NV = logits_NV.log_softmax(-1)
            logprobs[rows] = _choose(all_logprobs_NV, targets[rows])
            d_logits_NV = _softmax_gradient(all_logprobs_NV, targets[rows], gradient(rows, logprobs[rows]))
            d_raw_NV = self._map.backpropagate_(d_logits_NV, logits_NV).to(x.dtype)
            d_x_NH[rows] = self._matrix.multiply_transposed(d_raw_NV)
            backpropagate(x, d_raw_NV, products, d_x_NH[rows])
        return logprobs, d_x_NH

    def _forward(self, x: Tensor, slices: list[AdapterSlice]) -> tuple[Tensor, Products]:
        raw, products = multiply_with_adapters(x, self._matrix, self._targets, slices)
        return self._map.apply_(raw.float()), products

    def _chunks(self, num_rows: int) -> Iterator[slice]:
        # Equal chunks: a short last one would waste its matrix product.
        num_chunks = -(-num_rows // self._chunk_rows)
        for i in range(num_chunks):
            yield slice(i * num_rows // num_chunks, (i + 1) * num_rows // num_chunks)


def _whole(adapter: AdapterSlice | None, rows: slice) -> list[AdapterSlice]:
    """Return one slice that gives all rows of a chunk to the adapter."""
    if adapter is None:
        return []
    return [AdapterSlice(0, rows.stop - rows.start, adapter.weights, adapter.scale, adapter.grads)]


def _choose(logprobs_NV: Tensor, targets: Tensor) -> Tensor:
    return logprobs_NV.gather(1, targets if targets.dim() == 2 else targets[:, None]).view(targets.shape)


def _softmax_gradient(logprobs_NV: Tensor, targets: Tensor, d_logprobs: Tensor) -> Tensor:
    """Return the gradient with respect to logits, computed in place of ``logprobs_NV``."""
    d_NK, targets_NK = (t if t.dim() == 2 else t[:, None] for t in (d_logprobs, targets))
    d_logits_NV = logprobs_NV.exp_().mul_(-d_NK.sum(1, keepdim=True))
    return d_logits_NV.scatter_add_(1, targets_NK, d_NK)
