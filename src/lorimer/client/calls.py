"""What the clients without a session have in common: they start a request and hand out its future."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlencode

import httpx2
from pydantic import BaseModel

from lorimer import __version__
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
