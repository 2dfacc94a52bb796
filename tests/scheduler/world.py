"""The real core between a journal in memory and an engine that keeps count; anything may be killed at any moment.

Every step is one small thing that can happen: a client submits, a transaction is applied, its answer arrives, the
engine carries out a command, a reply arrives, time passes, the engine or the server is killed, the latter also after
only some of the effects of a turn were performed.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.simulated import MemoryJournal, SimulatedEngine, SimulatedRun
from lorimer import types
from lorimer.engine import messages
from lorimer.errors import Busy, LorimerError
from lorimer.scheduler import events, journal, payloads
from lorimer.scheduler.core import Core
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.runs import Operation, operation_of
from lorimer.scheduler.samples import Sample
from lorimer.store.runs import RunValues

LIMITS = SchedulerLimits(max_loaded_runs=2, gap_seconds=60.0, snapshot_seconds=0.5, max_engine_deaths=10**6)
INFO = messages.ModelInfo(
    model_name="m", directory="", architecture="", vocab_size=1, max_context=1, num_parameters=1, dtype="float32",
    device="cpu", token_budget=8, eos_token_ids=[], target_modules=[],
)  # fmt: skip


@dataclass
class Tenant:
    """One client with one run: it numbers its operations, repeats what was not acknowledged, and never skips one."""

    user_id: str
    session_id: str
    model_id: str
    next_seq: int = 1
    kinds: dict[int, str] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    acknowledged: dict[int, str] = field(default_factory=dict)
    """request_id by seq_id."""
    refused: set[int] = field(default_factory=set)

    @property
    def unacknowledged(self) -> list[int]:
        return [seq for seq in range(self.next_seq) if seq not in self.acknowledged and seq not in self.refused]


class World:
    def __init__(self, seed: int = 0, num_tenants: int = 3, limits: SchedulerLimits = LIMITS) -> None:
        self.random = random.Random(seed)
        self.limits = limits
        self.journal = MemoryJournal()
        self.disk: dict[str, SimulatedRun] = {}
        self.now = 1000.0
        self.num_starts = self.num_kills = self.num_engine_kills = self.num_requests = self.num_early = 0
        self.answers: Counter[str] = Counter()
        """How many times each request was answered by the present server."""
        self.engine: SimulatedEngine | None = None
        self.is_engine_wanted = False
        self.tenants = [self._tenant(number) for number in range(num_tenants)]
        self.samples: dict[str, Sample] = {}
        self._start()

    def _tenant(self, number: int) -> Tenant:
        return Tenant(f"u{number % 2}", f"s{number}", f"s{number}:train:0")

    # ── what can happen ───────────────────────────────────────────────────────────────────────────────

    def submit(self, tenant: Tenant, seq_id: int) -> None:
        """Send an operation for the first time or again."""
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        if seq_id == 0:
            self._submit_creation(tenant, request_id)
            return
        run = self.journal.runs.get(tenant.model_id)
        if run is None:
            return  # not created yet
        if seq_id not in tenant.payloads:
            kind = tenant.kinds.setdefault(seq_id, self._choose_kind(tenant))
            tenant.payloads[seq_id] = self._payload(tenant, kind, seq_id)
        kind, payload = tenant.kinds[seq_id], tenant.payloads[seq_id]
        operation = Operation(request_id, tenant.user_id, "s", "m", tenant.model_id, seq_id, kind, payload=payload)
        if kind in ("forward", "forward_backward"):
            operation.tokens = 4
        self.post(events.Submitted(operation, run))

    def _submit_creation(self, tenant: Tenant, request_id: str) -> None:
        session_id = tenant.session_id
        creation = Operation(
            request_id, tenant.user_id, session_id, "m", f"{session_id}:models", 0, "create_model",
            payload=payloads.encode_payload(payloads.CreateModel()),
        )  # fmt: skip
        values = RunValues("m", 4, 0, True, True, True, {}, "adamw")
        self.post(events.CreateSubmitted(journal.AcceptRun(creation, None, values, 10)))

    def _choose_kind(self, tenant: Tenant) -> str:
        kinds = ["forward_backward", "forward_backward", "optim_step", "forward", "save_weights"]
        return self.random.choice(kinds + (["load_weights"] if self._saved_names(tenant) else []))

    def _saved_names(self, tenant: Tenant) -> list[str]:
        prefix = f"{tenant.model_id}/"
        return sorted(name for key, name in self.journal.weights.items() if key.startswith(prefix))

    def _payload(self, tenant: Tenant, kind: str, seq_id: int) -> bytes:
        match kind:
            case "optim_step":
                return payloads.encode_payload(payloads.OptimStep(params={"seq_id": float(seq_id)}))
            case "save_weights":
                return payloads.encode_payload(payloads.Save(checkpoint_kind="training", name=f"n{seq_id}"))
            case "load_weights":
                names = self._saved_names(tenant)
                name = names[seq_id % len(names)]
                return payloads.encode_payload(payloads.Load(path="p", weights_name=name, optimizer=True))
        return b"data"

    def submit_sample(self, num_samples: int = 1) -> None:
        self.num_requests += 1
        params = types.SamplingParams(max_tokens=4, seed=1)
        request = types.SampleRequest(
            num_samples=num_samples,
            prompt=types.ModelInput.from_ints([1]),
            sampling_params=params,
            seq_id=self.num_requests,
        )
        sample = Sample(
            f"r{self.num_requests}", self.random.choice(["u0", "u1"]), "s", "m", "sampler", self.num_requests, "sample",
            tokens=1, payload=b"sample", request=request, weights_id=None,
        )  # fmt: skip
        self.samples[sample.request_id] = sample
        self.post(events.Submitted(sample))

    def apply_commit(self) -> bool:
        """Apply the oldest transaction; its answer is on its way."""
        if not self.commits:
            return False
        transaction = self.commits.popleft()
        self._answer(transaction)
        return True

    def apply_read(self) -> bool:
        if not self.reads:
            return False
        self._answer(self.reads.popleft())
        return True

    def _answer(self, transaction: journal.Transaction) -> None:
        try:
            self.inbox.append(events.Committed(transaction, self.journal.apply(transaction)))
        except LorimerError as error:
            self.inbox.append(events.CommitFailed(transaction, error))

    def compute(self) -> bool:
        """Let the engine carry out its oldest command; the reply is on its way."""
        if self.engine is None or not self.commands:
            return False
        command, to = self.commands.popleft()
        self.now += 0.1
        self.inbox.append(events.Replied(to, self.engine.run(command)))
        return True

    def engine_ready(self) -> bool:
        if self.engine is not None or not self.is_engine_wanted:
            return False
        self.engine = SimulatedEngine(self.disk)
        self.inbox.append(events.EngineReady(INFO))
        return True

    def pass_time(self) -> bool:
        """Let the next timer run down."""
        if not self.timers:
            return False
        self.timers.sort(key=lambda item: item[0])
        at, timer = self.timers.pop(0)
        self.now = max(self.now, at)
        self.inbox.append(events.TimerFired(timer))
        return True

    def turn(self, max_events: int = 1000, max_effects: int | None = None) -> bool:
        """Hand events to the core and perform its effects, only the first ``max_effects`` if the server dies then."""
        if not self.inbox and max_effects is None:
            return False
        taken = [self.inbox.popleft() for _ in range(min(max_events, len(self.inbox)))]
        effects = self.core.handle(taken, self.now)
        for effect in effects[:max_effects]:
            self._perform(effect)
        return True

    def kill_engine(self) -> bool:
        if self.engine is None:
            return False
        self.num_engine_kills += 1
        self.engine = None
        self.commands.clear()
        self.inbox.append(events.EngineEnded("killed"))
        self.is_engine_wanted = True
        return True

    def kill_server(self, num_effects: int, num_commits: int) -> None:
        """Lose all that is in memory, after a part of the next turn's effects; start again from the journal.

        ``num_commits`` transactions that were on their way to the database still get there.
        """
        self.num_kills += 1
        self.turn(max_effects=num_effects)
        for _ in range(num_commits):
            self.apply_commit()
        self._start()

    def _start(self) -> None:
        self.num_starts += 1
        self.core = Core("m", self.limits, Path("/data/weights"), Path("/data/snapshots"), self.num_starts)
        self.engine = None
        self.is_engine_wanted = False
        self.commits: deque[journal.Transaction] = deque()
        self.reads: deque[journal.Transaction] = deque()
        self.inbox: deque[events.Event] = deque()
        self.commands: deque[tuple[messages.Command | Operation, events.ReplyTo]] = deque()
        self.timers: list[tuple[float, events.Timer]] = []
        self.answers = Counter()
        for row in self.journal.unfinished():
            if row.kind == "sample":
                known = self.samples[row.request_id]
                sample = Sample(
                    row.request_id, row.user_id, "s", "m", row.lane, row.seq_id or 0, "sample", tokens=1,
                    request=known.request, weights_id=None,
                )  # fmt: skip
                self.inbox.append(events.Arrived(sample))
                continue
            operation = operation_of(row, "m")
            is_creation = row.lane.endswith(":models")
            if is_creation:
                operation.payload = self.journal.payloads[row.request_id]
            run = self.journal.runs[f"{row.session_id}:train:{row.seq_id}" if is_creation else row.lane]
            self.inbox.append(events.Arrived(operation, run, is_creation))
        for tenant in self.tenants:
            for seq_id in tenant.unacknowledged:
                self.submit(tenant, seq_id)

    # ── effects ───────────────────────────────────────────────────────────────────────────────────────

    def post(self, event: events.Event) -> None:
        self.inbox.append(event)

    def _perform(self, effect: events.Effect) -> None:  # noqa: C901 (one case for each effect)
        match effect:
            case events.Commit(transaction=transaction):
                (self.reads if transaction.only_reads else self.commits).append(transaction)
            case events.Send(command=command, to=to):
                self.commands.append((command, to))
            case events.SendBatch(operations=operations):
                for operation in operations:
                    assert operation.flight is not None
                    self.commands.append((operation, events.OperationReply(operation, operation.flight)))
            case events.SendEarly(operation=operation, flight=flight):
                assert operation.kind == "forward", "only what changes nothing is computed before it is committed"
                self.num_early += 1
                self.commands.append((operation, events.OperationReply(operation, flight)))
            case events.SendSample(operation=sample):
                assert sample.flight is not None
                self.commands.append((sample, events.OperationReply(sample, sample.flight)))
            case events.Admit(operation=operation, request_id=request_id):
                self._acknowledge(operation, request_id)
            case events.Refuse(operation=operation, error=error):
                if not isinstance(error, Busy):
                    self._tenant_of(operation).refused.add(operation.seq_id)
            case events.Resolve(operation=operation):
                self.answers[operation.request_id] += 1
                row = self.journal.rows[operation.request_id]
                assert row.state != "queued", f"{row} was answered before its end was committed"
            case events.SetTimer(timer=timer, seconds=seconds):
                self.timers.append((self.now + seconds, timer))
            case events.StartEngine():
                self.is_engine_wanted = True
            case events.Verify(model_id=model_id, name=name):
                self.inbox.append(events.Verified(model_id, name, name in self.disk))
            case events.Discard(names=names):
                for name in names:
                    self.disk.pop(name, None)

    def _tenant_of(self, operation: Operation) -> Tenant:
        return next(t for t in self.tenants if operation.lane in (t.model_id, f"{t.session_id}:models"))

    def _acknowledge(self, operation: Operation, request_id: str) -> None:
        if not isinstance(operation, Sample):
            assert request_id in self.journal.rows, "acknowledged before it was committed"
            known = self._tenant_of(operation).acknowledged.setdefault(operation.seq_id, request_id)
            assert known == request_id, "one operation was acknowledged under two names"

    # ── running ───────────────────────────────────────────────────────────────────────────────────────

    def step(self, kill_rate: float = 0.0) -> None:
        """Let one thing happen, chosen at random."""
        chance = self.random.random()
        if chance < kill_rate:
            self.kill_server(self.random.randrange(5), self.random.randrange(4))
        elif chance < 2 * kill_rate:
            self.kill_engine()
        else:
            steps: dict[Callable[[], object], float] = {
                self._client_step: 3,
                self.turn: 6,
                self.apply_commit: 5,
                self.apply_read: 5,
                self.compute: 5,
                self.engine_ready: 4,
                self._early_timer: 0.2,
                self._lone_forward: 0.5,
            }
            self.random.choices([*steps], [*steps.values()])[0]()

    def _early_timer(self) -> None:
        """Let a timer other than that of a gap run down: clients here are never slow."""
        if any(timer.kind != "gap" for _, timer in self.timers):
            gaps = [item for item in self.timers if item[1].kind == "gap"]
            self.timers = [item for item in self.timers if item[1].kind != "gap"]
            self.pass_time()
            self.timers += gaps

    def _lone_forward(self) -> None:
        """Let the engine become idle, then submit a forward, which it gets before the row is committed."""
        for _ in range(1000):
            if not any([self.turn(), self.apply_commit(), self.apply_read(), self.compute(), self.engine_ready()]):
                break
        tenant = self.random.choice(self.tenants)
        if 0 in tenant.acknowledged:
            seq_id = tenant.next_seq
            tenant.next_seq += 1
            tenant.kinds[seq_id] = "forward"
            self.submit(tenant, seq_id)

    def _client_step(self) -> None:
        tenant = self.random.choice(self.tenants)
        if self.random.random() < 0.1:
            self.submit_sample()
        elif tenant.next_seq > 1 and self.random.random() < 0.3:
            self.submit(tenant, self.random.randrange(0, tenant.next_seq))  # a retry
        elif 0 not in tenant.acknowledged:
            self.submit(tenant, 0)
        else:
            # Several on their way, which may overtake one another.
            numbers = list(range(tenant.next_seq, tenant.next_seq + self.random.randrange(1, 4)))
            tenant.next_seq = numbers[-1] + 1
            self.random.shuffle(numbers)
            for seq_id in numbers:
                self.submit(tenant, seq_id)

    def settle(self, max_steps: int = 20_000) -> None:
        """Let everything go on undisturbed until nothing is left to do."""
        for _ in range(max_steps):
            if any([self.turn(), self.apply_commit(), self.apply_read(), self.compute(), self.engine_ready()]):
                continue
            unacknowledged = [
                (tenant, seq) for tenant in self.tenants for seq in tenant.unacknowledged if tenant.next_seq > 1
            ]
            if unacknowledged:
                for tenant, seq_id in unacknowledged:
                    self.submit(tenant, seq_id)
            elif any(self.journal.unfinished()) and self.timers:
                self.pass_time()
            else:
                break
        else:
            raise AssertionError("the core never comes to rest")

    def check(self) -> None:
        """Every acknowledged operation was applied once and in order, and every waiter was answered once."""
        assert not list(self.journal.unfinished()), f"never answered: {list(self.journal.unfinished())[:3]}"
        assert set(self.answers.values()) <= {1}, f"answered twice: {self.answers.most_common(3)}"
        for tenant in self.tenants:
            for seq_id, request_id in tenant.acknowledged.items():
                row = self.journal.rows[request_id]
                assert row.state == "done", f"operation {seq_id} of {tenant.model_id} is {row.state}: {row.error}"
                assert row.kind == tenant.kinds.get(seq_id, "create_model")
            if 0 in tenant.acknowledged:
                assert self.weights(tenant) == self.expected(tenant)

    def weights(self, tenant: Tenant) -> SimulatedRun:
        """Save the run, and return what was saved."""
        seq_id = tenant.next_seq
        tenant.next_seq += 1
        tenant.kinds[seq_id] = "save_weights"
        self.submit(tenant, seq_id)
        self.settle()
        return self.disk[self.journal.weights[f"{tenant.model_id}/{seq_id}"]]

    def expected(self, tenant: Tenant) -> SimulatedRun:
        """Fold over the operations of a run, each applied once and in the order of their numbers; check every save."""
        run = SimulatedRun()
        for row in self.journal.lane(tenant.model_id, 0):
            match row.kind:
                case "forward_backward":
                    run.gradient.append((row.kind, row.seq_id))
                case "optim_step":
                    run.applied += [*run.gradient, ("optim_step", row.seq_id or 0)]
                    run.gradient = []
                case "load_weights":
                    payload = payloads.decode_payload(tenant.payloads[row.seq_id])
                    run = self.disk[payload.weights_name].copy()
                case "save_weights":
                    saved = self.disk[self.journal.weights[f"{tenant.model_id}/{row.seq_id}"]]
                    assert saved == run, f"operation {row.seq_id} of {tenant.model_id} saved something else"
        return run
