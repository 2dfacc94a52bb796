"""How a server stands for whoever asks: who they are, its models, queues and errors, operations of a run, own keys."""

from datetime import datetime

from lorimer.types.admin import UserQuotas
from lorimer.types.base import Request, Response


class CallerResponse(Response):
    """Who the server takes the caller for."""

    user_id: str
    name: str
    needs_key: bool
    """Whether the server has keys; without any, everybody of this machine is the same user."""
    version: str


# ── overview ──────────────────────────────────────────────────────────────────────────────────────────


class TokensPerSecond(Response):
    """Of all users, over the last minute."""

    training: float
    sampling: float


class ModelMemory(Response):
    """In bytes; none where the system does not say."""

    engine_bytes: int | None = None
    """What the engine's process holds of the machine's memory."""
    machine_bytes: int | None = None
    available_bytes: int | None = None
    """Of the machine's, what programs could still take."""


class ModelOverview(Response):
    name: str
    state: str
    """idle, starting, ready or failed."""
    stage: str = ""
    """What a starting engine is doing."""
    error: str | None = None
    """Why the last engine ended or could not start."""
    num_deaths: int
    num_resident_runs: int
    """In the engine's memory, of all users."""
    num_runs: int
    """The caller's, in memory or not."""
    num_resident_samplers: int
    num_waiting_samples: int
    num_running_samples: int
    tokens_per_second: TokensPerSecond
    memory: ModelMemory
    architecture: str | None = None
    """Of the model, like those below; none until its engine has run."""
    num_parameters: int | None = None
    max_context: int | None = None
    dtype: str | None = None
    device: str | None = None


class QueueEntry(Response):
    """Requests that wait or are being computed. Those of other users are one entry for each kind, without a run."""

    user: str
    run_id: str | None = None
    kind: str
    num_requests: int
    num_tokens: int


class RecentError(Response):
    at: datetime
    kind: str
    run_id: str | None = None
    category: str
    """``user`` where the request was wrong, ``server`` where it was not."""
    error: str


class OverviewResponse(Response):
    version: str
    started_at: datetime
    models: list[ModelOverview]
    queue: list[QueueEntry]
    errors: list[RecentError]
    """The caller's, newest first."""


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
    """The one this was asked with."""


class KeysResponse(Response):
    keys: list[KeyEntry]
    """Oldest first, revoked ones too."""
    quotas: UserQuotas | None = None
    """They hold for all keys of the caller together."""


class CreateKeyResponse(KeyEntry):
    secret: str
    """Shown this once; the server keeps its hash."""
