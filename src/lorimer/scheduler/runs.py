"""Runs and operations as the scheduler core sees them. An operation's status and a run's fields change only here.

``Operation.status`` is assigned by `Operation.advance`, which refuses every step that is not in this table:

    received   → held        its row is committed
    received   → queued      (samples and losses, which need no order) its row is committed
    held       → queued      its run is loaded and no lower seq_id is missing
    queued     → running     it was sent to the engine
    running    → committing  the engine replied; a transaction with the result is under way
    running    → done        a replay: the result was committed before the crash
    queued, running → held   the run left its engine; the lane is rebuilt when the run is restored
    running    → queued      (samples and losses) the engine ended
    held, queued → committing  it fails without being computed: too late, behind a gap, of a corrupted run
    committing → committing  the result cannot be committed, so that a failure is
    committing → held        a load whose run left its engine before the snapshot that ends it could be committed
    committing → done, failed  the transaction is committed

``RunState.phase`` is assigned by `RunState.enter`:

    absent    → restoring    an engine has room for the run
    restoring → loaded       its snapshot is loaded and its lane rebuilt from the journal
    restoring, loaded → absent  the engine ended, evicted the run, or failed to restore it
    absent, restoring, loaded → corrupted  the run cannot go on
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lorimer.errors import CheckpointError, InvalidInput
from lorimer.scheduler.lanes import Gap, Lane
from lorimer.scheduler.payloads import AnyPayload
from lorimer.store.futures import FutureRow
from lorimer.store.runs import Run

Status = Literal["received", "held", "queued", "running", "committing", "done", "failed"]
Phase = Literal["absent", "restoring", "loaded", "corrupted"]
SavingPurpose = Literal["due", "creation", "park", "close"]
QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

STATUS_STEPS: dict[Status, frozenset[Status]] = {
    "received": frozenset({"held", "queued"}),
    "held": frozenset({"queued", "committing"}),
    "queued": frozenset({"running", "held", "committing"}),
    "running": frozenset({"committing", "done", "held", "queued"}),
    "committing": frozenset({"committing", "held", "done", "failed"}),
    "done": frozenset(),
    "failed": frozenset(),
}
PHASE_STEPS: dict[Phase, frozenset[Phase]] = {
    "absent": frozenset({"restoring", "corrupted"}),
    "restoring": frozenset({"loaded", "absent", "corrupted"}),
    "loaded": frozenset({"absent", "corrupted"}),
    "corrupted": frozenset(),
}
TRAINING = frozenset({"forward", "forward_backward"})
"""Kinds that are batched with those of other runs; every other kind is a barrier."""
REPLAYED = frozenset({"forward_backward", "optim_step", "load_weights"})
"""Kinds that change a run and are replayed after a crash.

