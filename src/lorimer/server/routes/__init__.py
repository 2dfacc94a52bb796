"""The routes of the API: each decodes the request, checks ownership, calls the scheduler or the store, and encodes.

Each module is one feature. `ALL_ROUTES` is what the application serves and `/openapi.json` describes.
"""

from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lorimer.server.openapi import Endpoint, describe
from lorimer.server.routes import (
    admin,
    checkpoints,
    clients,
    downloads,
    episodes,
    evaluations,
    futures,
    keys,
    metrics,
    overview,
    replicas,
    rollouts,
    runs,
    sampling,
    saving,
    sessions,
    system,
    tokenizers,
    training,
    trainings,
)
from lorimer.server.routes.replies import reply


async def get_openapi(request: Request) -> Response:
    """Return the OpenAPI document."""
    return reply(description())


@cache
def description() -> dict[str, Any]:
    return describe(ALL_ROUTES)


ALL_ROUTES: list[Endpoint] = [
    *clients.ROUTES,
    *sessions.ROUTES,
    *training.ROUTES,
    *saving.ROUTES,
    *sampling.ROUTES,
    *futures.ROUTES,
    *checkpoints.ROUTES,
    *metrics.ROUTES,
    *runs.ROUTES,
    *rollouts.ROUTES,
    *evaluations.ROUTES,
    *trainings.ROUTES,
    *episodes.ROUTES,
    *overview.ROUTES,
    *replicas.ROUTES,
    *system.ROUTES,
    *keys.ROUTES,
    *downloads.ROUTES,
    *admin.ROUTES,
    *tokenizers.ROUTES,
    Endpoint("GET", "/openapi.json", get_openapi, answer={"type": "object"}),
]
