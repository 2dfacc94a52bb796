"""Forward and backward passes over the datums of many operations, runs, ranks and losses together.

Sequences are laid on one token axis, cut by a token budget, run through the base with every run's adapter on its own
tokens, and scored. Gradients are added to the runs only when the whole batch has succeeded, so a failure changes no
run. Optimiser steps are in ``optim.py``; the scheduler chooses what makes a batch.

Where several ranks share the base, each gets the whole batch, plans it like the others and computes the sequences that
are dealt to it. Gradients are summed over the ranks; rank 0 collects the results.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from lorimer.engine.adapters.adapters import Adapter, Pairs, flatten
from lorimer.engine.messages import BatchPart, OperationPart, TrainResult, decode_part, encode
from lorimer.engine.model.attention import group_sequences
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.experts import balance_metrics
from lorimer.engine.model.head import Head
from lorimer.engine.model.vision import Placement, SequenceImages
from lorimer.engine.sharding import GroupFailed
from lorimer.engine.training.batch import AdapterSlice, Pass, cut_by_budget, deal
from lorimer.engine.training.custom_loss import CustomLoss, combine_metrics
from lorimer.engine.training.losses import LOSSES, MetricSums, active_positions, evaluate
from lorimer.engine.validation import CheckedOperation
from lorimer.errors import EngineError, InvalidInput


@dataclass(frozen=True)
class TrainItem:
    """A validated operation and the run it belongs to."""

    operation: CheckedOperation
    adapter: Adapter
    images: Sequence[SequenceImages | None] = ()
    """The images of each datum; empty if no datum has any."""


@dataclass
class _Outcome:
    """The results of an operation so far."""

    logprobs: list[Tensor | None]
    metrics: MetricSums | None = None
    custom: list[dict[str, float]] = field(default_factory=list)
    custom_loss: float = 0.0
    num_positions: int = 0

    def add(self, metrics: MetricSums) -> None:
        self.metrics = metrics if self.metrics is None else self.metrics + metrics

    def part(self) -> OperationPart:
        """Return it as a message to rank 0."""
        metrics = self.metrics
        return OperationPart(
            logprobs={i: value.cpu().numpy() for i, value in enumerate(self.logprobs) if value is not None},
            totals=None if metrics is None else {name: float(total) for name, total in metrics.totals.items()},
            num_active=0.0 if metrics is None else float(metrics.num_active),
            custom=self.custom,
            custom_loss=self.custom_loss,
            num_positions=self.num_positions,
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


@dataclass(frozen=True)
class _Sequence:
    """One datum as a sequence of a pass; ``item`` and ``datum`` are its indices in the batch."""

    item: int
    datum: int
    tokens: Tensor
    targets: Tensor
    inputs: Mapping[str, Tensor]
    is_trained: bool
    images: SequenceImages | None


class _OperationFailed(Exception):
    """One operation of a batch fails; the others are computed without it."""

    def __init__(self, item: int, error: Exception) -> None:
        self.item, self.error = item, error


class _BatchFailed(Exception):
    """All ranks have agreed that the batch fails by an error that belongs to no operation."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Trainer:
    def __init__(self, model: BaseModel, token_budget: int) -> None:
        self.model = model
        self.token_budget = token_budget
        self.custom_losses: dict[str, CustomLoss] = {}
        self.num_tokens = 0
        self._head = Head(model)

    def run(
        self, batch: list[TrainItem], between_passes: Callable[[], None] | None = None
    ) -> list[TrainResult | Exception]:
        """Return results in the order of ``batch``; an operation that fails does so alone and changes nothing.

        ``between_passes`` may use the model, but not the runs of the batch.
        """
        try:
            return self._run_together(batch, between_passes)
        except _OperationFailed as failure:
            results = self.run(batch[: failure.item] + batch[failure.item + 1 :], between_passes)
            return [*results[: failure.item], failure.error, *results[failure.item :]]
        except Exception as error:
            if isinstance(error, _BatchFailed):
                error = error.error
            elif not self.model.shards.is_alone:
                raise GroupFailed(f"rank {self.model.shards.rank} failed by itself") from error
            # The cause is unknown, so compute each operation alone.
            return [self.run([item], between_passes)[0] for item in batch] if len(batch) > 1 else [error]

    def _run_together(
        self, batch: list[TrainItem], between_passes: Callable[[], None] | None
    ) -> list[TrainResult | Exception]:
        sequences = [s for i, item in enumerate(batch) for s in self._sequences(i, item)]
        outcomes = [_Outcome([None] * len(item.operation.data)) for item in batch]
        gradients = _buffers(batch[s.item].adapter for s in sequences if s.is_trained)
        expert_counts: list[Tensor] = []
        for number, (is_trained, part) in enumerate(self._passes(batch, sequences)):
            if number and between_passes is not None:
                between_passes()
            if part:
                counts = self._pass(batch, part, is_trained, outcomes, gradients)
                expert_counts = _add(expert_counts, counts)
            else:
                self._attend_pass(batch[0].adapter, is_trained)
        self.model.shards.sum_([tensor for pairs in gradients.values() for tensor in flatten(pairs)])
        self.num_tokens += sum(len(s.tokens) for s in sequences)
        for adapter in {id(item.adapter): item.adapter for item in batch}.values():
            if id(adapter) in gradients:
                adapter.add_gradient(gradients[id(adapter)])
        if not self.model.shards.is_alone:
            expert_counts = self._collect(outcomes, expert_counts)
            if self.model.shards.rank:
                return [EngineError("rank 0 has the result")] * len(batch)
        balance = balance_metrics(expert_counts)
        return [_result(outcome, balance) for outcome in outcomes]

    def _passes(self, batch: list[TrainItem], sequences: list[_Sequence]) -> Iterator[tuple[bool, list[_Sequence]]]:
        """Yield for each pass whether it is trained, and the sequences that this rank computes in it.

        They are sorted by run, so that each adapter owns one slice of the token axis. Ranks gather the weights
        together, so all have the same number of passes: one with fewer sequences has some without any.
        """
        # Runs in the order they come in the batch, so that the same batch always gives the same bits.
        order = {id(item.adapter): i for i, item in reversed(list(enumerate(batch)))}
        for is_trained in (False, True):
            part = [s for s in sequences if s.is_trained == is_trained]
            part.sort(key=lambda s: (order[id(batch[s.item].adapter)], s.item, s.datum))
            cuts = [
                [
                    [hand[i] for i in indices]
                    for indices in cut_by_budget([len(s.tokens) for s in hand], self.token_budget)
                ]
                for hand in self._hands(part)
            ]
            own = cuts[self.model.shards.rank]
            for number in range(max(map(len, cuts))):
                yield is_trained, own[number] if number < len(own) else []

    def _hands(self, part: list[_Sequence]) -> list[list[_Sequence]]:
        """Return the sequences of each rank: those of every operation are divided between all ranks."""
        shards = self.model.shards
        if shards.is_alone:
            return [part]
        loads = [0] * shards.size
        hands: list[list[_Sequence]] = [[] for _ in loads]
        for _, members in groupby(part, key=lambda s: s.item):
            own = list(members)
            for hand, indices in zip(hands, deal([len(s.tokens) for s in own], loads), strict=True):
                hand += [own[i] for i in sorted(indices)]
        return hands

    def _attend_pass(self, adapter: Adapter, is_trained: bool) -> None:
        """Take part in a pass in which this rank has no sequence: one token without loss, gradient or result."""
        device = self.model.device.handle
        current = Pass(
            # Without an adapter autograd would not record the layers, and the backward pass not gather them.
            slices=[AdapterSlice(0, 1, adapter.weights, adapter.scale)],
            groups=group_sequences([1], [0], device),
        )
        token = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.set_grad_enabled(is_trained):
            hidden_TH = self.model.hidden(token, torch.zeros_like(token), current)
        with self.model.gathered_head():
            pass
        self._agree(None)
        self._finish_pass(hidden_TH, torch.zeros_like(hidden_TH) if is_trained else None)

    def _agree(self, failure: Exception | None) -> None:
        """Raise, at every rank, what one of them has met while it scored its sequences."""
        shards = self.model.shards
        verdict = None
        if isinstance(failure, _OperationFailed):
            verdict = shards.report(failure.error, failure.item)
        elif failure is not None:
            verdict = shards.report(failure)
        (agreed,) = shards.agree([verdict])
        if agreed is not None:
            self.model.end_pass()
            error = agreed.exception()
            raise _BatchFailed(error) if agreed.item is None else _OperationFailed(agreed.item, error)

    def _finish_pass(self, hidden_TH: Tensor, d_hidden_TH: Tensor | None) -> None:
        if d_hidden_TH is None:
            self.model.end_pass()
        else:
            with self.model.shards.together():
                torch.autograd.backward([hidden_TH], [d_hidden_TH])

    def _collect(self, outcomes: list[_Outcome], expert_counts: list[Tensor]) -> list[Tensor]:
        """Add what the other ranks have computed to the outcomes of rank 0; return the tokens per expert of all."""
        counts = torch.stack(expert_counts).cpu().numpy() if expert_counts else None
        own = BatchPart(operations=[outcome.part() for outcome in outcomes], expert_counts=counts)
        for data in self.model.shards.gather(encode(own))[1:]:
            part = decode_part(data)
            assert isinstance(part, BatchPart)
            for outcome, one in zip(outcomes, part.operations, strict=True):
                outcome.join(one)
            if part.expert_counts is not None:
                counts_LE = torch.from_numpy(part.expert_counts.copy())
                expert_counts = _add([count.cpu() for count in expert_counts], list(counts_LE))
        return expert_counts

    def _sequences(self, index: int, item: TrainItem) -> list[_Sequence]:
        operation, device = item.operation, self.model.device.handle
        sequences = []
        for number, datum in enumerate(operation.data):
            inputs = {name: torch.from_numpy(value).to(device) for name, value in datum.inputs.items()}
            tokens, targets = (torch.from_numpy(value).to(device) for value in (datum.tokens, datum.targets))
            is_trained = not operation.forward_only and self._can_have_gradient(operation, inputs)
            images = item.images[number] if item.images else None
            sequences.append(_Sequence(index, number, tokens, targets, inputs, is_trained, images))
        return sequences

    def _can_have_gradient(self, operation: CheckedOperation, inputs: Mapping[str, Tensor]) -> bool:
        if operation.loss_fn == "custom":
            return True
        return bool(active_positions(LOSSES[operation.loss_fn], inputs, operation.config).any())

    def _pass(
        self,
        batch: list[TrainItem],
        sequences: list[_Sequence],
        is_trained: bool,
        outcomes: list[_Outcome],
        gradients: dict[int, Pairs],
    ) -> list[Tensor]:
        """Compute one packed pass; return the tokens per expert of each MoE layer."""
        lengths = [len(s.tokens) for s in sequences]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        adapters = [batch[s.item].adapter for s in sequences]
        current = Pass(
            slices=_slices(adapters, starts, lengths, gradients if is_trained else None),
            groups=group_sequences(lengths, starts, self.model.device.handle),
            is_checkpointed=is_trained and sum(lengths) > self.token_budget,
            count_experts=True,
        )
        tokens = torch.cat([s.tokens for s in sequences])
        positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths])
        placements = [
            Placement(s.images, start, 0, len(s.tokens))
            for s, start in zip(sequences, starts, strict=True)
            if s.images is not None
        ]
        with torch.set_grad_enabled(is_trained):
            hidden_TH = self.model.hidden(tokens, positions, current, placements)
        d_hidden_TH = torch.zeros_like(hidden_TH) if is_trained else None
        failure: Exception | None = None
        with self.model.gathered_head():
            try:
                for block, rows in _blocks(sequences, starts, batch):
                    owner = next(s for s in current.slices if s.start <= rows.start < s.stop)
                    item = batch[block[0].item]
                    d_rows = None if d_hidden_TH is None else d_hidden_TH[rows]
                    self._score(item, block, hidden_TH[rows].detach(), d_rows, owner, outcomes[block[0].item])
            except Exception as error:
                if self.model.shards.is_alone:
                    raise
                failure = error
        self._agree(failure)
        self._finish_pass(hidden_TH, d_hidden_TH)
        return list(current.expert_counts.values())

    def _score(
        self,
        item: TrainItem,
        block: list[_Sequence],
        x_NH: Tensor,
        d_x_NH: Tensor | None,
        owner: AdapterSlice,
        outcome: _Outcome,
    ) -> None:
        """Compute log probabilities, loss and metrics of a block, and its gradient if ``d_x_NH`` is given."""
        targets = torch.cat([s.targets for s in block])
        inputs = {name: torch.cat([s.inputs[name] for s in block]) for name in block[0].inputs}
        operation = item.operation
        loss = LOSSES.get(operation.loss_fn)
        if d_x_NH is not None and loss is not None and loss.is_token_local:
            logprobs = torch.empty(targets.shape, device=x_NH.device)
            is_active = active_positions(loss, inputs, operation.config)
            active, passive = is_active.nonzero()[:, 0], (~is_active).nonzero()[:, 0]
            active_inputs = {name: value[active] for name, value in inputs.items()}

            def gradient(rows: slice, chunk: Tensor) -> Tensor:
                part = {name: value[rows] for name, value in active_inputs.items()}
                return _finite(evaluate(loss, chunk, part, operation.config)[1], block[0].item)

            logprobs[passive] = self._head.logprobs(x_NH[passive], targets[passive], owner)
            logprobs[active], d_x_NH[active] = self._head.backpropagate(x_NH[active], targets[active], owner, gradient)
            total, _, metrics = evaluate(loss, logprobs, inputs, operation.config)
            _finite(total, block[0].item)
            outcome.add(metrics)
        else:
            logprobs = self._head.logprobs(x_NH, targets, owner)
            d_logprobs = self._evaluate_datum(operation, logprobs, inputs, outcome, block[0].item)
            if d_x_NH is not None:
                active = (d_logprobs.view(len(x_NH), -1) != 0).any(1).nonzero()[:, 0]
                known = d_logprobs[active]
                _, d_x_NH[active] = self._head.backpropagate(
                    x_NH[active], targets[active], owner, lambda rows, _: known[rows]
                )
        outcome.num_positions += len(targets)
        for sequence, part in zip(block, logprobs.split([len(s.targets) for s in block]), strict=True):
            outcome.logprobs[sequence.datum] = part

    def _evaluate_datum(
        self,
        operation: CheckedOperation,
        logprobs: Tensor,
        inputs: Mapping[str, Tensor],
        outcome: _Outcome,
        item: int,
    ) -> Tensor:
        """Score positions whose loss may depend on each other; return the gradient of the log probabilities."""
        if operation.loss_fn != "custom":
            total, d_logprobs, metrics = evaluate(LOSSES[operation.loss_fn], logprobs, inputs, operation.config)
            _finite(total, item)
            outcome.add(metrics)
            return _finite(d_logprobs, item)
        try:
            custom = self.custom_losses[operation.loss_id or ""]
            value, d_logprobs, named = custom.evaluate(logprobs, inputs)
        except InvalidInput as error:
            raise _OperationFailed(item, error) from None
        outcome.custom.append(named)
        outcome.custom_loss += float(value)
        return _finite(d_logprobs, item)


