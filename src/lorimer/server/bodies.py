"""Read, decompress and decode request bodies within limits.

Small bodies are decoded on the event loop. Larger bodies of routes without training data are decompressed in a thread;
their limits keep parsing short. Large or deeply structured training data, prompts and chats go to a decoder process
(``decoders.py``). Routes validate the meaning of a body.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import orjson
from starlette.requests import ClientDisconnect, Request

from lorimer.errors import InvalidInput, TooLarge
from lorimer.server.body_limits import BodyLimits, small_limits
from lorimer.server.context import context_of, user_of
from lorimer.server.decoder import Job
from lorimer.server.decoders import BodyMemory
from lorimer.server.decoding import AnyTask, CheckJson, DecodeTraining, NoHead, parse_json, perform, validate
from lorimer.server.errors import Refusal
from lorimer.types.compatibility import PROTOBUF
from lorimer.types.compression import ENCODINGS, decompress, too_large
from lorimer.types.wire_bounds import WireLimits, check_training_request

INLINE_BYTES = 64 * 1024
"""Larger bodies are not decoded on the event loop."""
INLINE_CONTAINERS = 1000
INLINE_FIELDS = 500
"""A small body with more lists and objects, or protobuf fields, than this takes milliseconds to decode."""

Model = TypeVar("Model")
Result = TypeVar("Result")
Head = TypeVar("Head")


async def read_body(request: Request, limits: BodyLimits | None = None) -> bytes:
    """Return the whole decompressed body. Raise ``TooLarge`` beyond the limits before allocating the memory."""
    context = context_of(request)
    max_bytes = context.settings.max_decompressed_bytes if limits is None else limits.max_bytes
    chunks, encoding = await _receive_body(request)
    size = sum(map(len, chunks))
    setting = limits.setting if limits is not None else "max_decompressed_bytes"
    try:
        small = _inline_body(chunks, size, encoding, max_bytes)
        if small is not None:
            return small
        body = BodyMemory(_user_id(request))
        memory = context.decoders.memory
        try:
            memory.grow(body, size)
            return await asyncio.to_thread(
                lambda: decompress(b"".join(chunks), encoding, max_bytes, lambda more: memory.grow(body, more))
            )
        finally:
            memory.release(body)
    except TooLarge as error:
        raise _decompressed_too_large(error, setting) from error


async def decode_data(request: Request, task: AnyTask, head: type[Head], limits: BodyLimits) -> tuple[Head, bytes]:
    """Decode a body as ``task`` says: on the event loop if that is quick, else in a decoder process."""
    context = context_of(request)
    chunks, encoding = await _receive_body(request)
    size = sum(map(len, chunks))
    try:
        small = _inline_body(chunks, size, encoding, limits.max_bytes)
    except TooLarge as error:
        raise _decompressed_too_large(error, limits.setting) from error
    if small is not None and _is_light(task, small):
        made, payload = perform(task, small, context.settings)
        assert isinstance(made, head)
        return made, payload
    job = Job(task, size, encoding, limits.max_bytes)
    try:
        found, payload = await context.decoders.decode(_user_id(request), job, chunks)
    except TooLarge as error:
        if str(error).endswith("when decompressed"):
            raise _decompressed_too_large(error, limits.setting) from error
        raise
    return (head() if head is NoHead else msgspec.msgpack.decode(found, type=head)), payload


async def _receive_body(request: Request) -> tuple[list[bytes], str]:
    """Receive the body as sent and validate its ``Content-Encoding``; respond 408 after ``body_seconds``."""
    settings = context_of(request).settings
    try:
        async with asyncio.timeout(settings.body_seconds):
            chunks = await _receive_chunks(request)
    except TimeoutError:
        detail = f"the body did not arrive within {settings.body_seconds:g} s"
        raise Refusal(408, "body_timeout", detail, {"connection": "close"}) from None
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "x-gzip", *ENCODINGS):
        reason = f"Content-Encoding {encoding[:100]!r} is not one of {', '.join(ENCODINGS)}"
        raise Refusal(415, "unsupported_encoding", reason)
    return chunks, encoding


def _inline_body(chunks: Sequence[bytes], size: int, encoding: str, max_bytes: int) -> bytes | None:
    """Return the decompressed body if it is small, else none. Raise ``TooLarge`` if it exceeds ``max_bytes``."""
    if encoding in ("", "identity") and size > max_bytes:
        raise too_large(max_bytes)
    if size > INLINE_BYTES:
        return None
    try:
        return decompress(b"".join(chunks), encoding, min(max_bytes, INLINE_BYTES))
    except TooLarge:
        if max_bytes <= INLINE_BYTES:
            raise
        return None


def _is_light(task: AnyTask, body: bytes) -> bool:
    """Return whether a small body is quick to decode."""
    if isinstance(task, DecodeTraining) and task.media.startswith(PROTOBUF):
        try:
            check_training_request(body, WireLimits(INLINE_FIELDS, INLINE_FIELDS))
        except TooLarge:
            return False
        except InvalidInput:
            return True  # validation fails before anything is allocated
        return True
    return body.count(b"[") + body.count(b"{") <= INLINE_CONTAINERS


def _decompressed_too_large(error: TooLarge, setting: str) -> Refusal:
    return Refusal(413, "decompressed_too_large", f"{error} ({setting})")


def _user_id(request: Request) -> str:
    user = getattr(request.state, "user", None)
    return user.user_id if user is not None else ""


async def _receive_chunks(request: Request) -> list[bytes]:
    context = context_of(request)
    limit, incoming, user_id = context.settings.max_body_bytes, context.incoming_bytes, user_of(request).user_id
    announced = request.headers.get("content-length", "")
    length = int(announced[:20]) if announced.isdecimal() else None
    if length is not None and length > limit:
        raise _too_large(announced, limit)
    chunks: list[bytes] = []
    received = 0
    is_ended = False
    try:
        # A server other than ours may end a body with an empty chunk; if the length is known, do not wait for it.
        while not is_ended and received != length:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            is_ended = not message.get("more_body", False)
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
    return chunks


def _too_large(size: str, limit: int) -> Refusal:
    detail = f"the body has {size} bytes; at most {limit} are accepted (max_body_bytes)"
    return Refusal(413, "too_large", detail, {"connection": "close"})


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Run ``work`` on the event loop if ``size`` is small, else in a thread."""
    return await asyncio.to_thread(work) if size > INLINE_BYTES else work()


async def decode(request: Request, model: type[Model], limits: BodyLimits | None = None) -> Model:
    """Decode a JSON body into ``model``: 400 ``invalid_json`` if it does not parse, 422 if it does not validate.

    An absent body counts as an empty object. Without ``limits`` the limits of small bodies apply.
    """
    if limits is None:
        limits = small_limits(context_of(request).settings)
        body = await read_body(request, limits)
        return await off_loop(len(body), lambda: validate(parse_json(body or b"{}", limits.json), model))
    raw = await read_checked_json(request, limits)
    return await off_loop(len(raw), lambda: validate(orjson.loads(raw), model))


async def read_checked_json(request: Request, limits: BodyLimits) -> bytes:
    """Return a large JSON body after checking it against its limits in a decoder.

    An absent body counts as an empty object.
    """
    json = limits.json
    task = CheckJson(json.depth, json.values, json.containers, json.setting)
    _, body = await decode_data(request, task, NoHead, limits)
    return body
