"""Builds the ASGI application: opens the data directory, store and scheduler, and wraps the routes in middleware.

The application runs under ``serve.py`` or over an in-process ASGI transport. Its lifespan opens and closes everything
it owns.
"""

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import InvalidInput, LorimerError
from lorimer.scheduler import spans
from lorimer.scheduler.scheduler import Scheduler
from lorimer.scheduler.shares import SharedLimit
from lorimer.server import console, health
from lorimer.server.auth import BURST_SECONDS, Authentication
from lorimer.server.buckets import TokenBuckets
from lorimer.server.compression import Compression
from lorimer.server.context import Context, context_of
from lorimer.server.control import Control
from lorimer.server.credentials import Credentials
from lorimer.server.decoders import Decoders
from lorimer.server.errors import FAILED_LOOKUPS, answer_error, answer_http_exception
from lorimer.server.guard import Guard
from lorimer.server.live_sessions import LiveSessions
from lorimer.server.prometheus import Metrics
from lorimer.server.roles import node_name, open_store, secret_of, shares_directory
from lorimer.server.routes import ALL_ROUTES, anthropic, openai
from lorimer.server.run_summaries import Summariser
from lorimer.server.settings import Settings
from lorimer.server.signing import Signer
from lorimer.server.system import Sampler
from lorimer.server.trainings import Trainings
from lorimer.server.upkeep import Periodic
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.objects import open_objects
from lorimer.store.scratch import Scratch

GUESSES_SECONDS = 20.0
"""Number of seconds' worth of failed lookups that one caller may make in a burst before being rate-limited."""

NO_FULL_RUNS = (
    "full fine-tuning is not offered where Ray places workers (cluster is 'ray'): it reserves memory for each of them"
    " beforehand, and not that of a full run; LoRA is accepted"
)
BUSY_PATHS = {
    f"/api/v1/{name}"
    for name in ("retrieve_future", "forward_backward", "forward", "optim_step", "asample", "session_heartbeat")
}
"""Paths that are matched first: Starlette tries one route after the other."""


def make_scheduler(
    settings: Settings,
    store: Store,
    directory: DataDirectory,
    secret: bytes,
    credentials: Credentials,
    scratch: Scratch,
) -> Scheduler:
    """Return the scheduler of this process's role."""
    models, limits = settings.engine_configs(), settings.scheduler_limits()
    if settings.cluster == "ray":
        limits = dataclasses.replace(limits, max_full_runs=0)
    given = (store, directory, models, limits, settings.num_replicas(), scratch)
    if settings.role == "all":
        return Scheduler(*given)
    from lorimer.scheduler.doors import door_token
    from lorimer.scheduler.remote import RemoteScheduler  # needs the PostgreSQL driver

    scheduler = RemoteScheduler(*given, door_token(secret), credentials.forget, credentials.look_for_keys)
    if settings.cluster == "ray":
        scheduler.no_full_runs = NO_FULL_RUNS
    credentials.on_change = scheduler.send_keys_changed
    return scheduler


def create_app(settings: Settings) -> Starlette:
    """Create the application. Nothing is opened until its lifespan starts."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with running(settings) as context:
            app.state.context = context
            yield

    routes = [*ALL_ROUTES, *openai.ROUTES, *anthropic.ROUTES, *health.ROUTES, *console.ROUTES]
    app = Starlette(
        routes=sorted(routes, key=lambda route: getattr(route, "path", "") not in BUSY_PATHS),
        middleware=[
            Middleware(Guard, settings=settings),
            Middleware(Compression, min_bytes=settings.compress_bytes),
            Middleware(Authentication),
        ],
        exception_handlers={LorimerError: answer_rate_limited, HTTPException: answer_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


async def answer_rate_limited(request: Request, error: Exception) -> Response:
    """Map an error raised by a route to a response. Rate-limit callers whose lookups keep failing."""
    refused = context_of(request).refuse_guess(request.scope) if isinstance(error, FAILED_LOOKUPS) else None
    return refused or await answer_error(request, error)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Context]:
    """Run a server without HTTP. On exit, drain the scheduler, flush pending writes and close everything."""
    async with AsyncExitStack() as stack:
        spans.start(settings.otlp_endpoint)
        stack.callback(spans.stop)
        context = await open_context(settings, stack)
        stack.push_async_callback(context.flush)
        stack.push_async_callback(context.drain)
        await context.scheduler.start()
        await context.trainings.start()
        for job, seconds, name in (
            (context.flush, settings.heartbeat_flush_seconds, "flush"),
            (context.scheduler.sweep, settings.sweep_seconds, "sweep"),
            (Summariser(context.store).advance, settings.run_summary_seconds, "run summaries"),
            (make_sampler(context).sample, settings.system_sample_seconds, "system samples"),
        ):
            periodic = Periodic(seconds, job, name)
            periodic.start()
            stack.push_async_callback(periodic.stop)
        if settings.role == "all":  # the data directory may be shared by others
            control = Control(context)
            await control.start()
            stack.push_async_callback(control.stop)
        if settings.starts_eagerly:
            for name in settings.engine_configs():
                context.scheduler.start_engine(name)
        yield context


def make_sampler(context: Context) -> Sampler:
    """Return the sampler of a server. The engines and queues of an API replica are sampled by their owners."""
    scheduler, settings = context.scheduler, context.settings
    node, data = node_name(settings), context.directory.path
    if settings.role != "all":
        return Sampler(context.store, f"{node} api {os.getpid()}", data, lambda: (), None)
    return Sampler(
        context.store,
        node,
        data,
        lambda: [replica.model for replica in scheduler.replica_states()],
        lambda: scheduler.stats().requests_by_kind,
    )


async def open_context(settings: Settings, stack: AsyncExitStack) -> Context:
    """Open every part of a server and register its cleanup on ``stack``."""
    directory = DataDirectory(settings.data)
    await asyncio.to_thread(partial(directory.lock, is_shared=shares_directory(settings)))
    stack.callback(directory.unlock)
    scratch = Scratch(await open_objects(settings.objects, directory), directory, max_bytes=settings.scratch_bytes)
    stack.callback(scratch.remover.close)
    store = await asyncio.to_thread(open_store, settings, directory, scratch)
    stack.callback(store.close)
    secret = secret_of(settings, directory)
    signer = Signer(secret)
    credentials = Credentials(store, signer, allow_open=settings.is_loopback)
    await credentials.start()
    if not (settings.is_loopback or await credentials.list()):
        raise InvalidInput(
            f"host is {settings.host!r}, which others can reach, and there are no keys: make one with "
            f"`lorimer key create NAME --data {settings.data}`, or listen on 127.0.0.1"
        )
    scheduler = make_scheduler(settings, store, directory, secret, credentials, scratch)
    return Context(
        settings=settings,
        store=store,
        directory=directory,
        scratch=scratch,
        scheduler=scheduler,
        credentials=credentials,
        metrics=Metrics(scheduler.stats),
        signer=signer,
        live_sessions=LiveSessions(settings.max_sessions_per_user),
        incoming_bytes=SharedLimit(settings.max_incoming_bytes),
        requests=SharedLimit(settings.max_concurrent_requests),
        rates=TokenBuckets(BURST_SECONDS),
        failed_lookups=TokenBuckets(GUESSES_SECONDS),
        decoders=Decoders(settings),
        trainings=Trainings(settings, store, credentials, directory),
    )
