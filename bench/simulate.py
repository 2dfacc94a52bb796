"""``python -m bench --simulate``: the real scheduler core on a virtual clock, with thousands of tenants.

Every tenant runs a loop: submit a batch and an optimiser step, wait for both, think, repeat. Every fifth tenant samples
before it trains, and one in a hundred skips an operation and never sends it. The think time is set so that the tenants
use the share `LOAD` of the engine. The engine computes nothing; its service times are first fitted to a real engine.
"""

import gc
import heapq
import itertools
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench.service.figures import percentile
from bench.simulated import NOW, MemoryJournal, SimulatedEngine, SimulatedRun
from bench.timing import say
from lorimer import types
from lorimer.engine import messages
from lorimer.engine.config import EngineConfig
from lorimer.engine.process import EngineProcess
from lorimer.errors import Busy, LorimerError
from lorimer.scheduler import events, journal, payloads
from lorimer.scheduler.core import Core
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.runs import Operation
from lorimer.scheduler.samples import Sample
from lorimer.store.sessions import Session

NUM_TENANTS = (100, 1_000, 10_000)
LOAD = 0.8
"""Utilisation: the share of the engine's time that tenants request."""
STEPS = 20_000
"""Steps of all tenants in one simulation, at least `MIN_STEPS` of each."""
MIN_STEPS = 4
BATCH_TOKENS, SAMPLED_TOKENS, PROMPT_TOKENS = 512, 64, 64
SAMPLES = 8
USERS_SHARE = 0.5
"""Users per tenant: some users have several runs."""
STUCK_SHARE, SAMPLING_SHARE = 0.01, 0.2
DEATHS = 5
"""Engine deaths in the middle of a simulation."""
COMMIT_SECONDS, READ_SECONDS, START_SECONDS = 0.001, 0.0005, 5.0
INFO = messages.ModelInfo(
    model_name="m", directory="", architecture="", vocab_size=100, max_context=4096, num_parameters=1, dtype="float32",
    device="cpu", token_budget=4096, eos_token_ids=[], target_modules=[],
)  # fmt: skip
SESSION = Session("s", "u", None, None, [], {}, None, NOW, NOW, "active", None, None)
"""The in-memory journal ignores it."""


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds of engine time."""

    batch: float
    token: float
    adapter: float
    step: float
    save: float
    load: float
    sample_token: float
    """Time of one decoding step for all sequences together."""

    def cost_of_step(self, is_sampling: float, is_moving: bool = False) -> float:
        """Return what a step of a tenant takes alone, if it samples before; ``is_moving``: its run is brought in."""
        training = self.batch + BATCH_TOKENS * self.token + self.adapter + self.step
        sampling = is_sampling * SAMPLED_TOKENS * self.sample_token
        return training + sampling + (self.save + self.load if is_moving else 0.0)


def fit(num_threads: int) -> ServiceTimes:
    """Measure an engine that serves the bundled model."""
    config = EngineConfig(num_threads=num_threads, dtype="float32")
    with EngineProcess(config) as engine, tempfile.TemporaryDirectory() as folder:
        engine.ready.result()
        numbers = itertools.count()
        for run in range(8):
            engine.submit(
                messages.CreateRun(request_id=f"c{run}", model_id=f"m{run}", lora=messages.LoraConfig(rank=32))
            ).result()

        def batch(num_runs: int, tokens: int) -> None:
            operations: list[messages.ForwardBackward | messages.EncodedForwardBackward] = [
                messages.ForwardBackward(
                    request_id=f"t{next(numbers)}", model_id=f"m{run}", data=_data(tokens), loss_fn="cross_entropy"
                )
                for run in range(num_runs)
            ]
            for future in engine.train(messages.TrainBatch(operations=operations)):
                future.result()

        def send(make: Callable[[str], messages.Command]) -> Callable[[], object]:
            return lambda: engine.submit(make(f"x{next(numbers)}")).result()

        rows, seconds = [], []
        for num_runs, tokens in itertools.product((1, 2, 4, 8), (64, 256, 512)):
            rows.append([1.0, num_runs * tokens, num_runs])
            seconds.append(_median(lambda: batch(num_runs, tokens)))  # noqa: B023 (called here)
        (fixed, token, adapter), *_ = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)
        state = str(Path(folder) / "state")
        engine.submit(messages.SaveState(request_id="state", model_id="m0", directory=state)).result()
        params = messages.SamplingParams(max_tokens=SAMPLED_TOKENS, seed=1)
        prompt = np.arange(2, 2 + PROMPT_TOKENS, dtype="i4")
        return ServiceTimes(
            batch=max(float(fixed), 1e-4),
            token=max(float(token), 1e-7),
            adapter=max(float(adapter), 0.0),
            step=_median(send(lambda name: messages.OptimStep(request_id=name, model_id="m0"))),
            save=_median(
                send(lambda name: messages.SaveState(request_id=name, model_id="m0", directory=f"{folder}/{name}"))
            ),
            load=_median(send(lambda name: messages.LoadState(request_id=name, model_id="m1", directory=state))),
            sample_token=_median(
                send(
                    lambda name: messages.SampleRequest(
                        request_id=name, prompt=prompt, num_samples=SAMPLES, params=params
                    )
                )
            )
            / SAMPLED_TOKENS,
        )


def _data(tokens: int) -> list[messages.Datum]:
    ids = np.arange(tokens, dtype="i4") % 50 + 2
    return [messages.Datum(tokens=ids, loss_fn_inputs={"target_tokens": ids, "weights": np.ones(tokens, "f4")})]


def _median(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@dataclass(eq=False)
class Tenant:
    number: int
    user_id: str
    steps_left: int
    is_sampling: bool
    is_stuck: bool
    next_seq: int = 1
    waiting_for: set[int] = field(default_factory=set)
    """seq_ids of the operations, or sequence numbers of the samples, of the step under way."""
    step_began: float = 0.0
    durations: list[float] = field(default_factory=list)

    @property
    def session_id(self) -> str:
        return f"s{self.number}"

    @property
    def model_id(self) -> str:
        return f"s{self.number}:train:0"


@dataclass
class Figures:
    num_tenants: int
    num_steps: int
    p50: float
    p99: float
    fairness: float
    """Jain's fairness index of the slowdown of the tenants' steps: 1 if all are slowed down equally."""
    replayed: float
    """Share of the engine's operations that were replayed or retried."""
    idle: float
    """Share of the time in which the engine was idle."""
    core_seconds: float
    num_events: int
    num_operations: int
    num_moves: int


