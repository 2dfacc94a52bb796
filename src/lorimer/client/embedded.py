"""The service in this process: the same application that ``lorimer serve`` runs, called without a port.

It lives on the SDK's loop, its engine in a child process; there is one for all clients of a process, and it ends with
the program. Its settings are those of ``lorimer serve``: the environment and the file ``LORIMER_CONFIG`` names. This
module is the only way from the client to the server, which need not be installed.
"""

import asyncio
import atexit
import concurrent.futures.thread
import importlib
import os
import threading
from contextlib import AsyncExitStack
from typing import Any

import httpx2

from lorimer.client.errors import TinkerError
from lorimer.client.in_process import InProcessTransport
from lorimer.client.loop import LoopThread, loop_thread
from lorimer.errors import LorimerError

ADDRESS = "http://127.0.0.1"
END_SECONDS = 60.0


class EmbeddedService:
    def __init__(self, loop: LoopThread) -> None:
        self.loop = loop
        self._opening = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._app: Any = None
        self._settings: Any = None

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
            if type(error).__name__ == "InUse":
                hint = "; give the address of that server as base_url, or another directory as LORIMER_DATA"
            raise TinkerError(f"the service in this process cannot start: {error}{hint}") from error
        self._app, self._stack, self._settings = app, stack, settings
        _at_exit(self.stop)

    def _check_served(self, model: str | None) -> None:
        configs = self._settings.engine_configs()
        if model and model.partition("=")[0] not in configs and model not in {c.model for c in configs.values()}:
            raise TinkerError(
                f"the service in this process serves {', '.join(configs)} and was asked for {model!r}; "
                "name all models in LORIMER_MODELS before the first client is made"
            )

    @property
    def is_running(self) -> bool:
        return self._app is not None

    def stop(self) -> None:
        """Secure every run and end the engine."""
        if self._stack is not None and self.loop.pid == os.getpid():
            stack, self._stack, self._app = self._stack, None, None
            self.loop.run(stack.aclose()).result(END_SECONDS)


def _server() -> tuple[Any, Any]:
    try:
        app = importlib.import_module("lorimer.server.app")
        sources = importlib.import_module("lorimer.server.sources")
    except ImportError as error:
        raise TinkerError(
            "no base_url is given, and the service cannot run in this process because a package is missing "
            f"({error}): pip install 'lorimer[server]', or set LORIMER_BASE_URL to the address of a server"
        ) from error
    return app.create_app, sources.load_settings


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
