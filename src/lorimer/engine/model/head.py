"""The output head: log probabilities of chosen tokens, and their gradient, without the full logits ever existing.

Rows are taken a chunk at a time; a row that sequences share, or that has several targets, is computed once for all of
them. Where the loss at a position depends on that position alone, the gradient is made from the same chunk of logits;
where it needs the whole datum, the chunk is computed a second time. Rows that cannot have a gradient never come here
for one. Sampling asks for whole rows of logits, of which it has few.

Legend: N rows, H hidden size, V vocabulary, P targets of all rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.linear import Products, backpropagate, multiply_with_adapters, unscale_gradient
from lorimer.engine.model.logit_map import LogitMap
from lorimer.engine.native.rowwise import Rowwise, Sums, functions_for
from lorimer.engine.training.batch import AdapterSlice

CHUNK_BYTES = 32 << 20

Gradient = Callable[[slice, Tensor], Tensor]
"""Maps a range of targets and their log probabilities to the gradient of the loss with respect to these."""


@dataclass(frozen=True)
class Targets:
    """Tokens to score, sorted by row; every row has at least one."""

    ids_P: Tensor
    rows_P: Tensor
    """The row of each target."""
    firsts: np.ndarray
    """``(N + 1,)``: the number of each row's first target, and P."""

    def of(self, rows: slice) -> tuple[slice, Tensor, Tensor]:
        """Return the targets of a range of rows: which they are, their rows within the range, and their ids."""
        mine = slice(int(self.firsts[rows.start]), int(self.firsts[rows.stop]))
        return mine, self.rows_P[mine] - rows.start, self.ids_P[mine]


class Head:
    def __init__(self, model: BaseModel) -> None:
        self._matrix, self._targets, self._map = model.head, [model.head_target], model.logit_map
        self._device = model.device
        self._chunk_rows = max(16, CHUNK_BYTES // (4 * model.vocab_size))

    def logits(self, x_NH: Tensor, slices: list[AdapterSlice]) -> Tensor:
        """Return float32 logits ``(N, V)`` as the model defines them, on a device that has float64."""
        raw_NV, _ = self._multiply(x_NH, slices)
        return self._device.with_float64(self._map.apply_(raw_NV.float()))

    def logprobs(self, x_NH: Tensor, targets: Targets, adapter: AdapterSlice | None) -> Tensor:
        """Return the log probabilities ``(P,)`` of the targets."""
        logprobs_P = torch.empty(len(targets.ids_P), dtype=torch.float32, device=x_NH.device)
        for rows in self._chunks(len(x_NH)):
            mine, row, ids = targets.of(rows)
            raw_NV, _ = self._multiply(x_NH[rows], _whole(adapter, rows))
            if (functions := self._functions_for(raw_NV)) is not None:
                logprobs_P[mine] = _chosen(raw_NV, functions.log_sums(raw_NV), row, ids)
            else:
                logprobs_P[mine] = self._map.apply_(raw_NV.float()).log_softmax(-1)[row, ids]
        return logprobs_P

    def backpropagate(
        self, x_NH: Tensor, targets: Targets, adapter: AdapterSlice | None, gradient: Gradient
    ) -> tuple[Tensor, Tensor]:
        """Return the log probabilities ``(P,)`` of the targets and the loss's gradient with respect to ``x_NH``.

        ``gradient`` is called once for each chunk of rows; the adapter's gradients are added to its buffers.
        """
        logprobs_P = torch.empty(len(targets.ids_P), dtype=torch.float32, device=x_NH.device)
        d_x_NH = torch.empty_like(x_NH)
        for rows in self._chunks(len(x_NH)):
            x, (mine, row, ids) = x_NH[rows], targets.of(rows)
            raw_NV, products = self._multiply(x, _whole(adapter, rows))
            if (functions := self._functions_for(raw_NV)) is not None:
                sums, firsts = functions.log_sums(raw_NV), targets.firsts[rows.start : rows.stop + 1]
                logprobs_P[mine] = _chosen(raw_NV, sums, row, ids)
                functions.log_softmax_gradient(raw_NV, sums, firsts, ids, gradient(mine, logprobs_P[mine]))
                d_raw_NV = raw_NV
            else:
                logits_NV = self._map.apply_(raw_NV.float())
                all_logprobs_NV = logits_NV.log_softmax(-1)
                logprobs_P[mine] = all_logprobs_NV[row, ids]
                d_logits_NV = _softmax_gradient(all_logprobs_NV, row, ids, gradient(mine, logprobs_P[mine]))
                d_raw_NV = self._map.backpropagate_(d_logits_NV, logits_NV).to(x.dtype)
            d_raw_NV = unscale_gradient(d_raw_NV, products, is_owned=True)
            with torch.no_grad():
                d_x_NH[rows] = self._matrix.multiply_transposed(d_raw_NV)
            backpropagate(x, d_raw_NV, products, d_x_NH[rows])
            self._matrix.add_gradient(x, d_raw_NV)
        return logprobs_P, d_x_NH

    @torch.no_grad()
    def _multiply(self, x: Tensor, slices: list[AdapterSlice]) -> tuple[Tensor, Products]:
        return multiply_with_adapters(x, self._matrix, self._targets, slices)

    def _functions_for(self, raw: Tensor) -> Rowwise | None:
        """Return the compiled functions for logits, which are those of the product itself."""
        functions = functions_for(raw) if self._map == LogitMap() else None
        return functions if functions is not None and functions.accepts(raw) else None

    def _chunks(self, num_rows: int) -> Iterator[slice]:
        # Equal chunks: a short last one would waste its matrix product.
        num_chunks = -(-num_rows // self._chunk_rows)
        for i in range(num_chunks):
            yield slice(i * num_rows // num_chunks, (i + 1) * num_rows // num_chunks)


def _whole(adapter: AdapterSlice | None, rows: slice) -> list[AdapterSlice]:
    """Return one slice that gives all rows of a chunk to the adapter."""
    if adapter is None:
        return []
    return [replace(adapter, start=0, stop=rows.stop - rows.start)]


def _chosen(logits_NV: Tensor, sums: Sums, row: Tensor, ids: Tensor) -> Tensor:
    """Return the log probabilities of targets."""
    largest_N, logs_N = sums
    return logits_NV[row, ids].float().sub_(largest_N[row]).sub_(logs_N[row])


def _softmax_gradient(logprobs_NV: Tensor, row: Tensor, ids: Tensor, d_logprobs: Tensor) -> Tensor:
    """Return the gradient with respect to logits, computed in place of ``logprobs_NV``."""
    total_N = d_logprobs.new_zeros(len(logprobs_NV)).index_add_(0, row, d_logprobs)
    d_logits_NV = logprobs_NV.exp_().mul_(total_N.neg_()[:, None])
    return d_logits_NV.index_put_((row, ids), d_logprobs, accumulate=True)
