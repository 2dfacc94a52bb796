"""The route of the system over time. As with the replicas, every user sees totals and nobody's requests."""

from starlette.requests import Request
from starlette.responses import Response

from lorimer.server.bodies import off_loop
from lorimer.server.context import context_of
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.queries import query_number, query_word
from lorimer.server.routes.replies import reply
from lorimer.store import system
from lorimer.types.metrics import LAST_SECOND
from lorimer.types.system import SystemResponse

BYTES_OF_POINT = 30


async def get_system(request: Request) -> Response:
    """Return CPU, memory, GPUs, disk, queues and throughput over the last hour, day or week, or after a second."""
    context = context_of(request)
    chosen = query_word(request, "range", tuple(system.SHOWN))
    after = query_number(request, "after", 0, int(LAST_SECOND)) if "after" in request.query_params else None
    now = int(context.now().timestamp())
    found = await context.store.read(system.read, chosen, now, after)
    period, _ = system.SHOWN[chosen]
    answer = {
        "period_seconds": period or context.settings.system_sample_seconds,
        "now": now,
        "series": [
            {"source": source, "kind": name.partition("/")[0], "name": name.partition("/")[2], "points": points}
            for (source, name), points in found.items()
        ],
    }
    num_points = sum(map(len, found.values()))
    return await off_loop(num_points * BYTES_OF_POINT, lambda: reply(answer))


ROUTES = [
    Endpoint(
        "GET",
        "/api/v1/system",
        get_system,
        query={
            "range": {"type": "string", "enum": list(system.SHOWN)},
            "after": {"type": "integer", "minimum": 0},
        },
        answer=SystemResponse,
    )
]
