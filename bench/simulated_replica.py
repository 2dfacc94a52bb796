"""One replica of a simulation: the real core, a driver on the virtual clock, and an engine that computes nothing."""

import hashlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.service_times import SAMPLED_TOKENS
from bench.simulated import SimulatedEngine
from lorimer.engine import messages
from lorimer.errors import LorimerError
from lorimer.scheduler import events, journal
from lorimer.scheduler.core import Core
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.placement import Load
from lorimer.scheduler.runs import Operation
from lorimer.scheduler.samples import Sample

if TYPE_CHECKING:
    from bench.simulate import Simulation

COMMIT_SECONDS, READ_SECONDS, WAKEUP_SECONDS, START_SECONDS = 0.001, 0.0005, 0.0005, 5.0
INFO = messages.ModelInfo(
    model_name="m", directory="", architecture="", vocab_size=100, max_context=4096, num_parameters=1, dtype="float32",
    device="cpu", token_budget=4096, eos_token_ids=[], target_modules=[],
)  # fmt: skip

Work = list[tuple[messages.Command | Operation, events.ReplyTo]]


class Replica:
    """One core with its engine. When its process ends, both are lost and another process begins from the journal."""

    def __init__(self, place: str, simulation: "Simulation") -> None:
        self.place, self._simulation, self.times = place, simulation, simulation.times
        self.limits = SchedulerLimits()
        self.busy_seconds = 0.0
        self.is_alive = False
        self.process = self._engine_number = 0
        """How many processes have computed it, and how many engines have ended."""
        self.begin()
        self.reported = self.load()

    def begin(self) -> None:
        """Begin with nothing in memory."""
        self.process += 1
        self.is_alive = True
        seed = int.from_bytes(hashlib.blake2b(f"{self.place}:{self.process}".encode(), digest_size=8).digest())
        self.core = Core("m", self.limits, Path("/data/weights"), Path("/data/snapshots"), seed, self.place)
        self.engine: SimulatedEngine | None = None
        self._inbox: list[events.Event] = []
        self._commits: deque[journal.Transaction] = deque()
        self._is_commit_due = self._is_starting = False
        self._lose_engine()

    def _lose_engine(self) -> None:
        self._engine_number += 1
        self.engine = None
        self._commands: deque[Work] = deque()
        self._samples: dict[Sample, int] = {}
        """Tokens left of the samples being decoded."""
        self._is_working = False
        self._owed = 0.0
        """Time that the sampler gets before the next command."""

    def end(self) -> None:
        self.is_alive = False
        self._lose_engine()

    def kill_engine(self) -> None:
        if self.engine is not None:
            self._lose_engine()
            self.post(events.EngineEnded("killed"))
            self.start_engine()

    def start_engine(self) -> None:
        if self.engine is None and not self._is_starting:
            self._is_starting = True
            self._after(START_SECONDS, self._ready)

    def _ready(self) -> None:
        self._is_starting = False
        self.engine = SimulatedEngine(self._simulation.disk, self.times.save)
        self.post(events.EngineReady(INFO))

    def load(self) -> Load:
        """Return the same as `Driver.load`."""
        sampling = self.core.sampling
        num_samples = sampling.num_waiting + sampling.num_running
        return Load(len(self.core.runs), self.limits.max_loaded_runs, num_samples, self.core.open_bytes.held)

    def publish_load(self) -> None:
        if self.is_alive:
            self.reported = self.load()

    # ── the loop of the driver ────────────────────────────────────────────────────────────────────────

    def post(self, event: events.Event) -> None:
        if self.is_alive:
            self._inbox.append(event)
            self._simulation.due[self] = None

    def turn(self) -> None:
        simulation = self._simulation
        while self._inbox:
            happened, self._inbox = self._inbox, []
            simulation.num_events += len(happened)
            began = time.perf_counter()
            effects = self.core.handle(happened, simulation.now)
            simulation.core_seconds += time.perf_counter() - began
            for effect in effects:
                self._perform(effect)

    def _after(self, seconds: float, call: Callable[[], None], *, of_engine: bool = False) -> None:
        """Call after some time, unless the process, or with ``of_engine`` the engine, has ended until then."""
        process, engine = self.process, self._engine_number

        def check() -> None:
            if self.is_alive and process == self.process and (engine == self._engine_number or not of_engine):
                call()

        self._simulation.at(seconds, check)

    def _perform(self, effect: events.Effect) -> None:  # noqa: C901 (one case for each effect)
        match effect:
            case events.Commit(transaction=transaction) if transaction.only_reads:
                self._after(READ_SECONDS, lambda: self._apply(transaction))
            case events.Commit(transaction=transaction):
                self._commits.append(transaction)
                if not self._is_commit_due:
                    self._is_commit_due = True
                    self._after(COMMIT_SECONDS, self._commit)
            case events.Send(command=command, to=to):
                self._send([(command, to)])
            case events.SendBatch(operations=operations):
                self._send([(one, _reply_to(one)) for one in operations])
            case events.SendEarly(operation=operation, flight=flight):
                self._send([(operation, events.OperationReply(operation, flight))])
            case events.SendSample(operation=Sample() as sample):
                self._samples[sample] = SAMPLED_TOKENS
                self._work()
            case events.Refuse(operation=operation, error=error):
                self._simulation.refused(operation, error)
            case events.Resolve(operation=operation, outcome=outcome):
                self._simulation.at(WAKEUP_SECONDS, partial(self._simulation.resolved, operation, outcome))
            case events.SetTimer(timer=timer, seconds=seconds):
                self._after(seconds, lambda: self.post(events.TimerFired(timer)))
            case events.StartEngine():
                self.start_engine()
            case events.Verify(model_id=model_id, name=name):
                disk = self._simulation.disk
                self._after(READ_SECONDS, lambda: self.post(events.Verified(model_id, name, name in disk)))
            case events.Discard(names=names):
                for name in names:
                    self._simulation.disk.pop(name, None)

    def _commit(self) -> None:
        """Commit all pending transactions together."""
        self._is_commit_due = False
        gathered, self._commits = self._commits, deque()
        for transaction in gathered:
            self._apply(transaction)

    def _apply(self, transaction: journal.Transaction) -> None:
        try:
            self.post(events.Committed(transaction, self._simulation.journal.apply(transaction)))
        except LorimerError as error:
            self.post(events.CommitFailed(transaction, error))

    # ── the engine ────────────────────────────────────────────────────────────────────────────────────

    def _send(self, work: Work) -> None:
        self._commands.append(work)
        self._work()

    def _work(self) -> None:
        """Begin the engine's next piece of work. As in ``engine/worker.py`` samples get as much time as the rest."""
        if self._is_working or self.engine is None:
            return
        if self._samples and (self._owed > 0 or not self._commands):
            seconds = self.times.decode_step(len(self._samples))
            num_tokens = min(max(1, round(self._owed / seconds)), *self._samples.values())
            self._owed -= num_tokens * seconds
            self._spend(num_tokens * seconds, partial(self._decoded, num_tokens))
        elif self._commands:
            taken = self._commands.popleft()
            self._owed = self._seconds(taken)
            self._spend(self._owed, partial(self._computed, taken))

    def _spend(self, seconds: float, call: Callable[[], None]) -> None:
        def end() -> None:
            self._is_working = False
            call()
            self._work()

        self._is_working = True
        self.busy_seconds += seconds
        self._after(seconds, end, of_engine=True)

    def _seconds(self, taken: Work) -> float:
        match taken[0][0]:
            case Operation():
                operations = [one for one, _ in taken if isinstance(one, Operation)]
                self._simulation.num_computed += len(operations)
                self._simulation.num_replayed += sum(one.is_replay for one in operations)
                return self.times.train(sum(one.tokens for one in operations), len({one.lane for one in operations}))
            case messages.SaveState():
                return self.times.save
            case messages.CreateRun():
                self._simulation.num_loads += 1
                return self.times.create
            case messages.LoadState():
                return self.times.load
            case messages.OptimStep():
                return self.times.step
        return 0.0

    def _computed(self, taken: Work) -> None:
        assert self.engine is not None
        for command, to in taken:
            self.post(events.Replied(to, self.engine.run(command)))

    def _decoded(self, num_tokens: int) -> None:
        assert self.engine is not None
        for sample in list(self._samples):
            self._samples[sample] -= num_tokens
            if self._samples[sample] <= 0:
                del self._samples[sample]
                self.post(events.Replied(_reply_to(sample), self.engine.run(sample)))
        if not self._samples:
            self._owed = 0.0


def _reply_to(operation: Operation) -> events.ReplyTo:
    assert operation.flight is not None
    return events.OperationReply(operation, operation.flight)
