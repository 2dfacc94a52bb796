"""A run as the scheduler sees it: its order, what is open, and whether an engine holds it.

After a crash, or when a run comes back from disk, ``rebuild`` lays out its lane anew from the journal: operations that
were finished and changed the run are done again, unfinished ones follow as if nothing had happened.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lorimer.errors import CheckpointError
from lorimer.scheduler.lanes import Lane
from lorimer.scheduler.operation import REPLAYED, SUSPICIOUS_DEATHS, Operation
from lorimer.store.futures import FutureRow
from lorimer.store.runs import Run


@dataclass(eq=False)
class RunState:
    run: Run
    lane: Lane | None = None
    """Laid out when the run is brought into an engine; until then operations only gather."""
    phase: Literal["absent", "restoring", "loaded", "corrupted"] = "absent"
    """Whether an engine holds it."""
    error: str = ""
    """Why it is corrupted."""
    operations: dict[int, Operation] = field(default_factory=dict)
    """By number, everything accepted, or about to be, whose result is not yet on record."""
    passed: set[int] = field(default_factory=set)
    """Numbers refused while the lane was being laid out."""
    creation: Operation | None = None
    """The request that made it, until that is answered."""
    restoring: "asyncio.Task[None] | None" = None
    saving: "asyncio.Task[None] | None" = None
    recording: "set[asyncio.Task[None]]" = field(default_factory=set)
    """Results on their way from the engine to the journal, which is read only after them."""
    gap: asyncio.TimerHandle | None = None
    sent_seq: int = 0
    """The last number given to the engine that holds the run."""
    sent: set[Operation] = field(default_factory=set)
    """Given to the engine and not answered."""
    replays: set[Operation] = field(default_factory=set)
    is_loading: bool = False
    """A load is under way, after which the run may have to be restored; nothing is sent behind it."""
    is_leaving: bool = False
    """It makes room for another run; nothing is sent."""
    deaths: int = 0
    """How many engines ended while they restored it."""
    failures: int = 0
    """How many times restoring it has failed for no fault of its own."""
    retry_at: float = 0.0
    loaded_at: float = 0.0
    left_at: float = 0.0
    """When an engine last let go of it."""
    has_had_turn: bool = False
    """Something was computed for it since it was loaded."""
    work_seconds: float = 0.0
    """Engine time since the last snapshot."""
    snapshot_cost: float = 0.0
    """Seconds the last snapshot took."""
    last_used: float = field(default_factory=time.monotonic)

    @property
    def model_id(self) -> str:
        return self.run.model_id

    @property
    def has_work(self) -> bool:
        return bool(self.operations) or self.creation is not None

    @property
    def is_idle(self) -> bool:
        """Loaded, with nothing to do."""
        has_work = self.has_work or self.sent or self.replays or self.recording or self.saving
        return self.phase == "loaded" and not has_work

    @property
    def is_forgettable(self) -> bool:
        """Nothing is known of it that the store does not have."""
        is_quiet = not (self.has_work or self.saving or self.recording or self.restoring)
        return self.phase in ("absent", "corrupted") and is_quiet

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPICIOUS_DEATHS and self.phase != "corrupted" and self.has_work

    @property
    def has_suspect(self) -> bool:
        return self.is_suspect or any(operation.is_suspect for operation in self.operations.values())

    @property
    def waiting_since(self) -> float:
        """Since when it waits for a place: one that had to leave waits anew, however old its operations are."""
        first = self.creation or next(iter(self.operations.values()), None)
        return max(self.left_at, first.received if first is not None else self.last_used)

    @property
    def ready(self) -> Sequence[Operation]:
        """What can be given to the engine now, in order."""
        if self.lane is None or self.phase != "loaded" or self.is_loading or self.is_leaving:
            return ()
        return self.lane.ready

    def has_passed(self, seq_id: int) -> bool:
        """Whether this number has gone by, as far as is known."""
        return seq_id <= self.run.resume_seq or (self.lane is not None and self.lane.has_passed(seq_id))

    def arrive(self, operation: Operation) -> bool:
        """Take an operation that is on record now; False if its number has gone by meanwhile."""
        if operation.is_accepted:
            return True  # the lane was laid out from the record
        operation.is_accepted = True
        if self.lane is not None:
            if self.lane.has_passed(operation.seq_id):
                return False
            self.lane.add(operation)
        return True

    def skip(self, seq_id: int) -> None:
        if self.lane is not None:
            self.lane.skip(seq_id)
        else:
            self.passed.add(seq_id)

    def forget_engine(self) -> None:
        """The engine that held the run is gone, or has let go of it."""
        if self.restoring is not None:
            self.restoring.cancel()
            self.restoring = None
        if self.phase == "loaded":
            self.left_at = time.monotonic()
        if self.phase != "corrupted":
            self.phase = "absent"
        self.lane = None
        self.is_loading = False
        self.sent, self.replays = set(), set()


MISSING = "missing"
"""The kind of the row that stands for numbers given up: the last of them, and in ``tokens`` how many."""


def needs_payload(row: FutureRow) -> bool:
    """Whether an operation of the journal will be computed (again)."""
    return row.state == "queued" or (row.state == "done" and row.kind in REPLAYED)


def rebuild(state: RunState, rows: Sequence[FutureRow], payloads: Mapping[str, bytes]) -> list[Operation]:
    """Lay the lane out from the journal after the snapshot, and from what has arrived since it was read.

    Gives the operations that came too late: later ones have been computed without them.
    """
    applied = max(state.run.resume_seq, 0)  # number 0 is the run's creation
    lane = Lane(applied + 1)
    for row in rows:
        if row.kind == MISSING and row.seq_id is not None:
            lane.skip(row.seq_id - max(row.tokens, 1) + 1, row.seq_id)
    for seq_id in state.passed:
        lane.skip(seq_id)
    laid: set[Operation] = set()
    for row in rows:
        assert row.seq_id is not None
        if lane.has_passed(row.seq_id):
            continue
        if not needs_payload(row):
            lane.skip(row.seq_id)
            continue
        operation = _laid_out(state, row)
        operation.payload = operation.payload or payloads.get(row.request_id, b"")
        if not operation.payload:
            raise CheckpointError(f"the record of operation {row.seq_id} is not complete")
        lane.add(operation)
        laid.add(operation)
    late = []
    for seq_id, operation in sorted(state.operations.items()):
        if operation.is_accepted and operation not in laid:
            late.append(operation) if lane.has_passed(seq_id) else lane.add(operation)
    state.lane, state.replays = lane, {operation for operation in laid if operation.is_replay}
    state.sent_seq = applied
    return late


def _laid_out(state: RunState, row: FutureRow) -> Operation:
    """The operation of a row: one to repeat if it is done, else the open one."""
    if row.state == "done":
        return operation_of(row, state.run.base_model, is_replay=True)
    assert row.seq_id is not None
    known = state.operations.get(row.seq_id)
    if known is None or known.request_id != row.request_id:
        # On record, although whoever submitted it was told that it might not be.
        known = state.operations[row.seq_id] = operation_of(row, state.run.base_model)
    known.is_accepted = True
    return known


def operation_of(row: FutureRow, base_model: str, *, is_replay: bool = False) -> Operation:
    """An operation of the journal, without its payload."""
    return Operation(
        request_id=row.request_id,
        user_id=row.user_id,
        session_id=row.session_id or "",
        base_model=base_model,
        lane=row.lane,
        seq_id=row.seq_id or 0,
        kind=row.kind,
        tokens=row.tokens,
        is_replay=is_replay,
    )
