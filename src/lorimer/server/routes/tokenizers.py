"""Serves the tokenizer files of a base model, for clients without the model's directory or access to the hub."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from lorimer.errors import NotFound
from lorimer.server.context import context_of
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.models import check_served
from lorimer.server.routes.ownership import quote_id
from lorimer.server.routes.replies import reply
from lorimer.store.tokenizers import FILES, describe_files

BYTES = "application/octet-stream"
LISTING: dict[str, Any] = {
    "type": "object",
    "required": ["files"],
    "properties": {
        "files": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["size", "sha256"],
                "properties": {"size": {"type": "integer"}, "sha256": {"type": "string"}},
            },
        }
    },
}


async def directory_of(request: Request) -> Path:
    context, name = context_of(request), request.path_params["name"]
    check_served(context, name)
    return Path((await context.scheduler.model_info(name)).directory)


async def list_tokenizer_files(request: Request) -> Response:
    """List the tokenizer's files with sizes and digests."""
    directory = await directory_of(request)
    return reply({"files": await asyncio.to_thread(describe_files, directory)})


async def get_tokenizer_file(request: Request) -> Response:
    """Send one of the tokenizer's files."""
    name = request.path_params["file"]
    path = await directory_of(request) / name
    if name not in FILES or not path.is_file():
        raise NotFound(f"the tokenizer has no file {quote_id(name)}")
    return FileResponse(path, media_type=BYTES)


ROUTES = [
    Endpoint("GET", "/api/v1/models/{name:path}/tokenizer", list_tokenizer_files, answer=LISTING),
    Endpoint("GET", "/api/v1/models/{name:path}/tokenizer/{file}", get_tokenizer_file, answer_media=(BYTES,)),
]
