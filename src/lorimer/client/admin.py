"""Methods of administrators: the audit log and usage. ``Caller`` is the base of the clients that need no session."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import date, datetime
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import httpx2
from pydantic import BaseModel

from lorimer import __version__, types
from lorimer.client.connection import Connection
from lorimer.client.transport import parse

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Caller:
    def __init__(
        self, _holder: Connection | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        self._connection = _holder or Connection(base_url, api_key)

    @property
    def holder(self) -> Connection:
        return self._connection

    def get_telemetry(self) -> None:
        """Nothing: this SDK reports nothing of its user."""

    def _start(
        self,
        name: str,
        model: type[M],
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "Future[M]":
        """The future of an answer; ``name`` is the method the user called."""

        async def ask() -> M:
            return parse(model, await self._send(name, method, path, body, query=query, headers=headers))

        return self._connection.loop.run(ask())

    def _do(self, name: str, method: str, path: str, body: Any = None) -> "Future[None]":
        """As ``_start``, where the answer says nothing."""

        async def do() -> None:
            await self._send(name, method, path, body)

        return self._connection.loop.run(do())

    async def _send(
        self,
        name: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> httpx2.Response:
        given = {key: value for key, value in (query or {}).items() if value is not None}
        address = f"/api/v1{path}" + (f"?{urlencode(given)}" if given else "")
        sent = {"x-sdk-version": f"lorimer {__version__}", "x-sdk-method": name, **(headers or {})}
        return await self._connection.transport.call(method, address, body, headers=sent, **options)

    async def _wait(self, future: "Future[T]") -> T:
        return await asyncio.wrap_future(future)


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
