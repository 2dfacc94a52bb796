"""Liveness, readiness and metrics: ``/api/v1/healthz``, ``/readyz`` and ``/metrics``."""

import asyncio

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorimer.errors import StorageError
from lorimer.server.context import Context, context_of
from lorimer.store import users

DATABASE_SECONDS = 2.0
"""How long a readiness probe waits for the database. Ordinary requests wait longer."""


async def healthz(request: Request) -> Response:
    """Report that the process is alive."""
    return Response(b'{"status":"ok"}', media_type="application/json")


async def readyz(request: Request) -> Response:
    """Respond 200 if new work can start now, else 503 with the reasons."""
    reasons = await reasons_not_ready(context_of(request))
    body = orjson.dumps({"status": "not_ready" if reasons else "ready", "reasons": reasons})
    return Response(body, 503 if reasons else 200, media_type="application/json")


async def metrics(request: Request) -> Response:
    return Response(context_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def reasons_not_ready(context: Context) -> list[str]:
    """Return why the server is not ready, or an empty list. An engine that starts on first use is not a reason."""
    reasons = ["the server is shutting down"] if context.is_draining else []
    try:
        async with asyncio.timeout(DATABASE_SECONDS):
            await context.store.read(users.has_keys)
    except (StorageError, TimeoutError):
        reasons.append("the database cannot be read")
    for model in context.scheduler.served_models():
        if model.state == "starting":
            reasons.append(f"model {model.name!r} is being loaded")
        elif model.state == "failed":
            reasons.append(f"model {model.name!r} could not be loaded")
    return reasons


ROUTES = [
    Route("/api/v1/healthz", healthz, methods=["GET"]),
    Route("/readyz", readyz, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