class Simulation:
    """One core, one engine after another, and a heap of future events."""

    def __init__(
        self, num_tenants: int, times: ServiceTimes, *, deaths: int = 0, num_steps: int | None = None, seed: int = 0
    ) -> None:
        """``num_steps`` is of each tenant; ``deaths`` engines end in the middle."""
        self.times, self.random = times, random.Random(seed)
        self.core = Core("m", SchedulerLimits(), Path("/data/weights"), Path("/data/snapshots"), seed)
        self.journal = MemoryJournal()
        self.disk: dict[str, SimulatedRun] = {}
        self.engine: SimulatedEngine | None = None
        self.now = 0.0
        cost = times.cost_of_step(SAMPLING_SHARE, num_tenants > self.core.limits.max_loaded_runs)
        self.think_seconds = num_tenants * cost / LOAD - cost
        steps = num_steps or max(MIN_STEPS, STEPS // num_tenants)
        num_users = max(1, round(num_tenants * USERS_SHARE))
        self.tenants = [
            Tenant(
                number,
                f"u{number % num_users}",
                steps,
                self.random.random() < SAMPLING_SHARE,
                self.random.random() < STUCK_SHARE,
            )
            for number in range(num_tenants)
        ]
        self._at_work = [tenant for tenant in self.tenants if not tenant.is_stuck]
        self._lanes: dict[str, Tenant] = {}
        for tenant in self.tenants:
            self._lanes[tenant.model_id] = self._lanes[f"{tenant.session_id}:models"] = tenant
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._inbox: list[events.Event] = []
        self._commits: deque[journal.Transaction] = deque()
        self._commands: deque[list[tuple[messages.Command | Operation, events.ReplyTo]]] = deque()
        self._is_engine_busy = self._is_commit_due = False
        self._generation = 0
        self.busy_seconds = self.core_seconds = 0.0
        self.num_events = self.num_computed = self.num_replayed = self.num_moves = self.num_requests = 0
        self._deaths = deaths

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), call))

    def run(self) -> Figures:
        for tenant in self.tenants:
            self.at(self.random.random() * self.think_seconds, partial(self._create, tenant))
        expected = self.think_seconds * (self.tenants[0].steps_left + 1)
        for number in range(self._deaths):
            self.at(expected * (number + 1) / (self._deaths + 1), self._kill_engine)
        gc.collect()
        gc.freeze()
        while self._heap and self._is_anybody_at_work():
            self.now, _, call = heapq.heappop(self._heap)
            call()
            while self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
            self._turn()
        gc.unfreeze()
        return self._figures()

    def _is_anybody_at_work(self) -> bool:
        while self._at_work and not self._at_work[-1].steps_left:
            self._at_work.pop()
        return bool(self._at_work)

    def _turn(self) -> None:
        while self._inbox:
            happened, self._inbox = self._inbox, []
            self.num_events += len(happened)
            began = time.perf_counter()
            effects = self.core.handle(happened, self.now)
            self.core_seconds += time.perf_counter() - began
            for effect in effects:
                self._perform(effect)

    # ── tenants ───────────────────────────────────────────────────────────────────────────────────────

    def _create(self, tenant: Tenant) -> None:
        creation = self._operation(
            tenant, f"{tenant.session_id}:models", 0, "create_model", payloads.encode_payload(payloads.CreateModel())
        )
        values = journal.RunValues("m", 32, 0, True, True, True, {}, "adamw")
        self._inbox.append(events.CreateSubmitted(journal.AcceptRun(creation, SESSION, values, 10)))

    def _operation(
        self, tenant: Tenant, lane: str, seq_id: int, kind: str, payload: bytes, tokens: int = 0
    ) -> Operation:
        self.num_requests += 1
        return Operation(
            f"r{self.num_requests}", tenant.user_id, tenant.session_id, "m", lane, seq_id, kind, tokens, payload
        )

    def _begin_step(self, tenant: Tenant) -> None:
        tenant.step_began = self.now
        if tenant.is_sampling:
            self._submit_sample(tenant)
        else:
            self._train(tenant)

    def _submit_sample(self, tenant: Tenant) -> None:
        self.num_requests += 1
        params = types.SamplingParams(max_tokens=SAMPLED_TOKENS, seed=1)
        request = types.SampleRequest(
            num_samples=SAMPLES, prompt=types.ModelInput.from_ints([1]), sampling_params=params,
            seq_id=self.num_requests,
        )  # fmt: skip
        sample = Sample(
            f"r{self.num_requests}", tenant.user_id, tenant.session_id, "m", tenant.model_id + ":sampler",
            self.num_requests, "sample", tokens=PROMPT_TOKENS, payload=b"sample", request=request, weights_id=None,
        )  # fmt: skip
        self._lanes.setdefault(sample.lane, tenant)
        self._inbox.append(events.Submitted(sample))

    def _train(self, tenant: Tenant) -> None:
        run = self.journal.runs[tenant.model_id]
        if tenant.is_stuck and tenant.next_seq > 1:
            tenant.next_seq += 1  # the operation that never arrives
        first = tenant.next_seq
        tenant.next_seq += 2
        tenant.waiting_for = {first, first + 1}
        step = payloads.encode_payload(payloads.OptimStep(params={"seq_id": float(first + 1)}))
        for seq_id, kind, payload, tokens in (
            (first, "forward_backward", b"data", BATCH_TOKENS),
            (first + 1, "optim_step", step, 0),
        ):
            operation = self._operation(tenant, tenant.model_id, seq_id, kind, payload, tokens)
            self._inbox.append(events.Submitted(operation, run))

    def _resolved(self, operation: Operation) -> None:
        tenant = self._lanes[operation.lane]
        if operation.kind == "create_model":
            self.at(self._think(), lambda: self._begin_step(tenant))
        elif operation.kind == "sample":
            self._train(tenant)
        else:
            tenant.waiting_for.discard(operation.seq_id)
            if not tenant.waiting_for and tenant.steps_left:
                tenant.durations.append(self.now - tenant.step_began)
                tenant.steps_left -= 1
                self.at(self._think(), lambda: self._begin_step(tenant))

    def _think(self) -> float:
        return self.random.expovariate(1 / self.think_seconds) if self.think_seconds else 0.0

    # ── effects ───────────────────────────────────────────────────────────────────────────────────────

    def _perform(self, effect: events.Effect) -> None:  # noqa: C901 (one case for each effect)
        match effect:
            case events.Commit(transaction=transaction) if transaction.only_reads:
                self.at(READ_SECONDS, lambda: self._apply(transaction))
            case events.Commit(transaction=transaction):
                self._commits.append(transaction)
                if not self._is_commit_due:
                    self._is_commit_due = True
                    self.at(COMMIT_SECONDS, self._commit)
            case events.Send(command=command, to=to):
                self._commands.append([(command, to)])
                self._compute()
            case events.SendBatch(operations=operations):
                self._commands.append([(one, _reply_to(one)) for one in operations])
                self._compute()
            case events.SendEarly(operation=operation, flight=flight):
                self._commands.append([(operation, events.OperationReply(operation, flight))])
                self._compute()
            case events.SendSample(operation=sample):
                self._commands.append([(sample, _reply_to(sample))])
                self._compute()
            case events.Refuse(operation=operation, error=Busy()):  # the client retries
                run = None if operation.kind == "sample" else self.journal.runs[operation.lane]
                self.at(1.0, lambda: self._inbox.append(events.Submitted(operation, run)))
            case events.Resolve(operation=operation):
                self._resolved(operation)
            case events.SetTimer(timer=timer, seconds=seconds):
                self.at(seconds, lambda: self._inbox.append(events.TimerFired(timer)))
            case events.StartEngine():
                self._start_engine()
            case events.Verify(model_id=model_id, name=name):
                self.at(READ_SECONDS, lambda: self._inbox.append(events.Verified(model_id, name, name in self.disk)))
            case events.Discard(names=names):
                for name in names:
                    self.disk.pop(name, None)

    def _commit(self) -> None:
        """Commit all pending transactions together."""
        self._is_commit_due = False
        gathered, self._commits = self._commits, deque()
        for transaction in gathered:
            self._apply(transaction)

    def _apply(self, transaction: journal.Transaction) -> None:
        try:
            self._inbox.append(events.Committed(transaction, self.journal.apply(transaction)))
        except LorimerError as error:
            self._inbox.append(events.CommitFailed(transaction, error))

    # ── the engine ────────────────────────────────────────────────────────────────────────────────────

    def _start_engine(self) -> None:
        generation = self._generation

        def ready() -> None:
            if generation == self._generation and self.engine is None:
                self.engine = SimulatedEngine(self.disk)
                self._inbox.append(events.EngineReady(INFO))

        self.at(START_SECONDS, ready)

    def _kill_engine(self) -> None:
        if self.engine is None:
            return
        self._generation += 1
        self.engine, self._is_engine_busy = None, False
        self._commands.clear()
        self._inbox.append(events.EngineEnded("killed"))
        self._start_engine()

    def _compute(self) -> None:
        """Let the engine take its next command, or all pending samples."""
        if self._is_engine_busy or not self._commands or self.engine is None:
            return
        taken = self._commands.popleft()
        if isinstance(taken[0][0], Sample):
            while self._commands and isinstance(self._commands[0][0][0], Sample):
                taken += self._commands.popleft()
        seconds = self._seconds(taken)
        self._is_engine_busy, self.busy_seconds = True, self.busy_seconds + seconds
        generation = self._generation
        self.at(seconds, lambda: self._reply(taken, generation))

    def _seconds(self, taken: list[tuple[messages.Command | Operation, events.ReplyTo]]) -> float:
        times = self.times
        match taken[0][0]:
            case Sample():
                return SAMPLED_TOKENS * times.sample_token * (1 + len(taken) / 16)
            case Operation():
                operations = [one for one, _ in taken if isinstance(one, Operation)]
                self.num_computed += len(operations)
                self.num_replayed += sum(one.is_replay for one in operations)
                lanes = {one.lane for one in operations}
                return times.batch + times.token * sum(one.tokens for one in operations) + times.adapter * len(lanes)
            case messages.SaveState():
                return times.save
            case messages.LoadState() | messages.CreateRun():
                self.num_moves += 1
                return times.load
            case messages.OptimStep():
                return times.step
        return 0.0

    def _reply(self, taken: list[tuple[messages.Command | Operation, events.ReplyTo]], generation: int) -> None:
        if generation != self._generation or self.engine is None:
            return
        self._is_engine_busy = False
        for command, to in taken:
            self._inbox.append(events.Replied(to, self.engine.run(command)))
        self._compute()

    def _figures(self) -> Figures:
        active = [tenant for tenant in self.tenants if not tenant.is_stuck]
        durations = [seconds for tenant in active for seconds in tenant.durations]
        alone = self.times.cost_of_step(is_sampling=0.0), self.times.cost_of_step(is_sampling=1.0)
        means = [statistics.fmean(tenant.durations) / alone[tenant.is_sampling] for tenant in active]
        return Figures(
            num_tenants=len(self.tenants),
            num_steps=len(durations),
            p50=percentile(durations, 50),
            p99=percentile(durations, 99),
            fairness=sum(means) ** 2 / (len(means) * sum(mean**2 for mean in means)),
            replayed=self.num_replayed / max(self.num_computed, 1),
            idle=1 - self.busy_seconds / self.now,
            core_seconds=self.core_seconds,
            num_events=self.num_events,
            num_operations=self.num_requests,
            num_moves=self.num_moves,
        )


