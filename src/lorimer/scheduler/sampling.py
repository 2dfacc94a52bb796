"""The samples of one base model: they need no order, only turns. Users share the engine by tokens.

The engine gets as many sequences as it can decode and a few more; the rest wait here, so that somebody who comes with
one request does not queue behind another's ten thousand.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from lorimer import types
from lorimer.engine import messages
from lorimer.errors import Busy, Cancelled, EngineDied, EngineError, LorimerError, StorageError
from lorimer.scheduler import records
from lorimer.scheduler.background import Background
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.isolation import Isolation
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.operation import Operation
from lorimer.scheduler.rates import TokenRate
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.samplers import Held, SamplerPool
from lorimer.scheduler.shares import Shares
from lorimer.scheduler.translate import engine_sample, wire_sample_response
from lorimer.store.samplers import SamplingSession
from lorimer.types.encoding import encode_sample_response

log = logging.getLogger("lorimer.scheduler")

_TYPICAL_TOKENS = 256
"""What a sequence without ``max_tokens`` is taken to cost until it is known."""


@dataclass(eq=False)
class AnySample(Operation):
    """A sample under way: of a sampling session, on record, or of a caller who waits for it (``streaming.py``)."""

    request: types.SampleRequest = field(kw_only=True)
    grammar: str = ""
    is_cancelled: bool = False

    @property
    def weights_id(self) -> str | None:
        """None samples the base model."""
        raise NotImplementedError

    @property
    def sequence_ids(self) -> list[str]:
        return sequence_ids(self.request_id, self.request.num_samples)

    @property
    def estimate(self) -> int:
        params = self.request.sampling_params
        return self.tokens + self.request.num_samples * (params.max_tokens or _TYPICAL_TOKENS)

    @property
    def can_repeat(self) -> bool:
        """Whether another engine may compute it from the start."""
        return True

    async def finish(self, recorder: Recorder, response: types.SampleResponse, num_sampled: int) -> None:
        raise NotImplementedError

    async def fail(self, recorder: Recorder, error: LorimerError) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class SampleOperation(AnySample):
    sampler: SamplingSession = field(kw_only=True)

    @property
    def weights_id(self) -> str | None:
        return self.sampler.weights_id

    async def finish(self, recorder: Recorder, response: types.SampleResponse, num_sampled: int) -> None:
        cached = response.prompt_cache_hit_tokens
        counts = (max(0, self.tokens - cached), cached, num_sampled)
        encoded = encode_sample_response(response)
        await recorder.finish(self, records.finish_sample, self.sampler, encoded, counts)

    async def fail(self, recorder: Recorder, error: LorimerError) -> None:
        await recorder.fail(self, error, "cancelled" if isinstance(error, Cancelled) else "failed")


def sequence_ids(request_id: str, num_samples: int) -> list[str]:
    return [f"{request_id}:{index}" for index in range(num_samples)]


class SamplingQueue:
    def __init__(
        self, slot: EngineSlot, pool: SamplerPool, limits: SchedulerLimits, recorder: Recorder, isolation: Isolation
    ) -> None:
        self.slot, self.pool = slot, pool
        self.shares = Shares()
        self.sampled = TokenRate()
        self.listeners: dict[str, Callable[[messages.SampleProgress], None]] = {}
        """Who is told of new tokens as they come, by request."""
        self.on_answer: Callable[[], None] = self.pump
        self._limits, self._recorder, self._isolation = limits, recorder, isolation
        self._waiting: dict[str, deque[AnySample]] = {}
        """By user, in the order they came; no user without any."""
        self._running: dict[str, AnySample] = {}
        self._num_waiting = self._num_sequences = 0
        self._background = Background("a sample was not recorded")
        self._is_closing = False

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def unanswered(self) -> Iterator[AnySample]:
        yield from chain(self._running.values(), *self._waiting.values())

    def check_room(self, user_id: str) -> None:
        """A full queue takes no more from users who have their part of it, and at twice its size from nobody."""
        if self._is_closing:
            raise Busy("the server is shutting down")
        total, most = self._num_waiting + len(self._running), self._limits.max_queued_samples
        own = self.shares.num_open_of(user_id)
        if total >= 2 * most or (total >= most and own * max(1, len(self._waiting)) >= most):
            raise Busy(f"{total} samples are waiting for {self.slot.name}; try again in a moment")

    def arrive(self, operation: AnySample) -> None:
        self.shares.enter(operation.user_id)
        self._enqueue(operation)
        self.pump()

    def _enqueue(self, operation: AnySample, *, first: bool = False) -> None:
        queue = self._waiting.setdefault(operation.user_id, deque())
        queue.appendleft(operation) if first else queue.append(operation)
        self._num_waiting += 1

    def _dequeue(self, operation: AnySample) -> None:
        queue = self._waiting[operation.user_id]
        queue.remove(operation)
        if not queue:
            del self._waiting[operation.user_id]
        self._num_waiting -= 1

    # ── giving samples to the engine ──────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Give the engine what it has room for."""
        if self._is_closing or not self._waiting:
            return
        if self.slot.state != "ready":
            self.slot.start()
            return
        while (operation := self._next()) is not None:
            self._dequeue(operation)
            self._running[operation.request_id] = operation
            self._num_sequences += operation.request.num_samples
            self.shares.charge(operation.user_id, operation.estimate)
            self._background.spawn(self._run(operation))

    def _next(self) -> AnySample | None:
        if not self._waiting:
            return None
        if self._isolation.is_on:
            suspects = (operation for queue in self._waiting.values() for operation in queue if operation.is_suspect)
            return None if self._isolation.is_busy() else next(suspects, None)
        operation = self._waiting[self.shares.least_served(self._waiting)][0]
        is_full = self._num_sequences + operation.request.num_samples > self._limits.max_running_samples
        return None if self._running and is_full else operation

    async def _run(self, operation: AnySample) -> None:
        attempt = operation.deaths
        held: Held | None = None
        operation.started_at = time.time()
        try:
            if operation.weights_id is not None:
                held = await self.pool.hold(operation.weights_id)
            if operation.deaths != attempt:
                return  # the engine ended meanwhile, and it was put back
            if operation.is_cancelled:
                raise Cancelled("cancelled by the client")
            result = await self.slot.submit(self._command(operation, held))
        except (EngineDied, StorageError):
            return  # it is put back, or taken up at the next start
        except Exception as error:
            if operation.deaths == attempt and not self._retry(operation, error):
                self._leave(operation)
                await self._fail(operation, error)
            return
        finally:
            if held is not None:
                self.pool.release(held)
        if operation.deaths == attempt:
            assert isinstance(result, messages.SampleResult)
            self._leave(operation)
            await self._record(operation, result)

    def _retry(self, operation: AnySample, error: Exception) -> bool:
        """Put back what failed by an error of the engine's own; false if that is not the case or happens too often.

        No client retries a sample that was accepted and then failed. What fails beside others fails less alone, so
        after a second failure it is a suspect, as after the death of an engine.
        """
        if not isinstance(error, EngineError) or not operation.can_repeat or operation.is_cancelled:
            return False
        self._isolation.blame(operation)
        if operation.deaths >= self._limits.max_engine_deaths:
            return False
        log.warning("retrying a sample: %s", error, extra={"request_id": operation.request_id})
        self._end_run(operation)
        self._enqueue(operation, first=True)
        self.on_answer()
        return True

    def _command(self, operation: AnySample, held: Held | None) -> messages.SampleRequest:
        return engine_sample(
            operation.request,
            operation.request_id,
            held.name if held is not None else None,
            cache_salt=operation.user_id,
            grammar=operation.grammar,
            stream=operation.request_id in self.listeners,
        )

    def _leave(self, operation: AnySample) -> None:
        """The engine has answered."""
        operation.deaths = 0
        self._end_run(operation)
        self.shares.leave(operation.user_id)
        self.on_answer()

    def _end_run(self, operation: AnySample) -> None:
        del self._running[operation.request_id]
        self._num_sequences -= operation.request.num_samples
        self.shares.charge(operation.user_id, -operation.estimate)

    # ── answers ───────────────────────────────────────────────────────────────────────────────────────

    async def _record(self, operation: AnySample, result: messages.SampleResult) -> None:
        operation.tokens = result.prompt_tokens  # of images without a count it was an estimate
        num_sampled = sum(len(sequence.tokens) for sequence in result.sequences)
        self.sampled.add(num_sampled)
        self.shares.charge(operation.user_id, operation.tokens + num_sampled)
        try:
            response = wire_sample_response(result, operation.request, operation.sequence_ids)
            await operation.finish(self._recorder, response, num_sampled)
        except StorageError:
            return  # the server is closing; it is run again at the next start
        except Exception as error:
            await self._fail(operation, error)

    async def _fail(self, operation: AnySample, error: Exception) -> None:
        if not isinstance(error, LorimerError):
            log.error("a sample failed", exc_info=error, extra={"request_id": operation.request_id})
            error = EngineError(f"the sample failed: {type(error).__name__}")
        await operation.fail(self._recorder, error)

    async def cancel(self, operation: AnySample) -> None:
        """Give a sample up, wherever it is."""
        operation.is_cancelled = True
        if operation.request_id in self._running:
            self.slot.cancel(operation.request_id)  # one that is not there yet is not sent
        elif operation in self._waiting.get(operation.user_id, ()):
            await asyncio.shield(self._give_up(operation, Cancelled("cancelled by the client")))

    def abandon(self, operation: AnySample) -> None:
        """Give a sample up in the background."""
        self._background.spawn(self.cancel(operation))

    def _give_up(self, operation: AnySample, error: Exception) -> "asyncio.Task[None]":
        """End one that waits."""
        self._dequeue(operation)
        self.shares.leave(operation.user_id)
        return self._background.spawn(self._fail(operation, error))

    def engine_ended(self, reason: str, is_final: bool) -> None:
        """Put back what the engine had. ``is_final``: no engine can be had, so nothing need wait for one."""
        self.pool.engine_ended()
        for operation in reversed(list(self._running.values())):
            self._isolation.blame(operation)
            self._end_run(operation)
            self._enqueue(operation, first=True)
        for operation in [operation for queue in self._waiting.values() for operation in queue]:
            if operation.is_cancelled:
                self._give_up(operation, Cancelled("cancelled by the client"))
            elif is_final or not operation.can_repeat or operation.deaths >= self._limits.max_engine_deaths:
                self._give_up(operation, EngineError(f"the engine ended while it computed this: {reason}"))

    async def close(self) -> None:
        """Stop giving out work; what the engine has not answered is run again at the next start."""
        self._is_closing = True
        while tasks := self._background.unfinished:
            done, pending = await asyncio.wait(tasks, timeout=5.0)
            if not done:
                for task in pending:
                    task.cancel()
