"""The real scheduler cores and placement on a virtual clock, with thousands of tenants and up to dozens of replicas.

Every tenant runs a loop: submit a batch and an optimiser step, wait for both, think, repeat. Every fifth tenant samples
before it trains, and one in a hundred leaves out an operation for good. The engines compute nothing; their service
times are those of a real one. ``simulation_report.py`` chooses the loads and writes the tables.
"""

import gc
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from bench.service_times import NUM_SEQUENCES, PROMPT_TOKENS, SAMPLED_TOKENS, ServiceTimes
from bench.simulated import NOW, MemoryJournal, SimulatedRun
from bench.simulated_replica import COMMIT_SECONDS, WAKEUP_SECONDS, Replica
from lorimer import types
from lorimer.errors import Busy
from lorimer.scheduler import events, journal, payloads
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.placement import AcceptAt, Load, choose_for_run, choose_for_sample, replica_name, sample_key
from lorimer.scheduler.runs import Operation, Outcome, operation_of
from lorimer.scheduler.samples import Sample
from lorimer.store.runs import RunValues
from lorimer.store.sessions import Session

STUCK_SHARE, SAMPLING_SHARE = 0.01, 0.2
LEASE_SECONDS = 10.0
"""How long a replica whose process has ended waits for another process to take it over."""
RENEW_SECONDS, REFRESH_SECONDS = 2.0, 1.0
"""How often an owner publishes its load, and an API replica reads it."""
SESSION = Session("s", "u", None, None, [], {}, None, NOW, NOW, "active", None, None)
"""The in-memory journal ignores it."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    num_tenants: int
    num_steps: int
    """Steps of all tenants that are counted, after the warm-up."""
    num_replicas: int = 0
    """Replicas in processes of their own; 0 is a server of one process with one replica."""
    load: float | None = 0.8
    """The share of the engines' time that tenants ask for; None: they never pause."""
    batch_tokens: int = 512
    runs_per_user: int = 2
    deaths: int = 0
    """How many engines end; with ``num_replicas`` whole processes, which others take over."""
    seed: int = 0

    @property
    def num_engines(self) -> int:
        return max(1, self.num_replicas)


@dataclass(eq=False)
class Tenant:
    number: int
    user_id: str
    is_sampling: bool
    is_stuck: bool
    next_seq: int = 1
    waiting_for: set[int] = field(default_factory=set)
    """seq_ids of the operations of the step under way."""
    step_began: float = 0.0
    train_began: float = 0.0
    place: str = ""
    """The replica of its last operation."""
    sample_place: str = ""
    """The replica of its last sample."""

    @property
    def session_id(self) -> str:
        return f"s{self.number}"

    @property
    def model_id(self) -> str:
        return f"s{self.number}:train:0"


@dataclass(frozen=True)
class Step:
    """One step of a tenant, from its first request to its last result."""

    tenant: int
    places: tuple[str, str]
    """The replicas that trained and sampled."""
    began: float
    train_began: float
    ended: float


@dataclass(frozen=True)
class Record:
    """What happened between the warm-up and the end."""

    workload: Workload
    began: float
    ended: float
    steps: list[Step]
    unfinished: list[Step]
    """Steps under way at the end."""
    stuck: frozenset[int]
    """Tenants that left out an operation."""
    busy_seconds: float
    """Of all engines."""
    num_computed: int
    num_replayed: int
    num_loads: int
    """How often a run was brought into an engine."""
    num_moves: int
    """How often a run changed its replica."""
    dead: frozenset[str]
    """Replicas that died."""
    core_seconds: float
    num_events: int
    num_operations: int


@dataclass
class View:
    """What an API replica knows of a replica, as `RemoteReplica` does."""

    place: str
    known: Load
    num_placed: int = 0
    """Runs placed there since its load was read."""

    def load(self) -> Load:
        return replace(self.known, num_runs=self.known.num_runs + self.num_placed)


