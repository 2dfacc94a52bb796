"""Forward and backward passes over the datums of many operations, runs, ranks and losses together.

Sequences are laid on one token axis, where a common beginning of those of a run stands once, cut by a token budget,
run through the base with every run's adapter on its own tokens, and scored (``scoring.py``). Gradients are added to the
runs only when the whole batch has succeeded, so a failure changes no run. The scheduler chooses what makes a batch.

Where several ranks share the base, each gets the whole batch, plans it like the others and computes the sequences that
are dealt to it. Gradients are summed over the ranks, those of a full run layer by layer (``model/gradients.py``); rank
0 collects the results.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.adapters.adapters import Adapter, Pairs, flatten
from lorimer.engine.full.full_run import FullRun, Tensors
from lorimer.engine.messages import BatchPart, TrainResult, decode_part, encode
from lorimer.engine.model.attention import group_sequences
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.device import upload
from lorimer.engine.model.experts import balance_metrics
from lorimer.engine.model.head import Head
from lorimer.engine.model.vision import Placement, SequenceImages
from lorimer.engine.sharding import GroupFailed
from lorimer.engine.training.batch import AdapterSlice, Pass, cut_by_budget, deal
from lorimer.engine.training.custom_loss import CustomLoss
from lorimer.engine.training.prefixes import MIN_SHARED, Forest, Layout
from lorimer.engine.training.scoring import Block, OperationFailed, Outcome, Scorer, can_have_gradient, read
from lorimer.engine.validation import CheckedOperation
from lorimer.errors import EngineError


@dataclass(frozen=True)
class TrainItem:
    """A validated operation and the run it belongs to. A full run has no others beside it in a batch."""

    operation: CheckedOperation
    adapter: Adapter | FullRun
    images: Sequence[SequenceImages | None] = ()
    """The images of each datum; empty if no datum has any."""


@dataclass(frozen=True)
class _Sequence:
    """One datum as a sequence of a pass; ``item`` and ``datum`` are its indices in the batch."""

    item: int
    datum: int
    tokens: np.ndarray
    adapter: Adapter | FullRun
    is_trained: bool
    images: SequenceImages | None

    @property
    def keys(self) -> np.ndarray:
        """Numbers that are equal where tokens and images are."""
        return self.tokens if self.images is None else self.images.keys(self.tokens)


@dataclass(frozen=True)
class _Plan:
    """The sequences that are trained, or those that are not, sorted by run; a pass has some of them."""

    sequences: list[_Sequence]
    forest: Forest
    is_trained: bool


@dataclass
class _Gradients:
    """Buffers for the gradients of a batch, by the identity of the run; those of adapters are whole at all ranks."""

    adapters: dict[int, Pairs]
    full: dict[int, Tensors]

    @classmethod
    def of(cls, runs: Iterable[Adapter | FullRun]) -> "_Gradients":
        found = cls({}, {})
        for run in {id(run): run for run in runs}.values():
            if isinstance(run, FullRun):
                found.full[id(run)] = run.new_gradient()
            else:
                found.adapters[id(run)] = run.new_gradient()
        return found

    def add_to(self, run: Adapter | FullRun) -> None:
        """Add the buffers of a run, if it has any, to what it has accumulated."""
        if isinstance(run, FullRun):
            if id(run) in self.full:
                run.add_gradient(self.full[id(run)])
        elif id(run) in self.adapters:
            run.add_gradient(self.adapters[id(run)])

    def recording(self, run: Adapter | FullRun) -> AbstractContextManager[None]:
        """Let a pass of a full run add to its buffers within the block; slices bring those of adapters along."""
        if isinstance(run, FullRun) and id(run) in self.full:
            return run.recording(self.full[id(run)])
        return nullcontext()


class _BatchFailed(Exception):
    """All ranks have agreed that the batch fails by an error that belongs to no operation."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Trainer:
    def __init__(
        self, model: BaseModel, token_budget: int, fitting_tokens: int = 0, fitting_dora_tokens: int = 0
    ) -> None:
        """``fitting_tokens`` fit into memory; a pass of more, and of more than the budget, is checkpointed.

        A pass with DoRA runs is if it has more than ``fitting_dora_tokens``, unless the budget was set by hand.
        """
        self.model = model
        self.token_budget = token_budget
        self._max_kept_tokens = max(token_budget, fitting_tokens)
        self._max_kept_dora_tokens = fitting_dora_tokens if fitting_tokens else self._max_kept_tokens
        self.min_shared = MIN_SHARED
        """Shortest piece that sequences share; larger than any sequence, nothing is shared."""
        self.num_tokens = 0
        self._scorer = Scorer(Head(model))

    @property
    def custom_losses(self) -> dict[str, CustomLoss]:
        return self._scorer.custom_losses

    def run(
        self, batch: list[TrainItem], between_passes: Callable[[], None] | None = None
    ) -> list[TrainResult | Exception]:
        """Return results in the order of ``batch``; an operation that fails does so alone and changes nothing.

        ``between_passes`` may use the model, but not the runs of the batch.
        """
        try:
            return self._run_together(batch, between_passes)
        except OperationFailed as failure:
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
        outcomes = [Outcome([None] * len(item.operation.data)) for item in batch]
        gradients = _Gradients.of(s.adapter for s in sequences if s.is_trained)
        expert_counts: list[Tensor] = []
        for number, (plan, members) in enumerate(self._passes(batch, sequences)):
            if number and between_passes is not None:
                between_passes()
            if members:
                with gradients.recording(batch[0].adapter):
                    counts = self._pass(batch, plan, members, outcomes, gradients.adapters)
                expert_counts = _add(expert_counts, counts)
            else:
                with gradients.recording(batch[0].adapter):
                    self._attend_pass(batch[0].adapter, plan.is_trained)
        expert_counts = self._read(outcomes, expert_counts)
        self.model.shards.sum_([tensor for pairs in gradients.adapters.values() for tensor in flatten(pairs)])
        self.num_tokens += sum(len(s.tokens) for s in sequences)
        for adapter in {id(item.adapter): item.adapter for item in batch}.values():
            gradients.add_to(adapter)
        if not self.model.shards.is_alone:
            expert_counts = self._collect(outcomes, expert_counts)
            if self.model.shards.rank:
                return [EngineError("rank 0 has the result")] * len(batch)
        balance = balance_metrics(expert_counts)
        return [outcome.result(balance) for outcome in outcomes]

    def _passes(self, batch: list[TrainItem], sequences: list[_Sequence]) -> Iterator[tuple[_Plan, list[int]]]:
        """Yield for each pass the plan that it is a part of, and the sequences that this rank computes in it.

        They are sorted by run, so that each adapter owns one slice of the token axis. Ranks gather the weights
        together, so all have the same number of passes: one with fewer sequences has some without any.
        """
        # Runs in the order they come in the batch, so that the same batch always gives the same bits.
        order = {id(item.adapter): i for i, item in reversed(list(enumerate(batch)))}
        for is_trained in (False, True):
            part = [s for s in sequences if s.is_trained == is_trained]
            part.sort(key=lambda s: (order[id(s.adapter)], s.item, s.datum))
            forest = Forest(self.min_shared)
            for _, members in groupby(part, key=lambda s: id(s.adapter)):
                forest.add([s.keys for s in members])
            plan = _Plan(part, forest, is_trained)
            cuts = [cut_by_budget(forest, trees, self.token_budget) for trees in self._hands(plan)]
            own = cuts[self.model.shards.rank]
            for number in range(max(map(len, cuts))):
                yield plan, own[number] if number < len(own) else []

    def _hands(self, plan: _Plan) -> list[list[list[int]]]:
        """Return the trees of each rank: those of every operation are divided between all ranks.

        A tree goes to one rank as a whole, unless it is more than that rank's share of the tokens.
        """
        shards, forest = self.model.shards, plan.forest
        if shards.is_alone:
            return [forest.trees]
        loads = [0] * shards.size
        hands: list[list[list[int]]] = [[] for _ in loads]
        share = -(-sum(map(forest.size, forest.trees)) // shards.size)
        for _, members in groupby(forest.trees, key=lambda tree: plan.sequences[min(tree)].item):
            parts = [part for tree in members for part in forest.split(tree, share)]
            for hand, indices in zip(hands, deal([forest.size(part) for part in parts], loads), strict=True):
                hand += [parts[i] for i in sorted(indices)]
        return hands

    def _attend_pass(self, adapter: Adapter | FullRun, is_trained: bool) -> None:
        """Take part in a pass in which this rank has no sequence: one token without loss, gradient or result."""
        device = self.model.device.handle
        current = Pass(
            # Without an adapter autograd would not record the layers, and the backward pass not gather them.
            slices=_slices([(adapter, 1)], None),
            groups=group_sequences([1], [0], device),
            trains_base=isinstance(adapter, FullRun),
        )
        token = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.set_grad_enabled(is_trained):
            hidden_TH = self.model.hidden(token, torch.zeros_like(token), current)
        with self.model.gathered_head(is_trained):
            pass
        self._agree(None)
        self._finish_pass(hidden_TH, torch.zeros_like(hidden_TH) if is_trained else None)

    def _agree(self, failure: Exception | None) -> None:
        """Raise, at every rank, what one of them has met while it scored its sequences."""
        shards = self.model.shards
        verdict = None
        if isinstance(failure, OperationFailed):
            verdict = shards.report(failure.error, failure.item)
        elif failure is not None:
            verdict = shards.report(failure)
        (agreed,) = shards.agree([verdict])
        if agreed is not None:
            self.model.end_pass()
            error = agreed.exception()
            raise _BatchFailed(error) if agreed.item is None else OperationFailed(agreed.item, error)

    def _finish_pass(self, hidden_TH: Tensor, d_hidden_TH: Tensor | None) -> None:
        if d_hidden_TH is None:
            self.model.end_pass()
        else:
            with self.model.shards.together(), self.model.summing_gradients():
                torch.autograd.backward([hidden_TH], [d_hidden_TH])

    def _collect(self, outcomes: list[Outcome], expert_counts: list[Tensor]) -> list[Tensor]:
        """Add what the other ranks have computed to the outcomes of rank 0; return the tokens per expert of all."""
        counts = torch.stack(expert_counts).numpy() if expert_counts else None
        own = BatchPart(operations=[outcome.part() for outcome in outcomes], expert_counts=counts)
        for data in self.model.shards.gather(encode(own))[1:]:
            part = decode_part(data)
            assert isinstance(part, BatchPart)
            for outcome, one in zip(outcomes, part.operations, strict=True):
                outcome.join(one)
            if part.expert_counts is not None:
                counts_LE = torch.from_numpy(part.expert_counts.copy())
                expert_counts = _add(expert_counts, list(counts_LE))
        return expert_counts

    def _read(self, outcomes: list[Outcome], expert_counts: list[Tensor]) -> list[Tensor]:
        """Wait for the results of the batch; fail an operation, at every rank, whose loss is not finite at one."""
        failure: OperationFailed | None = None
        try:
            expert_counts = read(outcomes, expert_counts)
        except OperationFailed as error:
            if self.model.shards.is_alone:
                raise
            failure = error
        self._agree(failure)
        return expert_counts

    def _sequences(self, index: int, item: TrainItem) -> list[_Sequence]:
        operation = item.operation
        return [
            _Sequence(
                index,
                number,
                datum.tokens,
                item.adapter,
                not operation.forward_only and can_have_gradient(operation, datum),
                item.images[number] if item.images else None,
            )
            for number, datum in enumerate(operation.data)
        ]

    def _pass(
        self,
        batch: list[TrainItem],
        plan: _Plan,
        members: list[int],
        outcomes: list[Outcome],
        gradients: dict[int, Pairs],
    ) -> list[Tensor]:
        """Compute one packed pass; return the tokens per expert of each MoE layer."""
        layout, is_trained, device = plan.forest.lay_out(members), plan.is_trained, self.model.device.handle
        current = self._describe(plan, layout, gradients if is_trained else None)
        owners = [plan.sequences[node.sequence] for node in layout.nodes]
        spans = [(node.position, node.position + node.stop - node.start) for node in layout.nodes]
        tokens = np.concatenate([owner.tokens[slice(*span)] for owner, span in zip(owners, spans, strict=True)])
        positions = np.concatenate([np.arange(*span) for span in spans])
        tokens_T, positions_T = upload([tokens, positions], device)
        placements = [
            Placement(owner.images, node.start, *span)
            for owner, node, span in zip(owners, layout.nodes, spans, strict=True)
            if owner.images is not None
        ]
        for owner, node in zip(owners, layout.nodes, strict=True):
            outcomes[owner.item].num_computed += node.stop - node.start
        with torch.set_grad_enabled(is_trained):
            hidden_TH = self.model.hidden(tokens_T, positions_T, current, placements)
        d_hidden_TH = torch.zeros_like(hidden_TH) if is_trained else None
        failure: Exception | None = None
        with self.model.gathered_head(is_trained):
            try:
                blocks = _blocks(batch, plan, layout, current.slices, device)
                self._scorer.score(blocks, hidden_TH.detach(), d_hidden_TH, outcomes)
            except Exception as error:
                if self.model.shards.is_alone:
                    raise
                failure = error
        self._agree(failure)
        self._finish_pass(hidden_TH, d_hidden_TH)
        return list(current.expert_counts.values())

    def _describe(self, plan: _Plan, layout: Layout, gradients: dict[int, Pairs] | None) -> Pass:
        nodes, device = layout.nodes, self.model.device.handle
        lengths = [node.stop - node.start for node in nodes]
        counts = None
        if any(node.num_sequences > 1 for node in nodes):
            repeated = np.repeat([np.float32(node.num_sequences) for node in nodes], lengths)
            (counts,) = upload([repeated], device)
        slices = _slices([(plan.sequences[node.sequence].adapter, node.stop) for node in nodes], gradients)
        has_dora = any(part.row_scales is not None for part in slices)
        max_kept = self._max_kept_dora_tokens if has_dora else self._max_kept_tokens
        return Pass(
            slices=slices,
            groups=group_sequences(
                lengths, [node.start for node in nodes], device, pasts=[node.past for node in nodes]
            ),
            is_checkpointed=plan.is_trained and layout.num_tokens > max_kept,
            count_experts=True,
            num_sequences_T=counts,
            trains_base=any(isinstance(sequence.adapter, FullRun) for sequence in plan.sequences),
        )


def _add(counts: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    """Add tokens per expert, layer by layer; a rank that computed nothing has none."""
    return [a + b for a, b in zip(counts, more, strict=True)] if counts and more else counts or more


def _slices(nodes: Iterable[tuple[Adapter | FullRun, int]], gradients: dict[int, Pairs] | None) -> list[AdapterSlice]:
    """Return one slice for each adapter, with buffers for its gradient unless ``gradients`` is ``None``.

    ``nodes`` are the adapters of consecutive pieces of the axis, each with the end of its piece.
    """
    slices: list[AdapterSlice] = []
    for _, members in groupby(nodes, key=lambda node: id(node[0])):
        *_, (adapter, stop) = members
        if isinstance(adapter, FullRun):
            continue
        grads = None if gradients is None else gradients[id(adapter)]
        start = slices[-1].stop if slices else 0
        slices.append(AdapterSlice(start, stop, adapter.weights, adapter.scale, grads, row_scales=adapter.row_scales))
    return slices


def _blocks(
    batch: list[TrainItem], plan: _Plan, layout: Layout, slices: list[AdapterSlice], device: torch.device
) -> Iterator[Block]:
    """Yield the sequences of a pass by their operations."""
    by_item: dict[int, list[int]] = {}
    for member in layout.pieces:
        by_item.setdefault(plan.sequences[member].item, []).append(member)
    for item, members in sorted(by_item.items()):
        rows = [layout.rows(member) for member in members]
        owner = next((s for s in slices if s.start <= rows[0][0] < s.stop), None)
        numbers = [plan.sequences[member].datum for member in members]
        yield Block(item, batch[item].operation, numbers, rows, owner, device)
