"""Runs the application on a port, in this process, until it is told to stop.

Granian's embedded server serves it: 1,500 held polls cost other requests less than a millisecond, a client that leaves
is noticed immediately, and half-sent headers are dropped after a time that uvicorn cannot set. It is given a socket
bound here, because its own would share a port that another server already has. What is shown meanwhile is in
``banner.py``.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server
from starlette.applications import Starlette

from lorimer.errors import LorimerError, PortTaken
from lorimer.server.app import create_app
from lorimer.server.context import Context
from lorimer.server.settings import Settings

logger = logging.getLogger(__name__)

BACKLOG = 2048
MAX_HEADER_BYTES = 64 * 1024
LAST_ANSWERS_SECONDS = 5.0
"""Time for answers under way once the engines have ended."""
INTERRUPTED = 130
SPARE_FILES = 1000
SWITCH_SECONDS = 0.0005
"""How long another thread may keep the interpreter from the event loop. The default of 5 ms adds up over a request."""

Announce = Callable[[Context, str], Coroutine[Any, Any, None]]


class EmbeddedServer(Server):
    """Granian on this event loop and on a socket of ours; the application's lifespan is ours too."""

    def __init__(self, app: Starlette, listener: socket.socket, settings: Settings) -> None:
        host, port = listener.getsockname()[:2]
        super().__init__(
            app,
            host,
            port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=BACKLOG,
            # Beyond what the guard refuses with an answer, connections wait in the backlog.
            backpressure=settings.max_concurrent_requests + SPARE_FILES,
            http1_settings=HTTP1Settings(
                header_read_timeout=round(settings.header_seconds * 1000), max_buffer_size=MAX_HEADER_BYTES
            ),
            log_enabled=False,
        )
        self._listener = listener

    def _init_shared_socket(self) -> None:
        # How Granian's own processes hand a socket on; its type stubs leave the constructor out.
        make_holder: Any = SocketHolder
        self._shd: Any = make_holder(self._listener.detach(), False, BACKLOG)
        self._ssp = None


def bind(settings: Settings) -> socket.socket:
    """A listening socket; ``PortTaken`` with a sentence when there can be none."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it: one that takes no answer is cut by the system
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(settings.answer_seconds * 1000))
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise PortTaken(
            f"cannot listen on {settings.host}:{settings.port}: {reason}; choose another with --host or --port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(settings: Settings, announce: Announce) -> None:
    """`serve` on uvloop where there is one: an operation wakes the loop some twenty times, which it does for half."""
    sys.setswitchinterval(SWITCH_SECONDS)
    make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):  # it is not made for every system
        from uvloop import new_event_loop as make_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(serve(settings, announce))


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGINT or SIGTERM, then end in order; a second signal ends the process immediately.

    ``announce`` runs beside the server once it listens, with its address. A ``LorimerError`` that it raises ends the
    server.
    """
    raise_file_limit(settings.max_concurrent_requests)
    with bind(settings) as listener:
        app = create_app(settings)
        stop = asyncio.Event()
        with_signals(stop)
        async with app.router.lifespan_context(app):
            gc.freeze()  # objects of the start stay for good; the collector need not look through them again
            context: Context = app.state.context
            url = context.url = url_of(listener)
            server = EmbeddedServer(app, listener, settings)
            serving = asyncio.create_task(server.serve())
            announcing = asyncio.create_task(announce(context, url))
            announcing.add_done_callback(lambda task: stop.set() if refusal_of(task) else None)
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            announcing.cancel()
            stopping.cancel()
            await end(context, server, serving)
            for outcome in await asyncio.gather(announcing, return_exceptions=True):
                if isinstance(outcome, Exception) and not refusal_of(announcing):
                    logger.error("the start could not be shown", exc_info=outcome)
        if refusal := refusal_of(announcing):
            raise refusal


def refusal_of(announcing: "asyncio.Task[None]") -> LorimerError | None:
    """Why what should be served cannot be, if that was found while it was loaded."""
    error = None if announcing.cancelled() else announcing.exception()
    return error if isinstance(error, LorimerError) else None


async def end(context: Context, server: EmbeddedServer, serving: "asyncio.Task[None]") -> None:
    """Finish what is being computed, let its results be fetched, release whoever still waits, then close the port."""
    if serving.done():
        await serving
        raise RuntimeError("the HTTP server ended by itself")
    logger.info("shutting down: new work is refused, the running batch is finished")
    await context.drain()
    context.release()
    server.stop()
    try:
        async with asyncio.timeout(LAST_ANSWERS_SECONDS):
            await asyncio.shield(serving)
    except TimeoutError:
        serving.cancel()


def raise_file_limit(num_requests: int) -> None:
    """Every held request is an open file; the usual limit of 1,024 is only a first offer of the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_requests + SPARE_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < num_requests:
        logger.warning("at most %d files can be open, so about that many requests can wait concurrently", most)


def with_signals(stop: asyncio.Event) -> None:
    def ask() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)  # the journal has what was accepted, and the engines end when their socket closes
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)
