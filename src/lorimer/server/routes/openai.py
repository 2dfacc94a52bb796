"""OpenAI's inference API at ``/v1`` and at Tinker's own prefix: models, completions, chat completions.

A sample is cancelled when its client disconnects, streamed or not. Nothing is stored.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorimer.errors import NotFound
from lorimer.server.context import context_of, user_of
from lorimer.server.foreign_errors import openai_error
from lorimer.server.openai import chat, completions
from lorimer.server.openai.disconnects import Reader
from lorimer.server.openai.parameters import read_parameters
from lorimer.server.openai.schemas import ChatRequest, CompletionRequest
from lorimer.server.openai.sse import DONE, Event, stream
from lorimer.server.routes.ownership import find_checkpoint, quote_id
from lorimer.server.routes.replies import reply
from lorimer.store import checkpoints
from lorimer.types.paths import SCHEME, checkpoint_path

PREFIXES = ("/v1", "/oai/api/v1")
MAX_LISTED = 100
"""How many of the caller's newest checkpoints the list of models includes."""


async def list_models(request: Request) -> Response:
    """List the base models and the caller's newest checkpoints that can be sampled."""
    context, user = context_of(request), user_of(request)
    found, _ = await context.store.read(checkpoints.list_for_user, user.user_id, MAX_LISTED, 0)
    models = [base_model(request, name) for name in context.scheduler.models]
    for one in found:
        if one.kind != "external":
            path = checkpoint_path(one.model_id, one.kind, one.name)
            models.append(shown_model(path, int(one.created_at.timestamp()), user.user_id))
    return reply({"object": "list", "data": models})


async def get_model(request: Request) -> Response:
    """Return one model."""
    name = request.path_params["model"]
    if name.startswith(SCHEME):
        found = await find_checkpoint(request, name, to_read=True)
        return reply(shown_model(name, int(found.created_at.timestamp()), found.user_id))
    if name not in context_of(request).scheduler.models:
        raise NotFound(f"there is no model {quote_id(name)}")
    return reply(base_model(request, name))


def base_model(request: Request, name: str) -> dict[str, Any]:
    since_start = time.monotonic() - context_of(request).started_at
    return shown_model(name, int(time.time() - since_start), "lorimer")


def shown_model(name: str, created: int, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


async def create_completion(request: Request) -> Response:
    """Complete one or more prompts."""
    body = await read_parameters(request, CompletionRequest)
    with Reader(request) as reader:
        return await answer_completion(request, reader, await reader.wait(completions.prepare(request, body)))


async def answer_completion(request: Request, reader: Reader, job: completions.CompletionJob) -> Response:
    """Answer a prepared request, as a stream or whole."""
    if job.body.stream:
        return await stream(reader, unnamed(completions.chunks(request, job)), show_error, DONE)
    return reply(await reader.wait(completions.answer(request, job)))


async def create_chat_completion(request: Request) -> Response:
    """Generate the next message of a conversation."""
    body = await read_parameters(request, ChatRequest)
    with Reader(request) as reader:
        return await answer_chat(request, reader, await reader.wait(chat.prepare(request, body)))


async def answer_chat(request: Request, reader: Reader, job: chat.ChatJob) -> Response:
    """Answer a prepared request, as a stream or whole."""
    if job.body.stream:
        return await stream(reader, unnamed(chat.chunks(request, job)), show_error, DONE)
    return reply(await reader.wait(chat.answer(request, job)))


async def unnamed(chunks: AsyncGenerator[Mapping[str, Any]]) -> AsyncIterator[Event]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield "", chunk


def show_error(status: int, code: str, message: str) -> Event:
    return "", {"error": openai_error(status, code, message)}


ROUTES = [
    route
    for prefix in PREFIXES
    for route in (
        Route(f"{prefix}/models", list_models, methods=["GET"]),
        Route(f"{prefix}/models/{{model:path}}", get_model, methods=["GET"]),
        Route(f"{prefix}/completions", create_completion, methods=["POST"]),
        Route(f"{prefix}/chat/completions", create_chat_completion, methods=["POST"]),
    )
]
