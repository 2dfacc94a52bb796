"""The core's input (events) and output (effects). Data only; the driver carries both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lorimer.engine.messages import Command, ModelInfo, Result
from lorimer.scheduler.journal import AcceptRun, Transaction
from lorimer.scheduler.runs import Flight, Operation, Outcome
from lorimer.store.runs import Run

# ── events ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Submitted:
    """A request of a run, a sample or a custom loss arrived; answered by `Admit` or `Refuse`."""

    operation: Operation
    run: Run | None = None
    """The row of the run it belongs to."""


@dataclass(frozen=True, eq=False)
class CreateSubmitted:
    """A request to create a run arrived."""

    transaction: AcceptRun


@dataclass(frozen=True, eq=False)
class UnloadSubmitted:
    operation: Operation
    run: Run


@dataclass(frozen=True, eq=False)
class ConsumeSubmitted:
    """The server refused a submit with an error the client will not retry: its seq_id is consumed."""

    operation: Operation
    run: Run
    reason: str


@dataclass(frozen=True)
class Arrived:
    """A committed operation without an end, with the row of its run.

    Another process, or an earlier server, accepted it. One that the core already has is ignored.
    """

    operation: Operation
    run: Run | None = None
    is_creation: bool = False


@dataclass(frozen=True)
class Unloaded:
    """Another process accepted the unload of this run: evict it if it is idle."""

    model_id: str


@dataclass(frozen=True)
class Refused:
    """Another process refused the submit with this seq_id of a run: nothing will be computed for it."""

    model_id: str
    seq_id: int


@dataclass(frozen=True, eq=False)
class Committed:
    transaction: Transaction
    result: Any


@dataclass(frozen=True, eq=False)
class CommitFailed:
    """The transaction changed nothing.

    With a `StorageError` it was a submit, or the server is closing; other transactions are retried. Anything else is
    final.
    """

    transaction: Transaction
    error: Exception


@dataclass(frozen=True, eq=False)
class Replied:
    to: "ReplyTo"
    reply: Result | Exception


@dataclass(frozen=True)
class EngineReady:
    info: ModelInfo


@dataclass(frozen=True)
class EngineEnded:
    reason: str
    is_final: bool = False
    """No engine can be started for this model."""


@dataclass(frozen=True)
class TimerFired:
    timer: "Timer"


@dataclass(frozen=True)
class Cancelled:
    """The client cancelled a sample."""

    request_id: str


@dataclass(frozen=True)
class Streamed:
    """Tokens of this sample were streamed to its client, so it cannot be computed again."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True)
class Verified:
    """Whether a snapshot of a run is intact."""

    model_id: str
    name: str
    is_whole: bool


@dataclass(frozen=True)
class Expired:
    """These runs have expired, or moved to another replica: forget them."""

    model_ids: Sequence[str] = ()


@dataclass(frozen=True)
class Closing:
    """Finish what is being computed and take a snapshot of every run; answered by `Closed`."""


Event = (
    Submitted
    | CreateSubmitted
    | UnloadSubmitted
    | ConsumeSubmitted
    | Arrived
    | Refused
    | Unloaded
    | Committed
    | CommitFailed
    | Replied
    | EngineReady
    | EngineEnded
    | TimerFired
    | Cancelled
    | Streamed
    | Verified
    | Expired
    | Closing
)

# ── effects ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class OperationReply:
    """The reply belongs to a command of an operation; ignored if the operation is no longer in this flight."""

    operation: Operation
    flight: Flight


@dataclass(frozen=True)
class RestoreReply:
    model_id: str
    restore: int


@dataclass(frozen=True)
class SnapshotReply:
    model_id: str
    name: str


@dataclass(frozen=True)
class SamplerReply:
    """The reply belongs to loading a sampler."""

    engine: int
    name: str


@dataclass(frozen=True)
class NoReply:
    """The reply is ignored."""


ReplyTo = OperationReply | RestoreReply | SnapshotReply | SamplerReply | NoReply


@dataclass(frozen=True)
class Timer:
    kind: Literal["gap", "retry", "evict", "drain", "idle"]
    key: str = ""


@dataclass(frozen=True)
class Admit:
    """Answer the submit of an operation."""

    operation: Operation
    request_id: str
    model_id: str | None = None


@dataclass(frozen=True)
class Refuse:
    """Answer the submit of an operation with an error."""

    operation: Operation
    error: Exception


@dataclass(frozen=True)
class Commit:
    """Run a transaction; `Committed` or `CommitFailed` follows."""

    transaction: Transaction


@dataclass(frozen=True)
class Send:
    """Send one command to the engine; `Replied` follows unless the engine ends."""

    command: Command
    to: ReplyTo


@dataclass(frozen=True)
class SendBatch:
    """Send training operations as one batch; `Replied` follows for each."""

    operations: Sequence[Operation]


@dataclass(frozen=True)
class SendEarly:
    """Send a ``forward`` whose row is being committed, in a batch of its own."""

    operation: Operation
    flight: Flight


@dataclass(frozen=True)
class SendSample:
    operation: Operation
    sampler_name: str | None
    """None samples the base model."""


@dataclass(frozen=True)
class CancelSample:
    request_id: str


@dataclass(frozen=True)
class Resolve:
    """Notify the waiters of an operation of its outcome, which is committed or needs no commit."""

    operation: Operation
    outcome: Outcome
    result: Any = None
    """For a direct sample: its response, or the error."""


@dataclass(frozen=True)
class SetTimer:
    timer: Timer
    seconds: float


@dataclass(frozen=True)
class StartEngine:
    pass


@dataclass(frozen=True)
class StopEngine:
    """End an engine that has nothing to do; the next `StartEngine` makes a new one."""


@dataclass(frozen=True)
class StopRetrying:
    """Do not restart a failed engine until it is needed again."""


@dataclass(frozen=True)
class Verify:
    """Verify a snapshot against its checksums; `Verified` follows."""

    model_id: str
    name: str


@dataclass(frozen=True)
class Discard:
    """Delete directories that nothing refers to."""

    kind: Literal["weights", "snapshots"]
    names: Sequence[str]


@dataclass(frozen=True)
class Report:
    """Write to the log."""

    level: Literal["info", "warning", "error"]
    message: str
    model_id: str = ""
    error: BaseException | None = None


@dataclass(frozen=True)
class Closed:
    pass


Effect = (
    Admit
    | Refuse
    | Commit
    | Send
    | SendBatch
    | SendEarly
    | SendSample
    | CancelSample
    | Resolve
    | SetTimer
    | StartEngine
    | StopEngine
    | StopRetrying
    | Verify
    | Discard
    | Report
    | Closed
)
