"""The server's status for the caller: their identity, the models, queued requests and recent errors.

Other users' requests are shown only as totals.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from lorimer import __version__
from lorimer.scheduler.stats import QueuedRequests, ServedModel
from lorimer.server.context import context_of, user_of
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.replies import reply
from lorimer.server.system import resident_bytes
from lorimer.store import futures, runs
from lorimer.store.futures import FutureRow
from lorimer.store.users import User
from lorimer.types.overview import (
    CallerResponse,
    ModelMemory,
    ModelOverview,
    OverviewResponse,
    QueueEntry,
    TokensPerSecond,
)
from lorimer.types.sessions import RecentError

OTHERS = "(others)"
NUM_ERRORS = 20
MAX_ERROR_CHARS = 2000


async def get_caller(request: Request) -> Response:
    """Return the caller's identity, and whether the server requires keys."""
    user, credentials = user_of(request), context_of(request).credentials
    return reply(
        CallerResponse(user_id=user.user_id, name=user.name, needs_key=not credentials.is_open, version=__version__)
    )


async def get_overview(request: Request) -> Response:
    """Return the models and their engines, queued requests by user and run, and the caller's newest errors."""
    context, user = context_of(request), user_of(request)
    num_runs, failed = await context.store.read(_facts, user.user_id)
    stats = context.scheduler.stats()
    machine = machine_memory()
    return reply(
        OverviewResponse(
            version=__version__,
            started_at=context.now() - timedelta(seconds=time.monotonic() - context.started_at),
            models=[model_overview(model, num_runs.get(model.name, 0), machine) for model in stats.models],
            queue=queue_of(user, stats.queued),
            errors=[recent_error(row) for row in failed],
        )
    )


def _facts(c: Connection, user_id: str) -> tuple[dict[str, int], list[FutureRow]]:
    return runs.count_by_model(c, user_id), futures.newest_errors(c, user_id, NUM_ERRORS)


def model_overview(model: ServedModel, num_runs: int, machine: dict[str, int]) -> ModelOverview:
    info = model.info
    return ModelOverview(
        name=model.name,
        state=model.state,
        stage=model.stage,
        error=model.error or None,
        num_deaths=model.num_deaths,
        num_resident_runs=model.num_loaded_runs,
        num_runs=num_runs,
        num_resident_samplers=model.num_loaded_samplers,
        num_waiting_samples=model.num_waiting_samples,
        num_running_samples=model.num_running_samples,
        tokens_per_second=TokensPerSecond(training=model.training_rate, sampling=model.sampling_rate),
        memory=ModelMemory(
            engine_bytes=resident_bytes(model.pids),
            machine_bytes=machine.get("MemTotal"),
            available_bytes=machine.get("MemAvailable"),
        ),
        architecture=info.architecture if info else None,
        num_parameters=info.num_parameters if info else None,
        max_context=info.max_context if info else None,
        dtype=info.dtype if info else None,
        quantize=info.quantize if info else None,
        device=info.device if info else None,
    )


def queue_of(user: User, queued: Iterable[QueuedRequests]) -> list[QueueEntry]:
    """Return the user's queued requests by run, and everybody else's by kind."""
    own: list[QueueEntry] = []
    requests: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for entry in queued:
        if entry.user_id == user.user_id:
            own.append(
                QueueEntry(
                    user=user.name,
                    run_id=entry.run_id,
                    kind=entry.kind,
                    num_requests=entry.num_requests,
                    num_tokens=entry.num_tokens,
                )
            )
        else:
            requests[entry.kind] += entry.num_requests
            tokens[entry.kind] += entry.num_tokens
    others = [
        QueueEntry(user=OTHERS, kind=kind, num_requests=number, num_tokens=tokens[kind])
        for kind, number in sorted(requests.items())
    ]
    return own + others


def recent_error(row: FutureRow) -> RecentError:
    return RecentError(
        at=row.finished_at or row.received_at,
        kind=row.kind,
        run_id=row.lane if re.fullmatch(r".+:train:\d+", row.lane) else None,
        category=row.category or "user",
        error=(row.error or "")[:MAX_ERROR_CHARS],
    )


def machine_memory() -> dict[str, int]:
    return _sizes(Path("/proc/meminfo"))


def _sizes(path: Path) -> dict[str, int]:
    """Parse the lines ``Name:   123 kB`` of a ``/proc`` file into bytes."""
    try:
        text = path.read_text("ascii", "replace")
    except OSError:
        return {}
    return {name: int(number) * 1024 for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


ROUTES = [
    Endpoint("GET", "/api/v1/whoami", get_caller, answer=CallerResponse),
    Endpoint("GET", "/api/v1/overview", get_overview, answer=OverviewResponse),
]
