"""Request bodies: read within limits, decompressed within limits, parsed into the types of the wire.

Large bodies are decompressed and parsed in a thread, so that other requests are answered meanwhile. What a body
means is left to the routes.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request

from lorimer.errors import InvalidInput, TooLarge, Unsupported
from lorimer.server.body_limits import BodyLimits, small_limits
from lorimer.server.context import context_of, user_of
from lorimer.server.errors import Refusal
from lorimer.types.base import MAX_ERRORS, shown_input
from lorimer.types.compression import decompress
from lorimer.types.json_bounds import JsonLimits, check_json, refuse_doubled_keys

OFF_LOOP_BYTES = 256 * 1024
"""Bodies of more than this are handled in a thread."""

Model = TypeVar("Model")
Result = TypeVar("Result")


async def read_body(request: Request, limits: BodyLimits | None = None) -> bytes:
    """The whole body, decompressed; ``TooLarge`` beyond the limits, before the memory is taken."""
    settings = context_of(request).settings
    most = settings.max_decompressed_bytes if limits is None else limits.max_bytes
    try:
        async with asyncio.timeout(settings.body_seconds):
            body = await _receive(request)
    except TimeoutError:
        detail = f"the body did not arrive within {settings.body_seconds:g} s"
        raise Refusal(408, "body_timeout", detail, {"connection": "close"}) from None
    encoding = request.headers.get("content-encoding", "")
    try:
        return await off_loop(len(body), lambda: decompress(body, encoding, most))
    except TooLarge as error:
        setting = limits.setting if limits is not None else "max_decompressed_bytes"
        raise Refusal(413, "decompressed_too_large", f"{error} ({setting})") from error
    except Unsupported as error:
        raise Refusal(415, "unsupported_encoding", str(error)) from error


async def _receive(request: Request) -> bytes:
    context = context_of(request)
    limit, incoming, user_id = context.settings.max_body_bytes, context.incoming_bytes, user_of(request).user_id
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_large(announced, limit)
    chunks: list[bytes] = []
    received = 0
    try:
        async for chunk in request.stream():
            if received + len(chunk) > limit:
                raise _too_large(f"more than {limit}", limit)
            if not incoming.has_room(user_id, len(chunk)):
                detail = (
                    f"{incoming.held_by(user_id)} bytes of bodies are arriving from you, {incoming.held} in all;"
                    f" users share {incoming.total} (max_incoming_bytes): send this again"
                )
                raise Refusal(429, "too_many_bytes", detail, {"connection": "close"})
            received += len(chunk)
            incoming.take(user_id, len(chunk))
            chunks.append(chunk)
    finally:
        incoming.give_back(user_id, received)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(size: str, limit: int) -> Refusal:
    detail = f"the body has {size} bytes; at most {limit} are accepted (max_body_bytes)"
    return Refusal(413, "too_large", detail, {"connection": "close"})


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Do it here when it is small, in a thread when it would hold other requests up."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()


async def decode(request: Request, model: type[Model], limits: BodyLimits | None = None) -> Model:
    """The JSON body as ``model``; 400 ``invalid_json`` if it cannot be parsed, 422 with the field if it does not fit.

    An absent body is an empty object. Unless ``limits`` says otherwise, it is a small one.
    """
    limits = limits or small_limits(context_of(request).settings)
    body = await read_body(request, limits)
    return await off_loop(len(body), lambda: validate(parse_json(body or b"{}", limits.json), model))


def validate(value: object, model: type[Model]) -> Model:
    """Check a parsed body against a pydantic model, or against any type pydantic knows."""
    try:
        if isinstance(model, type) and issubclass(model, BaseModel):
            return model.model_validate(value)
        return TypeAdapter(model).validate_python(value)
    except ValidationError as error:
        raise Refusal(422, "invalid_field", describe(error)) from None


def describe(error: ValidationError) -> str:
    """One sentence with the path of each wrong field, the first few."""
    found = error.errors(include_url=False, include_context=False, include_input=True)
    parts = [f"{field_path(item['loc'])}: {item['msg']}{_got(item)}" for item in found[:MAX_ERRORS]]
    more = f"; and {len(found) - MAX_ERRORS} more" if len(found) > MAX_ERRORS else ""
    return "; ".join(parts) + more


def field_path(location: tuple[int | str, ...]) -> str:
    """``("data", 3, "weights")`` is ``data[3].weights``."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".") or "body"


def _got(item: Any) -> str:
    value = item["input"]
    if item["type"] in ("missing", "extra_forbidden") or not isinstance(value, str | int | float | bool | None):
        return ""
    return f", got {shown_input(value)}"


def parse_json(body: bytes, limits: JsonLimits) -> Any:
    """Parse strictly: no NaN, no infinity, no key twice, no more values and nesting than the limits allow."""
    try:
        counts = check_json(body, limits)
        value = orjson.loads(body)
        refuse_doubled_keys(body, value, counts)
    except orjson.JSONDecodeError as error:
        raise invalid_json(str(error)) from None
    except TooLarge:
        raise
    except InvalidInput as error:
        raise invalid_json(str(error)) from None
    return value


def invalid_json(reason: str) -> Refusal:
    return Refusal(400, "invalid_json", f"the body is not JSON that is accepted: {reason}")
