"""The samples of one engine: they need no order, only turns. Users share the engine by tokens.

The engine gets as many sequences as it can decode and a few more; the rest wait here, so that one request does not
queue behind another user's ten thousand. Which frozen weights the engine holds is decided here too: they are loaded
when a sample needs them, and the least recently used are dropped.

A direct sample is not journaled: nobody can ask for it again once its caller has gone, so a caller that leaves cancels
it. When the engine ends, one whose tokens have been streamed fails, and any other is computed again.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lorimer import types
from lorimer.engine import messages
from lorimer.errors import Busy, Cancelled, EngineError, Gone, LorimerError
from lorimer.scheduler import journal
from lorimer.scheduler.events import (
    Admit,
    CancelSample,
    NoReply,
    Refuse,
    Report,
    Resolve,
    SamplerReply,
    Send,
    SendSample,
)
from lorimer.scheduler.runs import Flight, Operation, Outcome
from lorimer.scheduler.shares import FairShare
from lorimer.scheduler.stats import TokenRate
from lorimer.scheduler.translate import wire_sample_response
from lorimer.store.futures import FutureRow
from lorimer.store.weights import Weights

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core

TYPICAL_TOKENS = 256
"""The assumed cost of a sequence without ``max_tokens``."""
MAX_NAMES = 10_000
MAX_CANCELLED = 1000


@dataclass(eq=False)
class Sample(Operation):
    request: types.SampleRequest = field(kw_only=True)
    weights_id: str | None = field(kw_only=True)
    """None samples the base model."""
    model_id: str | None = None
    """The run whose weights these are."""
    grammar: str = ""
    is_direct: bool = False
    is_streaming: bool = False
    is_cancelled: bool = False
    num_streamed: int = 0
    """Tokens streamed to its client."""
    is_sent: bool = False

    @property
    def cost(self) -> int:
        params = self.request.sampling_params
        return self.tokens + self.request.num_samples * (params.max_tokens or TYPICAL_TOKENS)

    @property
    def can_repeat(self) -> bool:
        """Whether another engine may compute it from the start."""
        return not self.num_streamed


@dataclass(eq=False)
class HeldSampler:
    """Frozen weights in the engine, or being loaded."""

    is_loaded: bool = False
    num_users: int = 0
    waiting: list[Sample] = field(default_factory=list)


class Sampling:
    def __init__(self, core: "Core") -> None:
        self.fair = FairShare()
        self.sampled = TokenRate()
        self.samplers: OrderedDict[str, HeldSampler] = OrderedDict()
        """By the name of their weights' directory, least recently used first."""
        self.num_waiting = self._num_sequences = 0
        self._core = core
        self.waiting: dict[str, deque[Sample]] = {}
        """Samples to be sent, by user, in order of arrival; users without samples have no entry."""
        self._running: dict[str, Sample] = {}
        self._names: dict[str, str] = {}
        """Directory names by weights_id; weights never change their directory."""
        self._lookups: dict[str, list[Sample]] = {}
        """Samples that wait for the name of their weights, by weights_id."""
        self._uses: dict[Sample, str] = {}
        """The sampler that each running sample uses."""
        self._by_id: dict[str, Sample] = {}
        """Samples waiting or running."""
        self._num_names = 0
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        """Samples that were cancelled and are not here."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def unanswered(self) -> Iterable[Sample]:
        return self._by_id.values()

    # ── arriving ──────────────────────────────────────────────────────────────────────────────────────

    def objection(self, user_id: str) -> LorimerError | None:
        """Return why a sample of this user cannot be queued.

        A full queue refuses users who have their share of it, and everybody at twice its size.
        """
        if self._core.is_closing:
            return Busy("the server is shutting down")
        total, limit = self.num_waiting + len(self._running), self._core.limits.max_queued_samples
        own = self.fair.num_open_of(user_id)
        if total >= 2 * limit or (total >= limit and own * max(1, len(self.waiting)) >= limit):
            return Busy(f"{total} samples are waiting for {self._core.name}; try again in a moment")
        return None

    def submit(self, sample: Sample) -> None:
        error = self.objection(sample.user_id)
        if error is not None and sample.is_direct:
            self._core.emit(Resolve(sample, Outcome("failed"), error))
        elif error is not None:
            self._core.emit(Refuse(sample, error))
        elif sample.is_direct:
            self.arrive(sample)
            self._core.emit(Admit(sample, sample.request_id))
        else:
            self._core.commit(journal.Accept(sample))

    def accepted(self, sample: Sample, row: FutureRow, is_new: bool) -> None:
        if self._core.adopts(sample, row, is_new):
            sample.payload = b""
            self.arrive(sample)
        self._core.emit(Admit(sample, row.request_id))

    def arrive(self, sample: Sample) -> None:
        sample.received = self._core.now
        sample.advance("queued")
        self._by_id[sample.request_id] = sample
        self.fair.enter(sample.user_id)
        self._enqueue(sample)
        if sample.request_id in self._cancelled:
            self.cancel(sample.request_id)

    def _enqueue(self, sample: Sample, *, first: bool = False) -> None:
        queue = self.waiting.setdefault(sample.user_id, deque())
        queue.appendleft(sample) if first else queue.append(sample)
        self.fair.offer(sample.user_id)
        self.num_waiting += 1

    def _dequeue(self, sample: Sample) -> None:
        queue = self.waiting[sample.user_id]
        queue.popleft() if queue[0] is sample else queue.remove(sample)
        if not queue:
            del self.waiting[sample.user_id]
        self.num_waiting -= 1

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────

    def send_next(self) -> None:
        """Send the engine as many samples as it has room for."""
        if not self._core.is_ready:
            self._core.start_engine()
            return
        while (sample := self._next()) is not None:
            self._dequeue(sample)
            self._running[sample.request_id] = sample
            self._num_sequences += sample.request.num_samples
            sample.advance("running")
            sample.started, sample.flight, sample.is_sent = self._core.now, Flight(), False
            self.fair.charge(sample.user_id, sample.cost)
            if sample.user_id in self.waiting:
                self.fair.offer(sample.user_id)
            self._prepare(sample)

    def _next(self) -> Sample | None:
        if not self.waiting:
            return None
        if self._core.is_isolating:
            suspects = [one for one in self._core.suspects if isinstance(one, Sample) and one.status == "queued"]
            return None if self._core.is_busy or not suspects else suspects[0]
        sample = self.waiting[self.fair.least_served(self.waiting)][0]
        is_full = self._num_sequences + sample.request.num_samples > self._core.limits.max_running_samples
        return None if self._running and is_full else sample

    def _prepare(self, sample: Sample) -> None:
        """Have the engine load the weights of a sample, then send it."""
        weights_id = sample.weights_id
        if weights_id is None:
            self._send(sample, None)
        elif (name := self._names.get(weights_id)) is not None:
            self._hold(sample, name)
        else:
            self._lookups.setdefault(weights_id, []).append(sample)
            if len(self._lookups[weights_id]) == 1:
                self._core.commit(journal.FindWeights(weights_id))

    def weights_found(self, weights_id: str, found: Weights | None) -> None:
        if found is None:
            gone = Gone("the weights of this sampler have been removed; make a new sampling client")
            self.weights_unknown(weights_id, gone)
            return
        if len(self._names) >= MAX_NAMES:
            self._names.clear()
        self._names[weights_id] = found.name
        for sample in self._lookups.pop(weights_id, ()):
            if sample.status == "running" and not sample.is_sent and self._core.is_ready:
                self._hold(sample, found.name)

    def weights_unknown(self, weights_id: str, error: Exception) -> None:
        for sample in self._lookups.pop(weights_id, ()):
            if sample.status == "running":
                self._leave(sample)
                self.fail(sample, error)

    def _hold(self, sample: Sample, name: str) -> None:
        if sample in self._uses:
            return
        held = self.samplers.get(name)
        if held is None:
            self._make_room()
            held = self.samplers[name] = HeldSampler()
            self._num_names += 1
            command = messages.LoadSampler(
                request_id=f"sampler:{self._num_names}", sampler_id=name, directory=str(self._core.weights / name)
            )
            self._core.emit(Send(command, SamplerReply(self._core.engine, name)))
        self.samplers.move_to_end(name)
        held.num_users += 1
        self._uses[sample] = name
        if held.is_loaded:
            self._send(sample, name)
        else:
            held.waiting.append(sample)

    def sampler_loaded(self, name: str, reply: messages.Result | Exception) -> None:
        held = self.samplers[name]
        waiting, held.waiting = held.waiting, []
        if isinstance(reply, Exception):
            del self.samplers[name]  # the next sample may retry
            for sample in waiting:
                self._leave(sample)
                self.fail(sample, reply)
            return
        held.is_loaded = True
        for sample in waiting:
            self._send(sample, name)

    def published(self, name: str) -> None:
        """Record that the engine froze these weights itself."""
        self._make_room()
        self.samplers[name] = HeldSampler(is_loaded=True)

    def _make_room(self) -> None:
        """Evict unused samplers. If all are in use, exceed the limit until one is not."""
        unused = [name for name, held in self.samplers.items() if not held.num_users and held.is_loaded]
        for name in unused[: max(0, len(self.samplers) + 1 - self._core.limits.max_loaded_samplers)]:
            self._num_names += 1
            command = messages.DropSampler(request_id=f"drop-sampler:{self._num_names}", sampler_id=name)
            self._core.emit(Send(command, NoReply()))
            del self.samplers[name]

    def _send(self, sample: Sample, name: str | None) -> None:
        if sample.is_cancelled:
            self._leave(sample)
            self.fail(sample, Cancelled("cancelled by the client"))
            return
        sample.is_sent = True
        self._core.emit(SendSample(sample, name))

    # ── replies ───────────────────────────────────────────────────────────────────────────────────────

    def complete(self, sample: Sample, flight: Flight) -> None:
        """Process the engine's reply to a sample."""
        reply = flight.replies[0]
        if isinstance(reply, Exception):
            if not self._retry(sample, reply):
                self._leave(sample)
                self.fail(sample, reply)
            return
        self._leave(sample)
        sample.deaths = 0
        sample.tokens = reply.prompt_tokens  # the earlier number was an estimate for images without a count
        sample.answered = self._core.now
        num_sampled = sum(len(sequence.tokens) for sequence in reply.sequences)
        self.sampled.add(num_sampled, self._core.now)
        self.fair.charge(sample.user_id, sample.tokens + num_sampled)
        cached = reply.prompt_cache_hit_tokens
        counts = journal.SampleCounts(max(0, sample.tokens - cached), cached, num_sampled)
        sample.advance("committing")
        if sample.is_direct:
            self._answer(sample, wire_sample_response(reply, sample.request, sample.request_id), counts)
        else:
            self._core.commit(journal.FinishSample(sample, sample.request, reply, counts))

    def _retry(self, sample: Sample, error: Exception) -> bool:
        """Enqueue a sample again that failed with an internal engine error. Return False if that happened too often.

        Clients do not retry a sample that was accepted and then failed. A sample that fails beside others may succeed
        alone, so after a second failure it is a suspect, as after the death of an engine.
        """
        if not isinstance(error, EngineError) or not sample.can_repeat or sample.is_cancelled:
            return False
        self._core.blame(sample)
        if sample.deaths >= self._core.limits.max_engine_deaths:
            return False
        self._core.emit(Report("warning", f"retrying sample {sample.request_id}: {error}"))
        self._requeue(sample)
        return True

    def _requeue(self, sample: Sample) -> None:
        self._end_run(sample)
        sample.advance("queued")
        sample.flight = None
        self._enqueue(sample, first=True)

    def _leave(self, sample: Sample) -> None:
        """Record that the engine has finished with a sample."""
        self._end_run(sample)
        self._by_id.pop(sample.request_id, None)
        self.fair.leave(sample.user_id)

    def _end_run(self, sample: Sample) -> None:
        del self._running[sample.request_id]
        self._num_sequences -= sample.request.num_samples
        self.fair.charge(sample.user_id, -sample.cost)
        name = self._uses.pop(sample, None)
        if name is not None and name in self.samplers:
            self.samplers[name].num_users -= 1

    def fail(self, sample: Sample, error: Exception) -> None:
        if not isinstance(error, LorimerError):
            self._core.emit(Report("error", f"sample {sample.request_id} failed", error=error))
            error = EngineError(f"the sample failed: {type(error).__name__}")
        if not sample.is_direct:
            self._core.fail(sample, error, "cancelled" if isinstance(error, Cancelled) else "failed")
            return
        if sample.status != "committing":
            sample.advance("committing")
        self._answer(sample, error, journal.SampleCounts(sample.tokens, 0, sample.num_streamed))

    def _answer(
        self, sample: Sample, answer: types.SampleResponse | LorimerError, counts: journal.SampleCounts
    ) -> None:
        is_done = not isinstance(answer, LorimerError)
        sample.advance("done" if is_done else "failed")
        sample.flight = None
        self._core.emit(Resolve(sample, Outcome("done" if is_done else "failed"), answer))
        if is_done or sample.num_streamed:
            self._core.commit(journal.RecordUsage(sample.user_id, sample.base_model, counts))

    # ── giving up ─────────────────────────────────────────────────────────────────────────────────────

    def cancel(self, request_id: str) -> None:
        """Cancel a sample, whether it waits or runs."""
        if (sample := self._by_id.get(request_id)) is None:
            # It has ended, or another process accepted it and it has not arrived yet.
            self._cancelled[request_id] = None
            while len(self._cancelled) > MAX_CANCELLED:
                self._cancelled.popitem(last=False)
            return
        sample.is_cancelled = True
        if sample.status == "queued":
            self._give_up(sample, Cancelled("cancelled by the client"))
        elif sample.is_sent:  # a sample that is not sent yet is just not sent
            self._core.emit(CancelSample(request_id))

    def streamed(self, request_id: str, num_tokens: int) -> None:
        if (sample := self._running.get(request_id)) is not None:
            sample.num_streamed += num_tokens

    def _give_up(self, sample: Sample, error: Exception) -> None:
        """Fail a waiting sample."""
        self._dequeue(sample)
        self._by_id.pop(sample.request_id, None)
        self.fair.leave(sample.user_id)
        self.fail(sample, error)

    def journaled(self) -> list[str]:
        """Return the ids of the samples that the engine has and that have rows."""
        return [sample.request_id for sample in self._running.values() if not sample.is_direct]

    def engine_ended(self, reason: str, is_final: bool) -> None:
        """Enqueue the samples that the engine had again. ``is_final``: no engine can be started, so fail them all."""
        self.samplers.clear()
        for sample in reversed(list(self._running.values())):
            self._core.blame(sample)
            self._requeue(sample)
        self._uses.clear()
        for sample in [sample for queue in self.waiting.values() for sample in queue]:
            if sample.is_cancelled:
                self._give_up(sample, Cancelled("cancelled by the client"))
            elif is_final or not sample.can_repeat or sample.deaths >= self._core.limits.max_engine_deaths:
                self._give_up(sample, EngineError(f"the engine ended while it computed this: {reason}"))
