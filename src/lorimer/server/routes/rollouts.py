"""Routes for the rollouts and samples of a run: log, find, read, count by step and reward.

A run is addressed as in `runs`, and only its owner reads or logs rollouts.
"""

from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import NotFound
from lorimer.server.bodies import decode_data, off_loop
from lorimer.server.body_limits import rollout_limits
from lorimer.server.context import context_of
from lorimer.server.decoding import DecodeRollouts, RolloutsHead
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.field_checks import check_text
from lorimer.server.routes.queries import query_number, query_text, query_word
from lorimer.server.routes.replies import reply
from lorimer.server.routes.runs import RUN, find_tracked
from lorimer.store import quotas, rollout_search, rollouts
from lorimer.store.rollout_search import SORTS, Scope
from lorimer.store.rollouts import Limits, StoredRollout
from lorimer.types.rollouts import (
    LoggedRollout,
    LogRolloutsRequest,
    LogRolloutsResponse,
    RolloutsResponse,
    RolloutStepsResponse,
)

MAX_ROLLOUTS = 1000
MAX_CONTENTS = 100
MAX_PAGE_BYTES = 8 * 1024 * 1024
"""A page with contents ends after the rollout that reaches this size."""
MAX_BINS = 200

Shown = dict[str, Any]


async def log_rollouts(request: Request) -> Response:
    """Persist rollouts that a client logs. One that is logged again replaces the earlier one."""
    context = context_of(request)
    run = await find_tracked(request)
    settings = context.settings
    body, _ = await decode_data(request, DecodeRollouts(), RolloutsHead, rollout_limits(settings))
    limits = Limits(settings.max_rollouts_per_run, settings.max_rollout_bytes_per_run)
    part = request.path_params["run_id"]

    def log(c: Connection) -> tuple[int, int]:
        size = sum(one.stored_bytes for one in body.rollouts)
        quotas.check_rollouts(c, run.user_id, size, settings.max_stored_bytes)
        return rollouts.log(c, run.run_id, part, body.rollouts, limits)

    stored, superseded = await context.store.write(log)
    return reply(LogRolloutsResponse(num_stored=stored, num_superseded=superseded))


async def list_rollouts(request: Request) -> Response:
    """List the rollouts of a run that match `q`, sorted, from a cursor; with their turns if `content` is asked for."""
    scope = await scope_of(request)
    has_content = query_word(request, "content", ("no", "yes")) == "yes"
    limit = query_number(request, "limit", 50, MAX_CONTENTS if has_content else MAX_ROLLOUTS)
    asked = {"sort": query_text(request, "sort") or "-step", "limit": limit, "after": query_text(request, "after")}
    found, total = await context_of(request).store.read(read_page, scope, has_content, asked)
    return await reply_rollouts(found, total)


def read_page(
    c: Connection, scope: Scope, has_content: bool, asked: dict[str, Any]
) -> tuple[tuple[list[Shown], str | None], int | None]:
    total = rollout_search.count(c, scope) if asked["after"] is None else None
    page = rollout_search.find(c, scope, **asked)
    rows, cursor = page.rows, page.next_cursor
    if has_content:
        fitting = first_rows(rows)
        if len(fitting) < len(rows):
            rows, cursor = fitting, rollout_search.cursor_after(fitting[-1], asked["sort"])
        rollouts.expect_contents(c, rows)
    contents = [{"content": rollouts.read_content(c, row)} if has_content else {} for row in rows]
    return ([shown(row) | content for row, content in zip(rows, contents, strict=True)], cursor), total


def first_rows(rows: list[StoredRollout]) -> list[StoredRollout]:
    """Return the rollouts whose contents fit into one answer, at least one."""
    size = 0
    for number, row in enumerate(rows):
        if size >= MAX_PAGE_BYTES:
            return rows[:number]
        size += row.content_bytes
    return rows


async def reply_rollouts(found: tuple[list[Shown], str | None], total: int | None) -> Response:
    rows, cursor = found
    size = sum(one.get("content_bytes", 0) if "content" in one else 300 for one in rows)
    answer = {"rollouts": rows, "total_count": total, "next_cursor": cursor}
    return await off_loop(size, lambda: reply(answer))


async def get_rollout(request: Request) -> Response:
    """Return one rollout of a run with its turns."""
    run = await find_tracked(request)
    text = request.path_params["rollout_id"]
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0
    found = await context_of(request).store.read(read_one, run.run_id, number)
    if found is None:
        raise NotFound(f"the run has no rollout {text[:20]!r}")
    return await off_loop(found["content_bytes"], lambda: reply(found))


def read_one(c: Connection, run_id: str, rollout_id: int) -> Shown | None:
    row = rollout_search.get(c, run_id, rollout_id)
    return None if row is None else shown(row) | {"content": rollouts.read_content(c, row)}


async def list_rollout_steps(request: Request) -> Response:
    """List the steps of a run that have rollouts which match `q`, with a histogram of their rewards."""
    scope = await scope_of(request)
    num_bins = query_number(request, "bins", 20, MAX_BINS, 1)
    found = await context_of(request).store.read(rollout_search.count_steps, scope, num_bins)
    answer = RolloutStepsResponse(
        steps=found.steps,
        num_rollouts=sum(step.num_rollouts for step in found.steps),
        edges=found.edges,
        counts=found.counts,
        values=found.values,
    )
    return await off_loop(len(found.steps) * (100 + 4 * num_bins), lambda: reply(answer))


async def scope_of(request: Request) -> Scope:
    run = await find_tracked(request)
    query = query_text(request, "q") or ""
    check_text(context_of(request).settings, q=query)
    return Scope(run.run_id, query)


def shown(row: StoredRollout) -> Shown:
    """Return the fields of a `LoggedRollout`."""
    values = dict(vars(row))
    values["training_run_id"] = values.pop("model_id")
    values["group"] = values.pop("group_name")
    return values | {"tags": [tag for tag in row.tags.split("\n") if tag]}


SEARCH: dict[str, dict[str, Any]] = {"q": {"type": "string"}}

ROUTES = [
    Endpoint("POST", RUN + "/rollouts", log_rollouts, body=LogRolloutsRequest, answer=LogRolloutsResponse),
    Endpoint(
        "GET",
        RUN + "/rollouts",
        list_rollouts,
        query=SEARCH
        | {
            "sort": {"type": "string", "enum": [sign + name for name in SORTS for sign in ("", "-")]},
            "content": {"type": "string", "enum": ["no", "yes"]},
            "limit": {"type": "integer", "minimum": 0, "maximum": MAX_ROLLOUTS},
            "after": {"type": "string"},
        },
        answer=RolloutsResponse,
    ),
    Endpoint(
        "GET",
        RUN + "/rollout_steps",
        list_rollout_steps,
        query=SEARCH | {"bins": {"type": "integer", "minimum": 1, "maximum": MAX_BINS}},
        answer=RolloutStepsResponse,
    ),
    Endpoint("GET", RUN + "/rollouts/{rollout_id}", get_rollout, answer=LoggedRollout),
]
