"""Shared handling of a run's numbered operations: a refused operation consumes its `seq_id`.

After a final refusal the client continues with the next number, so the scheduler must not wait for the refused one. A
response after which the client retries with the same number (408, 429, 5xx) leaves the number free, except for an
exhausted quota: a retry then finds the refused operation and its reason.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import InvalidInput, LorimerError, QuotaExceeded
from lorimer.server.bodies import off_loop, read_body
from lorimer.server.body_limits import small_limits
from lorimer.server.context import Context, context_of, user_of
from lorimer.server.decoding import parse_json, validate
from lorimer.server.errors import status_of
from lorimer.server.openapi import JSON, Endpoint
from lorimer.server.routes.field_checks import MAX_SEQ_ID, check_seq_id
from lorimer.server.routes.ownership import find_trainable, is_id
from lorimer.store import runs
from lorimer.store.runs import Run
from lorimer.store.users import User
from lorimer.types import UntypedAPIFuture


class Numbered(Protocol):
    """A request with a sequence number within a run."""

    @property
    def model_id(self) -> str | None: ...
    @property
    def seq_id(self) -> int | None: ...


Body = TypeVar("Body", bound=Numbered)

REPEATED = (408, 429)
"""Statuses after which a client retries with the same number."""


@dataclass(frozen=True)
class Submitted(Generic[Body]):
    """A decoded operation whose run belongs to the caller."""

    context: Context
    user: User
    run: Run
    seq_id: int
    body: Body


async def read_json(request: Request) -> Any:
    """Read and parse a small JSON body. An absent body counts as an empty object."""
    limits = small_limits(context_of(request).settings)
    data = await read_body(request, limits)
    return await off_loop(len(data), lambda: parse_json(data or b"{}", limits.json))


@asynccontextmanager
async def operation(request: Request, model: type[Body]) -> AsyncIterator[Submitted[Body]]:
    """Decode the body of a numbered operation. An error inside the block consumes its `seq_id`."""
    raw = await read_json(request)
    async with parsed_operation(request, model, raw) as submitted:
        yield submitted


@asynccontextmanager
async def parsed_operation(request: Request, model: type[Body], raw: object) -> AsyncIterator[Submitted[Body]]:
    """Like `operation`, for a body that is already parsed."""
    fields = raw if isinstance(raw, dict) else {}
    async with consumes_seq_id(request, fields.get("model_id"), fields.get("seq_id")):
        body = validate(raw, model)
        if body.model_id is None:
            raise InvalidInput("model_id is missing; create_model gives one")
        run = await find_trainable(request, body.model_id)
        yield Submitted(context_of(request), user_of(request), run, check_seq_id(body.seq_id), body)


@asynccontextmanager
async def consumes_seq_id(request: Request, model_id: object, seq_id: object) -> AsyncIterator[None]:
    """Consume `seq_id` when the block fails with an error the client will not retry (4xx other than 408 and 429).

    Ignored unless the run belongs to the caller and `seq_id` is a valid number. An exhausted quota consumes it too.
    """
    try:
        yield
    except LorimerError as error:
        status, _ = status_of(error)
        if 400 <= status < 500 and (status not in REPEATED or isinstance(error, QuotaExceeded)):
            await _consume_seq_id(request, model_id, seq_id, str(error))
        raise


async def _consume_seq_id(request: Request, model_id: object, seq_id: object, reason: str) -> None:
    if not isinstance(model_id, str) or not is_id(model_id) or isinstance(seq_id, bool):
        return
    if not isinstance(seq_id, int) or not 1 <= seq_id <= MAX_SEQ_ID:
        return
    context, user = context_of(request), user_of(request)
    run = await context.store.read(runs.get_run, model_id)
    if run is not None and run.user_id == user.user_id:
        await context.scheduler.reject(user, run, seq_id, reason)


def submit_endpoint(
    path: str,
    function: Callable[[Request], Awaitable[Response]],
    body: type[BaseModel] | dict[str, Any],
    media: tuple[str, ...] = (JSON,),
) -> Endpoint:
    """Create a route that accepts work and responds with a future."""
    return Endpoint("POST", path, function, body=body, answer=UntypedAPIFuture, media=media)