class Simulation:
    """Tenants, replicas, one journal, and a heap of future events."""

    def __init__(self, workload: Workload, times: ServiceTimes) -> None:
        self.workload, self.times = workload, times
        self.random = random.Random(workload.seed)
        self.journal = MemoryJournal()
        self.disk: dict[str, SimulatedRun] = {}
        self.now = self.core_seconds = 0.0
        self.num_events = self.num_computed = self.num_replayed = self.num_loads = 0
        self._num_moves = self._num_requests = self._num_created = self._num_steps = 0
        self.due: dict[Replica, None] = {}
        """Replicas with events."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.replicas = {
            place: Replica(place, self)
            for place in (replica_name("m", number) for number in range(workload.num_engines))
        }
        self._views = [View(place, replica.reported) for place, replica in self.replicas.items()]
        self._think_seconds = self._choose_think_seconds()
        self._creation_seconds = 1.25 * workload.num_tenants * (times.create + times.save) / workload.num_engines
        self.tenants = self._make_tenants()
        self._lanes = {tenant.model_id: tenant for tenant in self.tenants}
        self._samples: dict[str, Sample] = {}
        self._steps: list[Step] = []
        self._began: Record | None = None
        """The counts at the end of the warm-up."""
        self._dead: list[str] = []

    def _choose_think_seconds(self) -> float:
        load, times = self.workload, self.times
        if load.load is None:
            return 0.0
        cost = times.train(load.batch_tokens, 1) + times.step + SAMPLING_SHARE * SAMPLED_TOKENS * times.decode
        if load.num_tenants > load.num_engines * SchedulerLimits().max_loaded_runs:
            cost += times.save + times.create + times.load
        return load.num_tenants * cost / (load.num_engines * load.load) - cost

    def _make_tenants(self) -> list[Tenant]:
        count, chance = self.workload.num_tenants, self.random
        num_users = math.ceil(count / self.workload.runs_per_user)
        return [
            Tenant(number, f"u{number % num_users}", chance.random() < SAMPLING_SHARE, chance.random() < STUCK_SHARE)
            for number in range(count)
        ]

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), call))

    def run(self) -> Record:
        load = self.workload
        for tenant in self.tenants:
            self.at(self.random.random() * self._creation_seconds, partial(self._create, tenant))
        for replica in self.replicas.values():
            self._repeat(RENEW_SECONDS, replica.publish_load)
        self._repeat(REFRESH_SECONDS, self._refresh)
        gc.collect()
        gc.freeze()
        while self._began is None or self._num_steps < load.num_steps:
            self.now, _, call = heapq.heappop(self._heap)
            call()
            while self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
            while self.due:
                for replica in list(self.due):
                    del self.due[replica]
                    replica.turn()
        gc.unfreeze()
        return self._since(self._began)

    def _repeat(self, seconds: float, call: Callable[[], None]) -> None:
        def again() -> None:
            call()
            self.at(seconds, again)

        self.at(self.random.random() * seconds, again)

    def _refresh(self) -> None:
        for view in self._views:
            view.known, view.num_placed = self.replicas[view.place].reported, 0

    # ── tenants ───────────────────────────────────────────────────────────────────────────────────────

    def _create(self, tenant: Tenant) -> None:
        chosen = choose_for_run(self._views, self.random)
        chosen.num_placed += 1
        creation = self._operation(
            tenant, f"{tenant.session_id}:models", 0, "create_model", payloads.encode_payload(payloads.CreateModel())
        )
        creation.place = tenant.place = chosen.place
        self._lanes[creation.lane] = tenant
        values = RunValues("m", 32, 0, True, True, True, {}, "adamw")
        accept = journal.AcceptRun(creation, SESSION, values, 10)
        if self.workload.num_replicas:
            self._commit(accept)
        else:
            self.replicas[chosen.place].post(events.CreateSubmitted(accept))

    def _operation(
        self, tenant: Tenant, lane: str, seq_id: int, kind: str, payload: bytes, tokens: int = 0
    ) -> Operation:
        self._num_requests += 1
        return Operation(
            f"r{self._num_requests}", tenant.user_id, tenant.session_id, "m", lane, seq_id, kind, tokens, payload
        )

    def _begin_step(self, tenant: Tenant) -> None:
        tenant.step_began, tenant.sample_place = self.now, ""
        if tenant.is_sampling:
            self._sample(tenant)
        else:
            self._train(tenant)

    def _sample(self, tenant: Tenant) -> None:
        self._num_requests += 1
        params = types.SamplingParams(max_tokens=SAMPLED_TOKENS, seed=1)
        request = types.SampleRequest(
            num_samples=NUM_SEQUENCES, prompt=types.ModelInput.from_ints([1]), sampling_params=params,
            seq_id=self._num_requests,
        )  # fmt: skip
        place = choose_for_sample(self._views, sample_key(tenant.user_id, None, request.prompt)).place
        sample = Sample(
            f"r{self._num_requests}", tenant.user_id, tenant.session_id, "m", tenant.model_id + ":sampler",
            self._num_requests, "sample", tokens=PROMPT_TOKENS, payload=b"sample", request=request, weights_id=None,
            place=place,
        )  # fmt: skip
        tenant.sample_place = place
        self._lanes[sample.lane] = tenant
        self._samples[sample.request_id] = sample
        if self.workload.num_replicas:
            self._commit(journal.Accept(sample))
        else:
            self.replicas[place].post(events.Submitted(sample))

    def _train(self, tenant: Tenant) -> None:
        run = self.journal.runs[tenant.model_id]
        place = run.replica
        if place is None:
            chosen = choose_for_run(self._views, self.random)
            chosen.num_placed += 1
            place = chosen.place
            self._num_moves += place != tenant.place
        tenant.place = place
        tenant.train_began = self.now
        if tenant.is_stuck and tenant.next_seq > 1:
            tenant.next_seq += 1  # the operation that never arrives
        first = tenant.next_seq
        tenant.next_seq += 2
        tenant.waiting_for = {first, first + 1}
        step = payloads.encode_payload(payloads.OptimStep(params={"seq_id": float(first + 1)}))
        for seq_id, kind, payload, tokens in (
            (first, "forward_backward", b"data", self.workload.batch_tokens),
            (first + 1, "optim_step", step, 0),
        ):
            operation = self._operation(tenant, tenant.model_id, seq_id, kind, payload, tokens)
            operation.place = place
            if self.workload.num_replicas:
                self._commit(AcceptAt(operation, SchedulerLimits()))
            else:
                self.replicas[place].post(events.Submitted(operation, run))

    def resolved(self, operation: Operation, outcome: Outcome) -> None:
        tenant = self._lanes[operation.lane]
        assert tenant.is_stuck or outcome.state == "done", f"{operation.kind} of {operation.lane}: {outcome.error}"
        if operation.kind == "create_model":
            self._num_created += 1
            self.at(self._think(), lambda: self._begin_step(tenant))
        elif operation.kind == "sample":
            del self._samples[operation.request_id]
            self._train(tenant)
        else:
            tenant.waiting_for.discard(operation.seq_id)
            if not tenant.waiting_for:
                self._end_step(tenant)
                self.at(self._think(), lambda: self._begin_step(tenant))

    def _end_step(self, tenant: Tenant) -> None:
        load = self.workload
        self._num_steps += not tenant.is_stuck
        if self._began is not None:
            self._steps.append(self._step(tenant))
            if len(self._dead) < load.deaths and self._num_steps >= load.num_steps * (len(self._dead) + 1) / (
                load.deaths + 1
            ):
                self._kill()
        elif self._is_warm():
            self._num_steps = 0
            self._began = self._since(None)

    def _is_warm(self) -> bool:
        """Return whether all runs were created and what that delayed is over."""
        load = self.workload
        if self._num_created < load.num_tenants or self.now < 2 * self._creation_seconds:
            return False
        return load.load is not None or self._num_steps >= load.num_tenants

    def _step(self, tenant: Tenant) -> Step:
        places = tenant.place, tenant.sample_place
        return Step(tenant.number, places, tenant.step_began, tenant.train_began, self.now)

    def _think(self) -> float:
        return self.random.expovariate(1 / self._think_seconds) if self._think_seconds else 0.0

    def refused(self, operation: Operation, error: Exception) -> None:
        assert isinstance(error, Busy), error
        replica = self.replicas[operation.place or ""]
        run = None if operation.kind == "sample" else self.journal.runs[operation.lane]
        self.at(1.0, lambda: replica.post(events.Submitted(operation, run)))  # the client retries

    # ── the API replica, when replicas have processes of their own ────────────────────────────────────

    def _commit(self, transaction: journal.Transaction) -> None:
        self.at(COMMIT_SECONDS, lambda: self._accept(transaction))

    def _accept(self, transaction: journal.Transaction) -> None:
        """Commit a request, and wake its owner."""
        self.journal.apply(transaction)
        operation = transaction.operation  # type: ignore[attr-defined]
        self.at(WAKEUP_SECONDS, lambda: self._arrive(operation))

    def _arrive(self, operation: Operation) -> None:
        assert operation.place is not None
        is_creation = operation.kind == "create_model"
        model_id = f"{operation.session_id}:train:{operation.seq_id}" if is_creation else operation.lane
        run = None if isinstance(operation, Sample) else self.journal.runs[model_id]
        self.replicas[operation.place].post(events.Arrived(operation, run, is_creation))

    # ── deaths ────────────────────────────────────────────────────────────────────────────────────────

    def _kill(self) -> None:
        """End the process of the next replica, or the only engine of a single server."""
        places = list(self.replicas)
        place = places[len(self._dead) * len(places) // self.workload.deaths % len(places)]
        self._dead.append(place)
        replica = self.replicas[place]
        if not self.workload.num_replicas:
            replica.kill_engine()
        elif replica.is_alive:
            replica.end()
            self.at(LEASE_SECONDS, lambda: self._take_over(replica))

    def _take_over(self, replica: Replica) -> None:
        """Begin again with what the journal has, as ``scheduler/recovery.py`` does."""
        replica.begin()
        replica.start_engine()
        for row in self.journal.unfinished():
            if row.place != replica.place:
                continue
            if row.kind == "sample":
                self._arrive(replace(self._samples[row.request_id], status="received", flight=None, deaths=0))
                continue
            operation = operation_of(row, "m")
            if row.kind == "create_model":
                operation.payload = self.journal.payloads[row.request_id]
            self._arrive(operation)

    # ── what happened ─────────────────────────────────────────────────────────────────────────────────

    def _since(self, before: Record | None) -> Record:
        counts = {
            "busy_seconds": sum(replica.busy_seconds for replica in self.replicas.values()),
            "num_computed": self.num_computed,
            "num_replayed": self.num_replayed,
            "num_loads": self.num_loads,
            "num_moves": self._num_moves,
            "core_seconds": self.core_seconds,
            "num_events": self.num_events,
            "num_operations": self._num_requests,
        }
        if before is not None:
            counts = {name: value - getattr(before, name) for name, value in counts.items()}
        stuck = frozenset(tenant.number for tenant in self.tenants if tenant.is_stuck)
        return Record(
            workload=self.workload,
            began=self.now if before is None else before.ended,
            ended=self.now,
            steps=[step for step in self._steps if step.tenant not in stuck],
            unfinished=[self._step(one) for one in self.tenants if one.waiting_for and not one.is_stuck],
            stuck=stuck,
            dead=frozenset(self._dead),
            **counts,  # type: ignore[arg-type]
        )

    def check_weights(self) -> int:
        """Check that no operation of a run in an engine was lost, doubled or reordered. Return how many were found."""
        num_operations = 0
        for replica in self.replicas.values():
            for run in replica.core.held.values():
                if replica.engine is None or run.phase != "loaded" or run.replays:
                    continue
                state = replica.engine.runs[run.model_id]
                applied = [seq_id for _, seq_id in [*state.applied, *state.gradient]]
                if not self._lanes[run.model_id].is_stuck:
                    assert applied == list(range(1, len(applied) + 1)), f"{run.model_id} has {applied}"
                num_operations += len(applied)
        return num_operations