A load ends with a snapshot, so it is replayed only if that is damaged.
"""
MISSING = "missing"
"""The kind of the row that represents abandoned seq_ids: its seq_id is the last of them, ``tokens`` their number."""
BARRIER_TOKENS = 16
"""The cost of an operation without tokens in the accounts of fair sharing."""
SUSPICIOUS_DEATHS = 2
"""An operation or run that was active at this many engine deaths is computed alone next."""


@dataclass(frozen=True)
class Outcome:
    """The state or result of a request."""

    state: Literal["pending", "done", "failed", "gone"]
    queue_state: QueueState = "active"
    reason: str = ""
    result: bytes = b""
    result_format: Literal["json", "protobuf"] = "json"
    error: str = ""
    category: Literal["user", "server", "unknown"] = "unknown"


@dataclass(eq=False)
class Operation:
    """One request, from its arrival on; it is accepted once its row is committed."""

    request_id: str
    user_id: str
    session_id: str
    base_model: str
    lane: str
    """The scope of seq_ids: the run, the sampling session, or a session's models or losses."""
    seq_id: int
    kind: str
    tokens: int = 0
    payload: bytes = b""
    """Dropped once sent; read from the journal if it must be sent again."""
    payload_sha256: str = ""
    """The hash of the submitted payload, if it was computed."""
    reads: str | None = None
    """The weights it loads; they are not deleted before."""
    place: str | None = None
    """The replica that computes it."""
    is_replay: bool = False
    """It finished before a crash and is computed again for its effect on the run."""
    received: float = 0.0
    """Monotonic time of arrival."""
    started: float = 0.0
    """Monotonic time when it was last sent to an engine; 0 before."""
    answered: float = 0.0
    """Monotonic time of the engine's last reply."""
    deaths: int = 0
    """How many engines died while computing it, or failed on it with an internal error."""
    status: Status = "received"
    flight: "Flight | None" = None
    """The commands sent for it and the replies, while it is running or committing."""
    early: "Flight | None" = None
    """The command of a ``forward`` that was sent before its row was committed; ``flight`` once its turn comes."""
    size: int = field(init=False)
    """Bytes of the payload as submitted."""

    def __post_init__(self) -> None:
        self.size = len(self.payload)

    def blame(self) -> None:
        """An engine ended while it computed this, or failed at it by an error of its own."""
        self.deaths += 1

    def advance(self, status: Status) -> None:
        assert status in STATUS_STEPS[self.status], f"{self.status} → {status} of {self.kind} {self.seq_id}"
        self.status = status

    def send_early(self) -> "Flight":
        self.early = Flight(is_early=True)
        return self.early

    @property
    def is_training(self) -> bool:
        return self.kind in TRAINING

    @property
    def cost(self) -> int:
        """Its number of tokens in the accounts of fair sharing."""
        return self.tokens or BARRIER_TOKENS

    @property
    def is_open(self) -> bool:
        """Whether its row is committed and its end is not."""
        return self.status not in ("received", "done", "failed")

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPICIOUS_DEATHS and self.status not in ("committing", "done", "failed")


@dataclass(eq=False)
class Flight:
    """The commands of an operation, in order, and the replies so far."""

    num_commands: int = 1
    payload: AnyPayload | None = None
    target: str | None = None
    """Name of the directory that the engine writes."""
    replies: list[Any] = field(default_factory=list)
    """A result or an exception for each command."""
    is_complete: bool = False
    error: Exception | None = None
    """The first of the replies that is one."""
    is_early: bool = False
    """It was sent before the row of its operation was committed."""
    verified: str | None = None
    """For a load: the run's previous newest snapshot, if it was found intact."""
    is_verifying: bool = False
    """For a load: that snapshot is being verified, or was."""
    is_committing: bool = False
    """For a load: the transaction that ends it is in progress."""

    def receive(self, reply: Any) -> None:
        """Keep the reply to the next command."""
        self.replies.append(reply)
        self.is_complete = len(self.replies) == self.num_commands
        if self.error is None and isinstance(reply, Exception):
            self.error = reply


# ── one run ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Journal:
    """Everything stored of a run: its newest snapshot, named in its row, and the rows after it."""

    run: Run
    rows: list[FutureRow]
    payloads: dict[str, bytes]
    """By request_id, the payloads of operations that will be computed."""
    creation: bytes | None
    """The payload of its creation, if it has no snapshot yet."""
    losses: list[bytes] = field(default_factory=list)
    """Payloads of the custom losses of its session."""


@dataclass
class Restore:
    """One attempt to load a run into the engine."""

    number: int
    stage: Literal["settling", "reading", "loading", "saving", "creating"] = "settling"
    journal: Journal | None = None
    num_replies: int = 0
    """The number of commands without a reply."""
    error: Exception | None = None
    is_load_error: bool = False
    """Loading the snapshot failed."""
    source: Literal["fresh", "snapshot", "weights"] = "fresh"


@dataclass
class Saving:
    """A snapshot being written, and what follows it."""

    purpose: SavingPurpose
    is_forced: bool = False
    """Evict the run even if operations wait for it."""
    stage: Literal["draining", "saving", "settling", "verifying", "committing"] = "draining"
    name: str = ""
    seq_id: int = 0
    """The last operation included in it."""
    work_seconds: float = 0.0
    """The engine time that it saves in a replay."""
    verified: str | None = None


