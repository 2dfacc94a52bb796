"""Messages to create, keep alive, finish, list and search sessions."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from lorimer.types.base import Request, Response


class CreateSessionRequest(Request):
    tags: list[str]
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Response):
    """The client logs each non-empty message at its level."""

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(Request):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Response):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class AssignProjectRequest(Request):
    project_id: str


class ListSessionsResponse(Response):
    sessions: list[str]


class TraceExportResponse(Response):
    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


# ── how a session stands ──────────────────────────────────────────────────────────────────────────────

ClientSessionFinishReasonType = Literal["success", "errored", "interrupted"]


class ClientSessionFinishSuccess(Response):
    type: Literal["success"] = "success"


class ClientSessionFinishErrored(Response):
    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(Response):
    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason = Annotated[
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted,
    Field(discriminator="type"),
]


class FinishSessionRequest(Request):
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionFailedRequestReason(Response):
    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Response):
    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(Response):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason = Annotated[
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason,
    Field(discriminator="type"),
]


class SessionFailed(Response):
    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


class SessionCancelled(Response):
    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class ClientSessionFinished(Response):
    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionActive(Response):
    type: Literal["active"] = "active"


SessionStatus = Annotated[
    SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive, Field(discriminator="type")
]


class RecentError(Response):
    """A request that failed."""

    at: datetime
    kind: str
    run_id: str | None = None
    category: str
    """``user`` if the request was invalid, else ``server``."""
    error: str


class GetSessionResponse(Response):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    status: SessionStatus | None = None
    """How the session ended, with the error text of its program."""
    errors: list[RecentError] = Field(default_factory=list)
    """Failed requests of the session, newest first, for as long as the server keeps their results."""


# ── search ────────────────────────────────────────────────────────────────────────────────────────────


class OwnSearchOwner(Request):
    type: Literal["own"] = "own"


class AccessibleSearchOwner(Request):
    type: Literal["accessible"] = "accessible"


class UserSearchOwner(Request):
    type: Literal["user"] = "user"
    owner_urns: list[str] = Field(min_length=1, max_length=10)


SearchOwner = Annotated[OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")]


class ActiveSessionStatusQuery(Request):
    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(Request):
    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(Request):
    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(Request):
    type: Literal["client_finished"] = "client_finished"
    reasons: list[ClientSessionFinishReasonType] | None = Field(default=None, min_length=1)
    """``None`` matches every reason."""


SessionStatusQuery = Annotated[
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery,
    Field(discriminator="type"),
]


class SessionSearchCursor(Response):
    """Where the next page starts."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchRequest(Request):
    """All conditions must hold, except that either ``session_id`` or ``display_name`` suffices if both are given."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = Field(default=None, min_length=1)
    """Words that must all occur in the name, ignoring case."""
    owner: SearchOwner = OwnSearchOwner()
    statuses: list[SessionStatusQuery] | None = Field(default=None, min_length=1)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SessionSearchCursor | None = None


class SessionSummary(Response):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    """``None`` if the session neither finished nor is known to be running."""
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None
    tags: list[str] | None = None
    training_runs_count: int | None = None
    last_seen_at: datetime | None = None
    """The time of the last heartbeat."""


class SessionSearchResponse(Response):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
