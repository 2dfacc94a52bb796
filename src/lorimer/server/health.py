"""Liveness, readiness and metrics: ``/api/v1/healthz``, ``/readyz`` and ``/metrics``; workers have no ``/readyz``."""

import asyncio

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorimer.errors import StorageError
from lorimer.server.context import Context, context_of
from lorimer.server.prometheus import Metrics
from lorimer.store import users

REQUEST_SECONDS = 5.0
MAX_REQUEST_BYTES = 8192
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


async def serve_worker(host: str, port: int, metrics: Metrics) -> asyncio.Server:
    """Serve the health and metrics of a process that serves nothing else, one request for each connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = _worker_answer(head.split(b"\r\n", 1)[0], metrics)
                fields = f"content-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close"
                writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body)
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # no request, or nobody who waits for the answer
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port, limit=MAX_REQUEST_BYTES)


def _worker_answer(line: bytes, metrics: Metrics) -> tuple[str, str, bytes]:
    match line.split(b" "):
        case [b"GET", b"/metrics", _]:
            return "200 OK", CONTENT_TYPE_LATEST, metrics.render()
        case [b"GET", b"/api/v1/healthz", _]:
            return "200 OK", "application/json", b'{"status":"ok"}'
        case [b"GET", _, _]:
            return "404 Not Found", "text/plain", b"a worker has /metrics and /api/v1/healthz\n"
    return "405 Method Not Allowed", "text/plain", b""


ROUTES = [
    Route("/api/v1/healthz", healthz, methods=["GET"]),
    Route("/readyz", readyz, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
