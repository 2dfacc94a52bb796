"""Anthropic's Messages API at Tinker's prefix for it: messages, token counts, models."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorimer.server.anthropic import mapping
from lorimer.server.anthropic.schemas import CountRequest, MessagesRequest
from lorimer.server.context import context_of
from lorimer.server.foreign_errors import anthropic_error
from lorimer.server.openai import chat
from lorimer.server.openai.disconnects import Reader
from lorimer.server.openai.parameters import read_parameters
from lorimer.server.openai.sse import Event, stream
from lorimer.server.routes.replies import reply

PREFIX = "/anthropic/api/v1"


async def create_message(request: Request) -> Response:
    """Generate the next message of a conversation."""
    body = await read_parameters(request, MessagesRequest)
    chat_body = mapping.chat_request(body)
    with Reader(request) as reader:
        job = await reader.wait(chat.prepare(request, chat_body))
        if body.stream:
            return await stream(reader, mapping.events(request, job), show_error)
        return reply(await reader.wait(mapping.answer(request, job)))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt."""
    body = await read_parameters(request, CountRequest)
    with Reader(request) as reader:
        return reply(await reader.wait(mapping.count(request, body)))


async def list_models(request: Request) -> Response:
    """List the base models. Checkpoint paths are accepted as models too."""
    names = list(context_of(request).scheduler.models)
    listing = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return reply({"data": [shown_model(name) for name in names], **listing})


def shown_model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": datetime.fromtimestamp(0, UTC).isoformat()}


def show_error(status: int, code: str, message: str) -> Event:
    return "error", {"type": "error", "error": anthropic_error(status, message)}


ROUTES = [
    Route(f"{PREFIX}/messages", create_message, methods=["POST"]),
    Route(f"{PREFIX}/messages/count_tokens", count_tokens, methods=["POST"]),
    Route(f"{PREFIX}/models", list_models, methods=["GET"]),
]
