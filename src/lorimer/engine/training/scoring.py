"""Log probabilities, losses, metrics and gradients of one operation's datums in a pass.

A token that several datums share has one row of hidden states, scored once for all targets there. Each datum's loss is
evaluated on its own log probabilities; the gradient of a row is the sum over its targets. Results stay on the device
until ``read`` copies those of the whole batch: reading a value makes the host wait. Only custom losses run on the host.

Legend: T tokens of the pass, N rows of an operation, P targets of all its datums, H hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.messages import OperationPart, TrainResult
from lorimer.engine.model.device import download, upload
from lorimer.engine.model.head import Head, Targets
from lorimer.engine.training.batch import AdapterSlice
from lorimer.engine.training.custom_loss import CustomLoss, combine_metrics
from lorimer.engine.training.losses import LOSSES, Loss, MetricSums, active_positions, evaluate
from lorimer.engine.validation import Array, CheckedDatum, CheckedOperation
from lorimer.errors import InvalidInput


class OperationFailed(Exception):
    """One operation of a batch fails; the others are computed without it."""

    def __init__(self, item: int, error: Exception) -> None:
        self.item, self.error = item, error


@dataclass
class Outcome:
    """The results of an operation so far."""

    logprobs: list[Tensor | None]
    """Of each datum, on the device until ``read`` and on the host afterwards."""
    metrics: MetricSums | None = None
    is_finite: list[Tensor] = field(default_factory=list)
    """Whether parts of the loss and its gradient are finite, ``bool ()`` each."""
    custom: list[dict[str, float]] = field(default_factory=list)
    custom_loss: float = 0.0
    num_positions: int = 0
    num_computed: int = 0
    """Tokens computed for it; a token that it shares with other operations counts for the first of them."""

    def add(self, metrics: MetricSums) -> None:
        self.metrics = metrics if self.metrics is None else self.metrics + metrics

    def check(self, *values: Tensor) -> None:
        """Remember whether values of the loss or its gradient are finite, without waiting for them."""
        self.is_finite += [value.isfinite().all() for value in values]

    def part(self) -> OperationPart:
        """Return it as a message to rank 0."""
        metrics = self.metrics
        return OperationPart(
            logprobs={i: value.numpy() for i, value in enumerate(self.logprobs) if value is not None},
            totals=None if metrics is None else {name: float(total) for name, total in metrics.totals.items()},
            num_active=0.0 if metrics is None else float(metrics.num_active),
            custom=self.custom,
            custom_loss=self.custom_loss,
            num_positions=self.num_positions,
            num_computed=self.num_computed,
        )

    def join(self, part: OperationPart) -> None:
        """Add what another rank has computed."""
        for datum, logprobs in part.logprobs.items():
            self.logprobs[datum] = torch.from_numpy(logprobs.copy())
        if part.totals is not None:
            self.add(MetricSums(part.totals, part.num_active))
        self.custom += part.custom
        self.custom_loss += part.custom_loss
        self.num_positions += part.num_positions
        self.num_computed += part.num_computed

    def result(self, balance: dict[str, float]) -> TrainResult:
        """Return the finished operation, with the balance of the experts of its batch."""
        logprobs = [value.numpy() for value in self.logprobs if value is not None]
        assert len(logprobs) == len(self.logprobs), "every datum is scored"
        if self.metrics is not None:
            metrics = self.metrics.finalise()
        else:
            metrics = {"loss:sum": self.custom_loss, "tokens:sum": float(self.num_positions)}
            metrics |= combine_metrics(self.custom)
        computed = {"tokens_computed:sum": float(self.num_computed)}
        return TrainResult(logprobs=logprobs, metrics=metrics | computed | balance)


def read(outcomes: Sequence[Outcome], expert_counts: Sequence[Tensor]) -> list[Tensor]:
    """Copy the results of a batch to the host; return the tokens per expert, which come with them.

    Raise ``OperationFailed`` for the first operation whose loss or gradient is not finite.
    """
    sums = [
        [] if outcome.metrics is None else [outcome.metrics.num_active, *outcome.metrics.totals.values()]
        for outcome in outcomes
    ]
    waiting = [value for outcome in outcomes for value in outcome.logprobs if value is not None]
    waiting += [*expert_counts, *(total for part in sums for total in part if isinstance(total, Tensor))]
    found = map(torch.from_numpy, download(waiting + [flag for outcome in outcomes for flag in outcome.is_finite]))
    for outcome in outcomes:
        outcome.logprobs = [None if value is None else next(found) for value in outcome.logprobs]
    counts = [next(found) for _ in expert_counts]
    for outcome, part in zip(outcomes, sums, strict=True):
        if outcome.metrics is not None:
            num_active, *totals = (float(next(found) if isinstance(total, Tensor) else total) for total in part)
            outcome.metrics = MetricSums(dict(zip(outcome.metrics.totals, totals, strict=True)), num_active)
    for item, outcome in enumerate(outcomes):
        flags = [bool(next(found)) for _ in outcome.is_finite]
        if not all(flags):
            message = "the loss or its gradient is not finite for these inputs (a ratio of probabilities overflows)"
            raise OperationFailed(item, InvalidInput(message))
    return counts


@dataclass(frozen=True)
class Selection:
    """Some rows of a block, with all their targets."""

    rows_N: Tensor
    """Where the rows are on the token axis, each once."""
    targets: Targets
    places_P: Tensor
    """Where each target is in the order of datums."""


class Block:
    """The datums of one operation in a pass: which rows of the token axis they have, and the targets at these."""

    def __init__(
        self,
        item: int,
        operation: CheckedOperation,
        numbers: Sequence[int],
        rows: Sequence[Array],
        owner: AdapterSlice | None,
        device: torch.device,
    ) -> None:
        """``numbers`` are those of the datums, and ``rows`` where the tokens of each are on the axis."""
        self.item, self.operation, self.numbers, self.owner = item, operation, numbers, owner
        self.data = [operation.data[number] for number in numbers]
        self._device = device
        self._sizes = [datum.targets.size for datum in self.data]
        # Several targets at a position are as many targets of one row.
        repeated = [row.repeat(n // len(row)) for row, n in zip(rows, self._sizes, strict=True)]
        row_P = np.concatenate(repeated)
        self._order_P = np.argsort(row_P, kind="stable")
        """From the order of rows to the order of datums."""
        self._row_P = row_P[self._order_P]
        self._ids_P = np.concatenate([datum.targets.reshape(-1) for datum in self.data])[self._order_P]

    @property
    def num_targets(self) -> int:
        return len(self._row_P)

    @property
    def num_positions(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)

    @property
    def is_joint(self) -> bool:
        """Whether the loss can be evaluated for all datums together."""
        loss = LOSSES.get(self.operation.loss_fn)
        return loss is not None and loss.is_token_local and all(datum.targets.ndim == 1 for datum in self.data)

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs of a built-in loss for all targets, in the order of datums."""
        parts = {
            name: np.concatenate([datum.inputs[name].reshape(-1) for datum in self.data])
            for name in self.data[0].inputs
        }
        return dict(zip(parts, upload(list(parts.values()), self._device), strict=True))

    def by_datum(self, values_P: Tensor) -> Iterator[Tensor]:
        """Yield the part of each datum of ``values_P``, shaped as its targets."""
        for datum, part in zip(self.data, values_P.split(self._sizes), strict=True):
            yield part.view(datum.targets.shape)

    def divide(self, is_active_P: Array) -> tuple[Selection | None, Selection | None]:
        """Return the rows that have an active target, and the others; ``None`` for no rows."""
        is_active_P = is_active_P[self._order_P]
        is_active_T = np.zeros(int(self._row_P[-1]) + 1, bool)
        is_active_T[self._row_P[is_active_P]] = True
        is_in_active_row_P = is_active_T[self._row_P]
        return self._select(is_in_active_row_P), self._select(~is_in_active_row_P)

    def _select(self, is_chosen_P: Array) -> Selection | None:
        which = np.flatnonzero(is_chosen_P)
        if not len(which):
            return None
        row_P = self._row_P[which]
        is_first_P = np.diff(row_P, prepend=-1) != 0
        firsts = np.flatnonzero(is_first_P)
        parts = [row_P[firsts], self._ids_P[which], np.cumsum(is_first_P) - 1, self._order_P[which]]
        rows_N, ids_P, own_row_P, places_P = upload(parts, self._device)
        return Selection(rows_N, Targets(ids_P, own_row_P, np.append(firsts, len(which))), places_P)