def _reply_to(operation: Operation) -> events.ReplyTo:
    assert operation.flight is not None
    return events.OperationReply(operation, operation.flight)


def simulate(num_threads: int, is_quick: bool) -> str:
    """Return the report: the times of a real engine, and a row for each number of tenants."""
    say("measuring an engine that serves the bundled model")
    times = fit(num_threads)
    lines = [
        f"Service times, fitted to an engine with lorimer/tiny: a pass {1e3 * times.batch:.2f} ms "
        f"+ {1e6 * times.token:.1f} µs a token + {1e3 * times.adapter:.2f} ms an adapter; an optimiser step "
        f"{1e3 * times.step:.2f} ms; save {1e3 * times.save:.1f} ms, load {1e3 * times.load:.1f} ms; "
        f"{SAMPLES} sequences decode a token in {1e3 * times.sample_token:.2f} ms.",
        "",
        "| tenants | engine deaths | steps | step p50 | step p99 | Jain | replayed | idle | runs moved "
        "| core, µs an event | µs an operation |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for num_tenants, deaths in itertools.product(NUM_TENANTS[:1] if is_quick else NUM_TENANTS, (0, DEATHS)):
        say(f"simulating {num_tenants} tenants, {deaths} engine deaths")
        found = Simulation(num_tenants, times, deaths=deaths).run()
        lines.append(
            f"| {num_tenants:,} | {deaths} | {found.num_steps:,} | {found.p50:.3f} s | {found.p99:.3f} s "
            f"| {found.fairness:.3f} | {found.replayed:.1%} | {found.idle:.0%} | {found.num_moves:,} "
            f"| {1e6 * found.core_seconds / found.num_events:.1f} "
            f"| {1e6 * found.core_seconds / found.num_operations:.1f} |"
        )
    return "\n".join(lines)
