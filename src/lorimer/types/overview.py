"""The server's status for the caller: identity, models, queues, errors, operations of a run, and own keys."""

from datetime import datetime

from lorimer.types.admin import UserQuotas
from lorimer.types.base import Request, Response
from lorimer.types.sessions import RecentError


class CallerResponse(Response):
    """The authenticated caller."""

    user_id: str
    name: str
    needs_key: bool
    """Whether the server has keys; in open mode everybody on this machine is the same user."""
    version: str


# ── overview ──────────────────────────────────────────────────────────────────────────────────────────


class TokensPerSecond(Response):
    """Throughput of all users over the last minute."""

    training: float
    sampling: float


class ModelMemory(Response):
    """Sizes in bytes; none if the system does not report them."""

    engine_bytes: int | None = None
    """The resident memory of the engine's process."""
    machine_bytes: int | None = None
    available_bytes: int | None = None
    """The machine's memory that is still available to programs."""


class ModelOverview(Response):
    name: str
    state: str
    """idle, starting, ready or failed."""
    stage: str = ""
    """What a starting engine is doing."""
    error: str | None = None
    """Why the last engine ended or failed to start."""
    num_deaths: int
    num_resident_runs: int
    """Runs of all users in the engine's memory."""
    num_runs: int
    """The caller's runs, in memory or not."""
    num_resident_samplers: int
    num_waiting_samples: int
    num_running_samples: int
    tokens_per_second: TokensPerSecond
    memory: ModelMemory
    architecture: str | None = None
    """This field and those below describe the model; none until its engine has started."""
    num_parameters: int | None = None
    max_context: int | None = None
    dtype: str | None = None
    quantize: str | None = None
    """The format of the base's projections: int8, int4 or nf4; ``none`` if they are in ``dtype`` too."""
    device: str | None = None


class QueueEntry(Response):
    """Requests that are queued or running. Other users' requests are one entry per kind, without a run."""

    user: str
    run_id: str | None = None
    kind: str
    num_requests: int
    num_tokens: int


class OverviewResponse(Response):
    version: str
    started_at: datetime
    models: list[ModelOverview]
    queue: list[QueueEntry]
    errors: list[RecentError]
    """The caller's errors, newest first."""


# ── operations of a run ───────────────────────────────────────────────────────────────────────────────


class RunOperation(Response):
    seq_id: int
    kind: str
    state: str
    """queued, done, failed, rejected, abandoned or cancelled."""
    received_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    tokens: int
    error: str | None = None


class RunOperationsResponse(Response):
    operations: list[RunOperation]
    """Newest first."""
    has_more: bool


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────


class CreateKeyRequest(Request):
    name: str


class KeyEntry(Response):
    key_id: int
    name: str
    note: str
    prefix: str
    created_at: datetime
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None
    is_current: bool
    """Whether this request used the key."""


class KeysResponse(Response):
    keys: list[KeyEntry]
    """Oldest first, including revoked ones."""
    quotas: UserQuotas | None = None
    """Shared by all keys of the caller."""


class CreateKeyResponse(KeyEntry):
    secret: str
    """Shown only once; the server stores its hash."""