class Scorer:
    def __init__(self, head: Head) -> None:
        self._head = head
        self.custom_losses: dict[str, CustomLoss] = {}

    def score(
        self, blocks: Iterable[Block], hidden_TH: Tensor, d_hidden_TH: Tensor | None, outcomes: Sequence[Outcome]
    ) -> None:
        """Compute log probabilities, losses and metrics of a pass; add its gradient to ``d_hidden_TH`` if given."""
        custom: list[tuple[Block, Tensor]] = []
        for block in blocks:
            outcome, logprobs_P = outcomes[block.item], torch.empty(block.num_targets, device=hidden_TH.device)
            loss = LOSSES.get(block.operation.loss_fn)
            if loss is None:
                self._score_rows(block, block.divide(np.ones(block.num_targets, bool))[0], hidden_TH, logprobs_P)
                custom.append((block, logprobs_P))
            else:
                self._score_block(block, loss, hidden_TH, d_hidden_TH, logprobs_P, outcome)
            outcome.num_positions += block.num_positions
            for number, logprobs in zip(block.numbers, block.by_datum(logprobs_P), strict=True):
                outcome.logprobs[number] = logprobs
        if custom:
            self._score_custom(custom, hidden_TH, d_hidden_TH, outcomes)

    def _score_block(
        self,
        block: Block,
        loss: Loss,
        hidden_TH: Tensor,
        d_hidden_TH: Tensor | None,
        logprobs_P: Tensor,
        outcome: Outcome,
    ) -> None:
        active, passive = block.divide(_active_targets(block, loss))
        if d_hidden_TH is not None and active is not None and loss.is_token_local:
            self._score_local(block, loss, active, hidden_TH, d_hidden_TH, logprobs_P, outcome)
        else:
            self._score_rows(block, active, hidden_TH, logprobs_P)
        self._score_rows(block, passive, hidden_TH, logprobs_P)
        d_logprobs_P = self._evaluate(block, loss, logprobs_P, outcome)
        if d_hidden_TH is not None and active is not None and not loss.is_token_local:
            self._backpropagate(block, active, d_logprobs_P, hidden_TH, d_hidden_TH)

    def _score_local(
        self,
        block: Block,
        loss: Loss,
        rows: Selection,
        hidden_TH: Tensor,
        d_hidden_TH: Tensor,
        logprobs_P: Tensor,
        outcome: Outcome,
    ) -> None:
        """Make the gradient from the same logits as the log probabilities."""
        inputs = {name: values[rows.places_P] for name, values in block.inputs.items()}

        def gradient(which: slice, chunk: Tensor) -> Tensor:
            part = {name: values[which] for name, values in inputs.items()}
            d_chunk = evaluate(loss, chunk, part, block.operation.config)[1]
            outcome.check(d_chunk)
            return d_chunk

        x_NH = hidden_TH[rows.rows_N]
        logprobs_P[rows.places_P], d_x_NH = self._head.backpropagate(x_NH, rows.targets, block.owner, gradient)
        d_hidden_TH.index_add_(0, rows.rows_N, d_x_NH)

    def _score_rows(self, block: Block, rows: Selection | None, hidden_TH: Tensor, logprobs_P: Tensor) -> None:
        if rows is not None:
            logprobs_P[rows.places_P] = self._head.logprobs(hidden_TH[rows.rows_N], rows.targets, block.owner)

    def _backpropagate(
        self, block: Block, rows: Selection, d_logprobs_P: Tensor, hidden_TH: Tensor, d_hidden_TH: Tensor
    ) -> None:
        """Compute rows that can have a gradient a second time, and backpropagate it."""
        known, x_NH = d_logprobs_P[rows.places_P], hidden_TH[rows.rows_N]
        _, d_x_NH = self._head.backpropagate(x_NH, rows.targets, block.owner, lambda which, _: known[which])
        d_hidden_TH.index_add_(0, rows.rows_N, d_x_NH)

    def _evaluate(self, block: Block, loss: Loss, logprobs_P: Tensor, outcome: Outcome) -> Tensor:
        """Evaluate the loss, of each datum alone where that matters; return the gradient of the log probabilities."""
        parts = [(logprobs_P, block.inputs)]
        if not block.is_joint:
            inputs = {name: list(block.by_datum(values)) for name, values in block.inputs.items()}
            parts = [
                (logprobs, {name: values[i] for name, values in inputs.items()})
                for i, logprobs in enumerate(block.by_datum(logprobs_P))
            ]
        gradients = []
        for logprobs, given in parts:
            total, d_logprobs, metrics = evaluate(loss, logprobs, given, block.operation.config)
            outcome.check(total, d_logprobs)
            outcome.add(metrics)
            gradients.append(d_logprobs.flatten())
        return torch.cat(gradients)

    def _score_custom(
        self,
        blocks: Sequence[tuple[Block, Tensor]],
        hidden_TH: Tensor,
        d_hidden_TH: Tensor | None,
        outcomes: Sequence[Outcome],
    ) -> None:
        """Evaluate custom losses, which run on the host, and backpropagate their gradients."""
        gradients: list[Array] = []
        for (block, _), logprobs_P in zip(blocks, download([logprobs for _, logprobs in blocks]), strict=True):
            outcome, parts = outcomes[block.item], []
            for datum, logprobs in zip(block.data, block.by_datum(torch.from_numpy(logprobs_P)), strict=True):
                try:
                    loss = self.custom_losses[block.operation.loss_id or ""]
                    inputs = {name: torch.from_numpy(values) for name, values in datum.inputs.items()}
                    value, d_logprobs, metrics = loss.evaluate(logprobs, inputs)
                except InvalidInput as error:
                    raise OperationFailed(block.item, error) from None
                outcome.custom.append(metrics)
                outcome.custom_loss += float(value)
                parts.append(d_logprobs.flatten().numpy())
            gradients.append(np.concatenate(parts))
        if d_hidden_TH is not None:
            on_device = upload(gradients, hidden_TH.device)
            for (block, _), known, d_logprobs_P in zip(blocks, gradients, on_device, strict=True):
                rows, _ = block.divide(known != 0)
                if rows is not None:
                    self._backpropagate(block, rows, d_logprobs_P, hidden_TH, d_hidden_TH)


def can_have_gradient(operation: CheckedOperation, datum: CheckedDatum) -> bool:
    """Return whether the loss of a datum may depend on the weights, whatever the log probabilities are."""
    if operation.loss_fn == "custom":
        return True
    return bool(active_positions(LOSSES[operation.loss_fn], datum.inputs, operation.config).any())


def _active_targets(block: Block, loss: Loss) -> Array:
    """Return which targets, in the order of datums, are at a position that can have a gradient."""
    parts = []
    for datum in block.data:
        active = active_positions(loss, datum.inputs, block.operation.config)
        parts.append(active.repeat(datum.targets.size // len(active)))
    return np.concatenate(parts)
