"""Serves the application on a port, in this process, until SIGINT or SIGTERM.

``http_server.py`` speaks HTTP, ``banner.py`` prints the startup output.
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

from lorimer.errors import LorimerError, PortTaken
from lorimer.server.app import create_app
from lorimer.server.context import Context
from lorimer.server.http_server import SPARE_CONNECTIONS, HttpServer
from lorimer.server.settings import Settings

logger = logging.getLogger(__name__)

BACKLOG = 2048
LAST_ANSWERS_SECONDS = 5.0
"""How long responses in flight may take after the engines have stopped."""
INTERRUPTED = 130
SWITCH_SECONDS = 0.0005
"""How long another thread may keep the GIL from the event loop. The default of 5 ms adds up over a request."""

Announce = Callable[[Context, str], Coroutine[Any, Any, None]]


def bind(settings: Settings) -> socket.socket:
    """Return a listening socket. Raise ``PortTaken`` with the reason if that fails."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by connections: the kernel drops a stalled peer
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
    """Run `serve` until it ends."""
    run_on_loop(serve(settings, announce))


def run_on_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a server's loop, on uvloop if installed: it halves the cost of the twenty or so wakeups of an operation."""
    sys.setswitchinterval(SWITCH_SECONDS)
    make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):  # uvloop does not support every platform
        from uvloop import new_event_loop as make_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(work)


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGINT or SIGTERM, then shut down gracefully; a second signal ends the process immediately.

    ``announce`` runs concurrently with the server once it listens, with its URL. If it raises a ``LorimerError``, the
    server shuts down and the error is raised.
    """
    max_connections = raise_file_limit(settings.max_concurrent_requests)
    with bind(settings) as listener:
        app = create_app(settings)
        stop = asyncio.Event()
        install_signal_handlers(stop)
        async with app.router.lifespan_context(app):
            gc.freeze()  # objects created at startup are permanent: exempt them from garbage collection
            context: Context = app.state.context
            url = context.url = url_of(listener)
            server = HttpServer(app, listener, settings, max_connections)
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
                    logger.error("cannot print the startup output", exc_info=outcome)
        if refusal := refusal_of(announcing):
            raise refusal


def refusal_of(announcing: "asyncio.Task[None]") -> LorimerError | None:
    """Return the ``LorimerError`` with which ``announce`` failed, such as a model that cannot be loaded, if any."""
    error = None if announcing.cancelled() else announcing.exception()
    return error if isinstance(error, LorimerError) else None


async def end(context: Context, server: HttpServer, serving: "asyncio.Task[None]") -> None:
    """Shut down gracefully: finish the running batch, deliver results, release held requests, then close the port."""
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


def raise_file_limit(num_requests: int) -> int:
    """Raise the limit of open files, usually 1,024, and return how many connections it leaves room for.

    Each held request needs a descriptor; some are kept for the database, engines and files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_requests + SPARE_CONNECTIONS
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < num_requests:
        logger.warning("at most %d files can be open, so about that many requests can wait concurrently", limit)
    return max(1, limit - min(SPARE_CONNECTIONS // 2, limit // 2)) if limit < wanted else wanted


def install_signal_handlers(stop: asyncio.Event) -> None:
    def ask() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)  # accepted work is in the journal, and the engines exit when their socket closes
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)