@dataclass(eq=False)
class RunState:
    row: Run
    last_used: float
    """When a client last used it or got a result of it."""
    model_id: str = field(init=False)
    phase: Phase = "absent"
    error: str = ""
    """Why it is corrupted."""
    lane: Lane | None = None
    """Built when the run is restored; until then operations are only collected."""
    operations: dict[int, Operation] = field(default_factory=dict)
    """By seq_id, all operations that are accepted, or about to be, and whose end is not committed."""
    skipped: set[int] = field(default_factory=set)
    """seq_ids consumed while there was no lane."""
    creation: Operation | None = None
    """The request that created it, until that is answered."""
    restore: Restore | None = None
    saving: Saving | None = None
    is_leaving: bool = False
    """It is being saved before its eviction."""
    loading: Operation | None = None
    """A load in progress, after which the run may have to be restored; nothing is sent behind it."""
    num_commits: int = 0
    """Transactions in progress that change its journal; it is not read before they end."""
    num_restores: int = 0
    gap: Gap = field(default_factory=Gap)
    is_abandoning: bool = False
    """Missing seq_ids are being abandoned; nothing is sent before that is committed.

    Otherwise operations behind them could be computed, and a replay would wait for the missing ones again.
    """
    sent_seq: int = 0
    """The last seq_id sent to the engine that holds the run."""
    running: set[Operation] = field(default_factory=set)
    replays: set[Operation] = field(default_factory=set)
    """Replayed operations that are not computed yet."""
    deaths: int = 0
    """How many engines died while restoring it."""
    failures: int = 0
    """How often restoring it has failed since it was last loaded."""
    retry_at: float = 0.0
    loaded_at: float = 0.0
    left_at: float = 0.0
    """When it last left an engine."""
    has_had_turn: bool = False
    has_had_barrier: bool = False
    """Whether anything, and whether a barrier, was sent for it since it was loaded."""
    work_seconds: float = 0.0
    """Engine time since the last snapshot."""
    snapshot_cost: float = 0.0
    """Seconds the last snapshot took to write or, until one was written here, to read."""

    def __post_init__(self) -> None:
        self.model_id = self.row.model_id
        if self.row.corrupted:
            self.corrupt(self.row.corrupted)

    @property
    def has_work(self) -> bool:
        return bool(self.operations) or self.creation is not None

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, with nothing to do."""
        is_busy = self.has_work or self.running or self.replays or self.num_commits or self.saving
        return self.phase == "loaded" and not is_busy

    @property
    def is_forgettable(self) -> bool:
        """Whether the store knows everything about it."""
        is_quiet = not (self.has_work or self.saving or self.num_commits or self.restore)
        return self.phase in ("absent", "corrupted") and is_quiet

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPICIOUS_DEATHS and self.phase != "corrupted" and self.has_work

    @property
    def has_suspect(self) -> bool:
        return self.is_suspect or any(operation.is_suspect for operation in self.operations.values())

    @property
    def waiting_since(self) -> float:
        """When it started to wait for an engine; an evicted run starts anew, however old its operations are."""
        first = self.creation or next(iter(self.operations.values()), None)
        return max(self.left_at, first.received if first is not None else self.last_used)

    @property
    def ready(self) -> Sequence[Operation]:
        """Operations that can be sent to the engine now, in order."""
        if self.lane is None or self.phase != "loaded" or self.loading or self.is_leaving or self.is_abandoning:
            return ()
        return self.lane.ready

    @property
    def missing_seq(self) -> int | None:
        """The seq_id that its operations wait for, if any."""
        return self.lane.missing if self.lane is not None else None

    def is_next(self, operation: Operation) -> bool:
        """Return whether an operation about to be committed is the only one of a loaded run and next in its lane."""
        is_alone = len(self.operations) == 1 and self.operations.get(operation.seq_id) is operation
        is_moving = self.saving or self.loading or self.is_abandoning or self.running or self.replays
        is_expected = self.lane is not None and self.lane.next_seq == operation.seq_id
        return self.phase == "loaded" and is_alone and is_expected and not is_moving

    def has_passed(self, seq_id: int) -> bool:
        """Return whether the run is known to be beyond this seq_id."""
        return seq_id <= self.row.resume_seq or (self.lane is not None and self.lane.has_passed(seq_id))

    def has_open_before(self, seq_id: int) -> bool:
        """Return whether an accepted operation with a lower seq_id has no committed end."""
        return any(seq < seq_id and operation.is_open for seq, operation in self.operations.items())

    def enter(self, phase: Phase) -> None:
        assert phase in PHASE_STEPS[self.phase], f"{self.phase} → {phase} of {self.model_id}"
        self.phase = phase

    def accept(self, operation: Operation, now: float) -> bool:
        """Add an operation whose row is committed. Return False if the run is already beyond its seq_id."""
        self.last_used = now
        self.operations[operation.seq_id] = operation
        if operation.status != "received":
            return True  # the lane was rebuilt from the journal, which included its row
        operation.advance("held")
        if self.lane is not None:
            if self.lane.has_passed(operation.seq_id):
                return False
            self.lane.add(operation)
        return True

    def forget(self, operation: Operation, now: float) -> bool:
        """Drop an operation whose end is committed. Return False if it was dropped before."""
        self.running.discard(operation)
        if self.operations.get(operation.seq_id) is not operation:
            return False
        del self.operations[operation.seq_id]
        self.last_used = now
        return True

    def corrupt(self, reason: str) -> None:
        """Mark the run as corrupted; what waits for it fails."""
        self.restore = None
        self.error = reason
        self.enter("corrupted")

    def blame(self) -> None:
        """An engine ended while it restored the run."""
        self.deaths += 1

    def adopt(self, row: Run) -> None:
        """Replace its row by the one in the store."""
        self.row = row

    def count_commit(self, change: Literal[1, -1]) -> None:
        self.num_commits += change

    def begin_creation(self, creation: Operation) -> None:
        self.creation = creation

    def end_creation(self, now: float) -> Operation | None:
        """Return the request that created the run, whose end is committed or about to be."""
        creation, self.creation, self.last_used = self.creation, None, now
        return creation

    def end_abandoning(self) -> None:
        self.is_abandoning = False

    def begin_saving(self, purpose: SavingPurpose, *, is_forced: bool = False) -> Saving:
        self.saving, self.is_leaving = Saving(purpose, is_forced), purpose == "park"
        return self.saving

    def write_saving(self, saving: Saving, name: str) -> None:
        """Record that the engine writes the run as it is after the last operation sent."""
        saving.stage, saving.name = "saving", name
        saving.seq_id = 0 if saving.purpose == "creation" else self.sent_seq
        saving.work_seconds, self.work_seconds = self.work_seconds, 0.0

    def saving_written(self, saving: Saving, seconds: float) -> None:
        self.snapshot_cost = seconds
        saving.stage = "settling"

    def snapshot_read(self, seconds: float) -> None:
        self.snapshot_cost = self.snapshot_cost or seconds

    def end_saving(self) -> None:
        self.saving, self.is_leaving = None, False

    def lose_saving(self) -> None:
        """Record that the engine ended before it had written the snapshot."""
        if self.saving is not None:
            self.work_seconds += self.saving.work_seconds
            self.end_saving()

    def put_off(self, retry_at: float) -> None:
        """Record that restoring failed; it may be retried at ``retry_at``."""
        self.failures += 1
        self.retry_at = retry_at

    def skip(self, seq_id: int) -> None:
        if self.lane is not None:
            self.lane.skip(seq_id)
        else:
            self.skipped.add(seq_id)

    def abandon(self, gaps: Sequence[tuple[int, int]]) -> list[Operation]:
        """Consume missing seq_ids. Return the operations behind them, which fail."""
        assert self.lane is not None
        held = self.lane.held()
        self.lane.give_up(gaps, held)
        for operation in held:
            operation.advance("committing")
        self.is_abandoning = True
        return held

    def send(self, operation: Operation, flight: Flight, now: float) -> None:
        """Move the first ready operation to the engine."""
        assert self.lane is not None
        taken = self.lane.ready.popleft()
        assert taken is operation
        operation.advance("running")
        operation.started, operation.flight = now, flight
        if operation.early is not None:
            operation.early, operation.payload = None, b""
        self.running.add(operation)
        self.sent_seq, self.has_had_turn = operation.seq_id, True
        self.has_had_barrier |= not operation.is_training
        if operation.kind == "load_weights":
            self.loading = operation

    def credit(self, operation: Operation, seconds: float) -> None:
        """Count the engine time of an operation that was computed; a replay is done, and the run above suspicion."""
        self.replays.discard(operation)
        if not self.replays:
            self.deaths = 0
        self.work_seconds += seconds

    def end_load(self) -> None:
        self.loading = None

    def begin_restore(self) -> Restore:
        self.enter("restoring")
        self.num_restores += 1
        self.restore = Restore(self.num_restores)
        return self.restore

    def loaded(self, now: float) -> None:
        """Record that the engine holds the run and its lane is rebuilt."""
        self.enter("loaded")
        self.restore = None
        self.loaded_at, self.failures = now, 0
        self.has_had_turn = self.has_had_barrier = False
        if not self.replays:
            self.deaths = 0

    def leave_engine(self, now: float) -> None:
        """Record that no engine holds the run; it is restored from the journal."""
        self.restore = None
        if self.phase == "loaded":
            self.left_at = now
        if self.phase != "corrupted":
            if self.phase != "absent":
                self.enter("absent")
            for operation in self.operations.values():
                operation.early = None
                if operation.status in ("queued", "running"):
                    operation.advance("held")
                    operation.flight = None
        self.lane = self.loading = None
        self.gap.is_timed = False
        self.running, self.replays = set(), set()


def late(operation: Operation) -> InvalidInput:
    return InvalidInput(f"operation {operation.seq_id} came when later ones had been computed; use a new seq_id")


def needs_payload(row: FutureRow) -> bool:
    """Return whether an operation of the journal will be computed (again)."""
    return row.state == "queued" or (row.state == "done" and row.kind in REPLAYED)


def rebuild(run: RunState, journal: Journal) -> list[Operation]:
    """Rebuild the lane from journal rows after the snapshot plus operations accepted since they were read.

    Return the operations that are too late: later ones have been computed without them.
    """
    applied = max(run.row.resume_seq, 0)  # seq_id 0 is the run's creation
    lane = Lane(applied + 1)
    for row in journal.rows:
        if row.kind == MISSING and row.seq_id is not None:
            lane.skip(row.seq_id - max(row.tokens, 1) + 1, row.seq_id)
    for seq_id in run.skipped:
        lane.skip(seq_id)
    laid: set[Operation] = set()
    for row in journal.rows:
        assert row.seq_id is not None
        if lane.has_passed(row.seq_id):
            continue
        if not needs_payload(row):
            lane.skip(row.seq_id)
            continue
        operation = _operation_of_row(run, row)
        if operation.status == "committing":  # its failure is being committed
            lane.skip(row.seq_id)
            continue
        operation.payload = operation.payload or journal.payloads.get(row.request_id, b"")
        if not operation.payload:
            raise CheckpointError(f"the payload of operation {row.seq_id} is missing from the journal")
        lane.add(operation)
        laid.add(operation)
    late = []
    for seq_id, operation in sorted(run.operations.items()):
        if operation.status == "held" and operation not in laid and not lane.has_passed(seq_id):
            lane.add(operation)
        elif operation.status == "held" and operation not in laid:
            late.append(operation)
    run.lane, run.replays = lane, {operation for operation in laid if operation.is_replay}
    run.sent_seq = applied
    run.skipped.clear()
    return late


def _operation_of_row(run: RunState, row: FutureRow) -> Operation:
    """Return the operation of a row: a replay if it is done, else the open one."""
    if row.state == "done":
        replay = operation_of(row, run.row.base_model, is_replay=True)
        replay.advance("held")
        return replay
    assert row.seq_id is not None
    known = run.operations.get(row.seq_id)
    if known is None or known.request_id != row.request_id:
        known = run.operations[row.seq_id] = operation_of(row, run.row.base_model)  # its submit may have failed
    if known.status == "received":
        known.advance("held")
    return known


def operation_of(row: FutureRow, base_model: str, *, is_replay: bool = False, payload: bytes = b"") -> Operation:
    """Return the operation of a journal row."""
    return Operation(
        request_id=row.request_id,
        user_id=row.user_id,
        session_id=row.session_id or "",
        base_model=base_model,
        lane=row.lane,
        seq_id=row.seq_id or 0,
        kind=row.kind,
        tokens=row.tokens,
        payload=payload,
        is_replay=is_replay,
        place=row.place,
        deaths=0 if is_replay else row.deaths,
    )
