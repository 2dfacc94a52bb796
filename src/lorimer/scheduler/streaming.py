"""Samples of callers who wait for them: their tokens as they are drawn, and the result when all are there.

They share the queue and the engine with other samples but are not on record: nobody can ask for them again once the
caller has gone, so keeping them would cost two writes for nothing, and a caller that leaves ends its sample. When the
engine dies, one whose tokens have been handed out fails, and any other is computed again. Use is recorded.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain

import numpy as np
from sqlalchemy import Connection

from lorimer import types
from lorimer.engine import messages
from lorimer.errors import LorimerError
from lorimer.scheduler.models import ModelScheduler
from lorimer.scheduler.operation import Outcome
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.sampling import AnySample
from lorimer.scheduler.translate import estimated_tokens, with_seed
from lorimer.store import usage
from lorimer.store.usage import UsageItem, UsageKind


@dataclass(frozen=True)
class Piece:
    """New tokens of one sequence."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    topk_logprobs: types.TopkLogprobs | None = None
    stop_reason: types.StopReason | None = None
    """With the last ones."""


@dataclass(eq=False)
class DirectSample(AnySample):
    """A sample under way; ``close`` it in any case."""

    weights: str | None = field(kw_only=True)
    model: ModelScheduler = field(kw_only=True)
    answer: "asyncio.Future[types.SampleResponse]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    num_heard: int = 0
    """Tokens handed out, or about to be."""
    _heard: list[messages.SampleProgress] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def weights_id(self) -> str | None:
        return self.weights

    @property
    def can_repeat(self) -> bool:
        return not self.num_heard

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What was drawn since the last time, one piece for each sequence; ends with the sample or its error."""
        while self._heard or not self.answer.done():
            await self._news.wait()
            self._news.clear()
            heard, self._heard = self._heard, []
            if heard:
                yield merge(heard)
        self.answer.result()

    def hear(self, progress: messages.SampleProgress) -> None:
        self._heard.append(progress)
        self.num_heard += len(progress.tokens)
        self._news.set()

    def _answered(self, answer: "asyncio.Future[types.SampleResponse]") -> None:
        self._news.set()
        is_done = not answer.cancelled() and answer.exception() is None
        self.settle(Outcome("done" if is_done else "failed"))

    def close(self) -> None:
        """Nobody waits any more: end the sample unless it has ended."""
        self.model.sampling.listeners.pop(self.request_id, None)
        if not self.answer.done() or self.answer.cancelled():
            self.model.sampling.abandon(self)

    async def finish(self, recorder: Recorder, response: types.SampleResponse, num_sampled: int) -> None:
        if not self.answer.done():
            self.answer.set_result(response)
        await self._record(recorder, response.prompt_cache_hit_tokens, num_sampled)

    async def fail(self, recorder: Recorder, error: LorimerError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
        if self.num_heard:
            await self._record(recorder, 0, self.num_heard)

    async def _record(self, recorder: Recorder, num_cached: int, num_sampled: int) -> None:
        kinds: tuple[UsageKind, ...] = ("sampling_prefill", "sampling_prefill_cached", "sampling_sample")
        counts = (max(0, self.tokens - num_cached), num_cached, num_sampled)
        await recorder.write(_record_usage, self.user_id, self.base_model, list(zip(kinds, counts, strict=True)))


def start_sample(
    model: ModelScheduler,
    user_id: str,
    weights_id: str | None,
    request: types.SampleRequest,
    *,
    grammar: str = "",
    stream: bool = False,
) -> DirectSample:
    """Put a sample into the queue; with ``stream`` its tokens come in ``pieces``."""
    model.sampling.check_room(user_id)
    request = with_seed(request)
    sample = DirectSample(
        request_id=secrets.token_hex(16),
        user_id=user_id,
        session_id="",
        base_model=model.name,
        lane="",
        seq_id=0,
        kind="sample",
        tokens=estimated_tokens(request.prompt),
        request=request,
        grammar=grammar,
        weights=weights_id,
        model=model,
    )
    sample.answer.add_done_callback(sample._answered)
    if stream:
        model.sampling.listeners[sample.request_id] = sample.hear
    model.sampling.arrive(sample)
    return sample


def merge(heard: Sequence[messages.SampleProgress]) -> list[Piece]:
    """One piece for each sequence."""
    by_index: dict[int, list[messages.SampleProgress]] = {}
    for progress in heard:
        by_index.setdefault(progress.index, []).append(progress)
    return [
        Piece(
            index,
            list(chain.from_iterable(one.tokens for one in several)),
            list(chain.from_iterable(one.logprobs for one in several)),
            _topk([one.topk_logprobs for one in several if one.topk_logprobs is not None]),
            several[-1].stop_reason,
        )
        for index, several in by_index.items()
    ]


def _topk(parts: list[messages.TopkLogprobs]) -> types.TopkLogprobs | None:
    if not parts:
        return None
    return types.TopkLogprobs(
        np.concatenate([part.token_ids for part in parts]), np.concatenate([part.logprobs for part in parts])
    )


def _record_usage(c: Connection, user_id: str, base_model: str, counts: list[tuple[UsageKind, int]]) -> None:
    now = datetime.now(UTC)
    usage.record(c, [UsageItem(user_id, None, None, base_model, kind, count, now) for kind, count in counts if count])