def _finite(value: Tensor, item: int) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        message = "the loss or its gradient is not finite for these inputs (a ratio of probabilities overflows)"
        raise _OperationFailed(item, InvalidInput(message))
    return value


def _buffers(adapters: Iterable[Adapter]) -> dict[int, Pairs]:
    """Return buffers for the gradients of a batch, by the identity of the adapter; the same at all ranks."""
    return {
        id(adapter): {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in adapter.weights.items()}
        for adapter in {id(adapter): adapter for adapter in adapters}.values()
    }


def _add(counts: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    """Add tokens per expert, layer by layer; a rank that computed nothing has none."""
    return [a + b for a, b in zip(counts, more, strict=True)] if counts and more else counts or more


def _slices(
    adapters: list[Adapter], starts: list[int], lengths: list[int], gradients: dict[int, Pairs] | None
) -> list[AdapterSlice]:
    """Return one slice for each adapter, with buffers for its gradient unless ``gradients`` is ``None``."""
    slices = []
    for _, members in groupby(range(len(adapters)), key=lambda i: id(adapters[i])):
        indices = list(members)
        adapter = adapters[indices[0]]
        grads = None if gradients is None else gradients[id(adapter)]
        stop = starts[indices[-1]] + lengths[indices[-1]]
        slices.append(AdapterSlice(starts[indices[0]], stop, adapter.weights, adapter.scale, grads))
    return slices


def _blocks(
    sequences: list[_Sequence], starts: list[int], batch: list[TrainItem]
) -> list[tuple[list[_Sequence], slice]]:
    """Group neighbours that are scored together: those of one operation, if its loss is local to a token."""

    def key(i: int) -> tuple[int, ...]:
        sequence = sequences[i]
        loss = LOSSES.get(batch[sequence.item].operation.loss_fn)
        is_joined = loss is not None and loss.is_token_local and sequence.targets.dim() == 1
        return (sequence.item,) if is_joined else (sequence.item, i)

    blocks = []
    for _, members in groupby(range(len(sequences)), key=key):
        indices = list(members)
        stop = starts[indices[-1]] + len(sequences[indices[-1]].tokens)
        blocks.append(([sequences[i] for i in indices], slice(starts[indices[0]], stop)))
    return blocks


def _result(outcome: _Outcome, balance: dict[str, float]) -> TrainResult:
    logprobs = [value.cpu().numpy() for value in outcome.logprobs if value is not None]
    assert len(logprobs) == len(outcome.logprobs), "every datum is scored"
    if outcome.metrics is not None:
        return TrainResult(logprobs=logprobs, metrics=outcome.metrics.finalise() | balance)
    metrics = {"loss:sum": outcome.custom_loss, "tokens:sum": float(outcome.num_positions)}
    return TrainResult(logprobs=logprobs, metrics=metrics | combine_metrics(outcome.custom) | balance)
