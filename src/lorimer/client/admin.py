"""What administrators ask: the audit log and what was used."""

from concurrent.futures import Future
from datetime import date, datetime
from typing import Literal

from lorimer import types
from lorimer.client.calls import Caller

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AdminClient(Caller):
    def get_audit_log(self, event_type: EventType = "all", day: date | None = None) -> "Future[types.AuditLogResponse]":
        """What happened on a day, or today (UTC)."""
        query = {"event_type": event_type, "day": day.isoformat() if day else None}
        return self._start("get_audit_log", types.AuditLogResponse, "GET", "/audit", query=query)

    async def get_audit_log_async(
        self, event_type: EventType = "all", day: date | None = None
    ) -> types.AuditLogResponse:
        return await self._wait(self.get_audit_log(event_type, day))

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> "Future[types.BillingUsageResponse]":
        """Tokens and storage used, by the hour."""
        query = {"starting_on": _rfc3339(starting_on), "ending_before": _rfc3339(ending_before)}
        path = "/billing/usage/events"
        return self._start("get_billing_usage", types.BillingUsageResponse, "GET", path, query=query)

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> types.BillingUsageResponse:
        return await self._wait(self.get_billing_usage(starting_on, ending_before))

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> "Future[types.CurrentCheckpointStorageUsageResponse]":
        """What checkpoints take up now."""
        return self._start(
            "get_current_checkpoint_storage_usage",
            types.CurrentCheckpointStorageUsageResponse,
            "GET",
            "/billing/usage/checkpoints/current",
            query={"project_id": project_id},
        )

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> types.CurrentCheckpointStorageUsageResponse:
        return await self._wait(self.get_current_checkpoint_storage_usage(project_id))


def _rfc3339(value: datetime | str) -> str:
    if isinstance(value, str):
        return value
    return (value if value.tzinfo else value.astimezone()).isoformat()
