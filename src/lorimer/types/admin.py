"""Messages about identity, the audit log and billing."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from lorimer.types.base import Request, Response


class AuthTokenResponse(Response):
    jwt: str


class WhoamiResponse(Response):
    user_urn: str
    org_urn: str
    email: str | None = None


class ApiKeyOrganization(Response):
    name: str


class ApiKeyUser(Response):
    email: str


class ApiKeyDetails(Response):
    org_details: ApiKeyOrganization
    user_details: ApiKeyUser


class ApiKeyResponse(Response):
    """The key of the request, as ``tinker auth login`` shows it."""

    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


class AuditLogEntry(Response):
    timestamp: datetime
    event: str
    event_details: dict[str, object] = Field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Response):
    entries: list[AuditLogEntry]


# ── usage ─────────────────────────────────────────────────────────────────────────────────────────────


class GetBillingUsageRequest(Request):
    starting_on: datetime
    ending_before: datetime


class TrainingBillingEvent(Response):
    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(Response):
    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Response):
    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(Response):
    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(Response):
    type: Literal["storage"] = "storage"
    gigabyte_hours: float


BillingEventInfo = Annotated[
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent,
    Field(discriminator="type"),
]


class BillingUsageEvent(Response):
    """The usage of one kind in one hour."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(Response):
    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(Response):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = Field(default_factory=dict)
    cost_data_through: datetime | None = None


class GetCurrentCheckpointStorageUsageRequest(Request):
    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(Response):
    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class UserQuotas(Response):
    """The caller's quotas, shared by all of their keys; None means no limit."""

    stored_bytes: int
    """The current size of their checkpoints and rollouts."""
    rollout_bytes: int = 0
    """That of their rollouts alone."""
    max_stored_bytes: int | None = None
    requests_per_second: float | None = None


class CurrentCheckpointStorageUsageResponse(Response):
    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]
    quotas: UserQuotas | None = None
    """The caller's quotas; the official service does not send them."""
