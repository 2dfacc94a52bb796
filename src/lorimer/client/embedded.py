"""The service in this process: the same application that ``lorimer serve`` runs, called without a port.

It runs on the SDK's loop, its engine in a child process; all clients of a process share one, and it ends with the
program. Its settings are those of ``lorimer serve``: the environment and the file ``LORIMER_CONFIG`` names. This
module is the only way from the client to the server, which need not be installed.

``InProcessTransport`` streams answers with events while they are made; for others it uses the transport of httpx2,
which waits for the end of an answer.
"""

import asyncio
import atexit
import concurrent.futures.thread
import importlib
import os
import threading
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx2

from lorimer.client.errors import TinkerError
from lorimer.client.futures import LoopThread, loop_thread
from lorimer.errors import InUse, LorimerError

EVENTS = "text/event-stream"
ADDRESS = "http://127.0.0.1"
END_SECONDS = 60.0


class InProcessTransport(httpx2.ASGITransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.headers.get("accept") != EVENTS:
            return await super().handle_async_request(request)
        body = await request.aread()
        stream = _Stream(self, request, body)
        status, headers = await stream.begin()
        return httpx2.Response(status, headers=headers, stream=stream)


class _Stream(httpx2.AsyncByteStream):
    """One answer; the application runs beside its reader, and is ended when that leaves."""

    def __init__(self, transport: InProcessTransport, request: httpx2.Request, body: bytes) -> None:
        self._transport, self._request, self._body = transport, request, body
        self._messages: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
        self._is_sent = False
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        self._task = asyncio.create_task(self._run())
        try:
            start = await self._messages.get()
        except BaseException:
            await self.aclose()
            raise
        if start is None:
            raise httpx2.ReadError("the service in this process gave no answer", request=self._request)
        return start["status"], list(start.get("headers", []))

    async def _run(self) -> None:
        url = self._request.url
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self._request.method,
            "headers": [(name.lower(), value) for name, value in self._request.headers.raw],
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0],
            "query_string": url.query,
            "server": (url.host, url.port),
            "client": self._transport.client,
            "root_path": self._transport.root_path,
        }
        try:
            await self._transport.app(scope, self._receive, self._send)
        finally:
            self._messages.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        if self._is_sent:
            await asyncio.Event().wait()  # the reader's leaving cancels the task
        self._is_sent = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self._messages.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                return

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class EmbeddedService:
    def __init__(self, loop: LoopThread) -> None:
        self.loop = loop
        self._opening = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._app: Any = None
        self._settings: Any = None
        self._listening: tuple[str, Any, asyncio.Future[Any]] | None = None

    async def open(self, model: str | None) -> httpx2.AsyncBaseTransport:
        async with self._opening:
            if self._app is None:
                await self._start(model)
            self._check_served(model)
        return InProcessTransport(self._app, raise_app_exceptions=False)

    async def _start(self, model: str | None) -> None:
        make_app, load_settings = _server()
        flags = {"models": (model,)} if model else {}
        try:
            settings = load_settings(flags, dict(os.environ)).settings
            app = make_app(settings)
            stack = AsyncExitStack()
            await stack.enter_async_context(app.router.lifespan_context(app))
        except LorimerError as error:
            hint = ""
            if isinstance(error, InUse):
                hint = "; give the address of that server as base_url, or another directory as LORIMER_DATA"
            raise TinkerError(f"the service in this process cannot start: {error}{hint}") from error
        self._app, self._stack, self._settings = app, stack, settings
        _at_exit(self.stop)

    def _check_served(self, model: str | None) -> None:
        if model and not self._settings.serves(model):
            served = ", ".join(self._settings.engine_configs())
            raise TinkerError(
                f"the service in this process serves {served} and was asked for {model!r}; "
                "name all models in LORIMER_MODELS before the first client is made"
            )

    async def listen(self) -> str:
        """Listen on a free port of loopback, for programs outside of this process. Return the URL."""
        async with self._opening:
            if self._app is None:
                raise TinkerError("there is no service in this process yet; a client of it is made first")
            if self._listening is None:
                serving = importlib.import_module("lorimer.server.serve")
                settings = replace(self._settings, host="127.0.0.1", port=0)
                listener = serving.bind(settings)
                url = serving.url_of(listener)
                server = serving.HttpServer(self._app, listener, settings)
                self._listening = url, server, asyncio.ensure_future(server.serve())
            return self._listening[0]

    async def _close(self, stack: AsyncExitStack) -> None:
        if self._listening is not None:
            _, server, serving = self._listening
            self._listening = None
            server.stop()
            await asyncio.wait({serving}, timeout=END_SECONDS / 10)
        await stack.aclose()

    @property
    def is_running(self) -> bool:
        return self._app is not None

    def stop(self) -> None:
        """Secure every run and end the engine."""
        if self._stack is not None and self.loop.pid == os.getpid():
            stack, self._stack, self._app = self._stack, None, None
            self.loop.run(self._close(stack)).result(END_SECONDS)


def _server() -> tuple[Any, Any]:
    try:
        app = importlib.import_module("lorimer.server.app")
        sources = importlib.import_module("lorimer.server.setting_sources")
    except ImportError as error:
        raise TinkerError(
            "no base_url is given, and the service cannot run in this process because a package is missing "
            f"({error}): pip install 'lorimer[server]', or set LORIMER_BASE_URL to the address of a server"
        ) from error
    return app.create_app, sources.load_settings


def running_server() -> str | None:
    """Return the address of the server on this user's data directory; None if none runs there or it does not answer."""
    _, load_settings = _server()
    control = importlib.import_module("lorimer.server.control")
    try:
        directory = load_settings({}, dict(os.environ)).settings.data.expanduser().absolute()
        reply = control.ask_server(directory, control.DescribeServer())
    except (LorimerError, OSError):
        return None
    return reply.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:") or None if reply else None


def _at_exit(stop: Any) -> None:
    # The pools of threads that the server uses take no work once atexit functions run; what is registered with
    # threading after them runs before they close.
    register = getattr(threading, "_register_atexit", atexit.register)
    assert concurrent.futures.thread
    register(stop)


_lock = threading.Lock()
_service: EmbeddedService | None = None


def service() -> EmbeddedService:
    """The service of this process, which is started by its first client."""
    global _service
    with _lock:
        loop = loop_thread()
        if _service is None or _service.loop is not loop:
            _service = EmbeddedService(loop)
        return _service


def is_running() -> bool:
    """Whether this process has a service."""
    return _service is not None and _service.loop is loop_thread() and _service.is_running


async def open_transport(model: str | None) -> httpx2.AsyncBaseTransport:
    return await service().open(model)
