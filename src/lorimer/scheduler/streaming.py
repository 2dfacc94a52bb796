"""Direct samples, whose callers wait for them: tokens are streamed as they are drawn, then the result."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from lorimer import types
from lorimer.engine import messages
from lorimer.errors import LorimerError
from lorimer.scheduler.samples import Sample
from lorimer.scheduler.translate import estimated_tokens


@dataclass(frozen=True)
class Piece:
    """New tokens of one sequence."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    topk_logprobs: types.TopkLogprobs | None = None
    stop_reason: types.StopReason | None = None
    """Set with the last tokens."""


@dataclass(eq=False)
class DirectSample:
    """A running sample from the side of its caller, who must ``close`` it in any case."""

    sample: Sample
    cancel: Callable[[str], None]
    """Cancels the sample with this request_id; one that has ended is not affected."""
    answer: "asyncio.Future[types.SampleResponse]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    on_progress: Callable[[messages.SampleProgress], None] | None = None
    """Gets new tokens instead of ``pieces``."""
    _progress: list[messages.SampleProgress] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def request_id(self) -> str:
        return self.sample.request_id

    @property
    def request(self) -> types.SampleRequest:
        return self.sample.request

    @property
    def tokens(self) -> int:
        """The number of prompt tokens."""
        return self.sample.tokens

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yield what was drawn since the last time, one piece for each sequence, until the sample ends."""
        while self._progress or not self.answer.done():
            await self._arrived.wait()
            self._arrived.clear()
            progress, self._progress = self._progress, []
            if progress:
                yield merge(progress)
        self.answer.result()

    def progress(self, progress: messages.SampleProgress) -> None:
        if self.on_progress is not None:
            self.on_progress(progress)
            return
        self._progress.append(progress)
        self._arrived.set()

    def resolve(self, result: types.SampleResponse | LorimerError) -> None:
        if not self.answer.done():
            if isinstance(result, LorimerError):
                self.answer.set_exception(result)
                self.answer.exception()  # retrieve the exception; the caller may have disconnected
            else:
                self.answer.set_result(result)
        self._arrived.set()

    def close(self) -> None:
        """Cancel the sample unless it has ended."""
        self.cancel(self.sample.request_id)


def new_sample(
    base_model: str, user_id: str, weights_id: str | None, request: types.SampleRequest, grammar: str, stream: bool
) -> Sample:
    return Sample(
        request_id=secrets.token_hex(16),
        user_id=user_id,
        session_id="",
        base_model=base_model,
        lane="",
        seq_id=0,
        kind="sample",
        tokens=estimated_tokens(request.prompt),
        request=request,
        weights_id=weights_id,
        grammar=grammar,
        is_direct=True,
        is_streaming=stream,
    )


def merge(progress: Sequence[messages.SampleProgress]) -> list[Piece]:
    """Merge progress messages into one piece for each sequence."""
    by_index: dict[int, list[messages.SampleProgress]] = {}
    for one in progress:
        by_index.setdefault(one.index, []).append(one)
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
