"""A server and how to reach it: its address, the transport, the flags it sends, its streams. Needs no session.

``base_url`` is the argument, else ``LORIMER_BASE_URL`` or ``TINKER_BASE_URL``; ``local``, or none of them, is the
service in this process.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from lorimer import __version__
from lorimer.client import embedded
from lorimer.client.auth import Credentials
from lorimer.client.errors import APIConnectionError, NotFoundError, TinkerError, status_error
from lorimer.client.futures import AwaitableConcurrentFuture, LoopThread, loop_thread
from lorimer.client.transport import CONNECT_SECONDS, Transport, decoded, encode
from lorimer.types import ClientConfigRequest, ClientConfigResponse, ClientDynamicConfigResponse, console_url
from lorimer.types.compatibility import NEWEST

T = TypeVar("T")

LOCAL = "local"
SILENT_SECONDS = 60.0
"""The server says that it is still there more often than this."""


class ByteBudget:
    """Limits the bytes in flight: first come, first served. A request larger than the limit runs alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def take(self, num_bytes: int) -> AsyncIterator[None]:
        if self._waiting or not self._has_room(num_bytes):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, num_bytes))
            try:
                await turn  # whoever grants it has counted the bytes
            except BaseException:
                self._give_back(num_bytes if turn.done() and not turn.cancelled() else 0)
                raise
        else:
            self._used += num_bytes
        try:
            yield
        finally:
            self._give_back(num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return self._used == 0 or self._used + num_bytes <= self._size

    def _give_back(self, num_bytes: int) -> None:
        self._used -= num_bytes
        while self._waiting:
            turn, wanted = self._waiting[0]
            if not turn.done():
                if not self._has_room(wanted):
                    return
                self._used += wanted
                turn.set_result(None)
            self._waiting.popleft()


def named_base_url(base_url: str | None) -> str | None:
    return base_url or os.environ.get("LORIMER_BASE_URL") or os.environ.get("TINKER_BASE_URL") or None


def resolve_base_url(base_url: str | None) -> str:
    found = named_base_url(base_url) or LOCAL
    if found != LOCAL and not found.startswith(("http://", "https://")):
        raise ValueError(f"base_url is {found!r}; accepted are http:// and https:// addresses, and 'local'")
    return found.rstrip("/")


class Connection:
    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        model: str | None = None,
    ) -> None:
        self.base_url = resolve_base_url(base_url)
        self.is_local = self.base_url == LOCAL
        if model is not None and not self.is_local:
            raise ValueError(f"model is {model!r}, which base_url='local' takes; {self.base_url} has its own models")
        self.loop = loop_thread()
        self.headers = dict(headers or {})
        self.transport = Transport(
            embedded.ADDRESS if self.is_local else self.base_url,
            Credentials(api_key),
            self.loop,
            self.headers,
            (lambda: embedded.open_transport(model)) if self.is_local else None,
        )
        self.config = ClientConfigResponse()
        self.dynamic = ClientDynamicConfigResponse()
        self._is_ready = False
        self._preparing = asyncio.Lock()
        self.set_config(self.config)

    def set_config(self, config: ClientConfigResponse) -> None:
        self.config = config
        self.transport.billing_seconds = config.billing_exception_max_pause_duration_sec
        self.training_budget = ByteBudget(config.fwdbwd_dispatch_bytes_semaphore_size)
        self.sampling_budget = ByteBudget(config.sample_dispatch_bytes_semaphore_size)
        self.result_budget = ByteBudget(config.inflight_response_bytes_semaphore_size)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> AwaitableConcurrentFuture[T]:
        """Start a coroutine on the SDK's loop."""
        return AwaitableConcurrentFuture(self.loop.run(coroutine))

    run_coroutine_threadsafe = run
    """As programs of the official SDK call it, on the ``holder`` of a client."""

    async def ready(self) -> None:
        """Fetch the server's flags once."""
        if self._is_ready:
            return
        async with self._preparing:
            if self._is_ready:
                return
            body = ClientConfigRequest(sdk_version=str(NEWEST))
            config, self.dynamic = await asyncio.gather(
                self.transport.ask(ClientConfigResponse, "POST", "/api/v1/client/config", body), self._fetch_dynamic()
            )
            self.set_config(config)
            self._is_ready = True

    async def _fetch_dynamic(self) -> ClientDynamicConfigResponse:
        body = ClientConfigRequest(sdk_version=str(NEWEST))
        try:
            return await self.transport.ask(
                ClientDynamicConfigResponse, "POST", "/api/v1/client/dynamic_config", body, timeout=10.0
            )
        except NotFoundError:
            return ClientDynamicConfigResponse()

    async def refresh(self) -> None:
        """Fetch the flags that may change. Keep the present ones if that fails."""
        self.dynamic = await self._fetch_dynamic()

    def adopt(self, config: Mapping[str, Any], dynamic: Mapping[str, Any]) -> None:
        """Take the flags of another client of the same server, which has answered that one."""
        self.loop.note_answer(self.transport.base_url)
        self.set_config(ClientConfigResponse.model_validate(config))
        self.dynamic = ClientDynamicConfigResponse.model_validate(dynamic)
        self._is_ready = True

    def current_loop(self) -> LoopThread:
        """The loop of this process; it is another one after a fork."""
        return loop_thread()

    def console_url(self, *segments: str) -> str:
        """A page of the server's console."""
        if self.is_local:
            return console_url(*segments)
        return "/".join([self.base_url, "console", *(quote(segment, safe=":") for segment in segments)])

    async def address(self) -> tuple[str, str]:
        """Where programs outside of this process reach the server, and the key to show; it may be empty.

        A service in this process begins to listen on loopback.
        """
        header = await self.transport.credentials.header()
        url = await embedded.service().listen() if self.is_local else self.base_url
        return url, next(iter(header.values()), "")

    def close(self) -> None:
        self.run(self.transport.close())


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────


class StreamFailed(TinkerError):
    """The answer broke off; the message says why."""


async def stream_events(connection: Connection, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """The data of each event until the end of the answer; an error of the server is raised."""
    transport = await embedded.open_transport(None) if connection.is_local else None
    timeout = httpx2.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
    headers = {
        "User-Agent": f"Lorimer/Python {__version__}",
        "Content-Type": "application/json",
        "Accept": embedded.EVENTS,
        **connection.headers,
        **await connection.transport.credentials.header(),
    }
    url = connection.transport.base_url + path
    request = httpx2.Request("POST", url)
    try:
        async with (
            httpx2.AsyncClient(transport=transport, timeout=timeout, headers=headers) as client,
            client.stream("POST", url, content=encode(body)) as response,
        ):
            async for event in _events(response):
                yield event
    except httpx2.ConnectError as error:
        raise APIConnectionError(request, f"{connection.base_url} cannot be reached: {error}") from error
    except (httpx2.HTTPError, OSError) as error:
        raise APIConnectionError(request, f"the answer broke off: {error or type(error).__name__}") from error


async def _events(response: httpx2.Response) -> AsyncGenerator[dict[str, Any]]:
    if response.status_code >= 400:
        await response.aread()
        raise status_error(response, decoded(response))
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event: dict[str, Any] = msgspec.json.decode(data)
        if error := event.get("error"):
            raise StreamFailed(str(error.get("message", error)))
        yield event
