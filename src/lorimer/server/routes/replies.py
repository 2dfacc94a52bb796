"""Builds JSON responses with orjson from wire models or plain objects."""

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.responses import Response

from lorimer.scheduler import spans
from lorimer.scheduler.scheduler import Accepted


def reply(value: BaseModel | Mapping[str, Any], status: int = 200) -> Response:
    """Return a JSON response. Times are ISO 8601 with a time zone."""
    content = value.model_dump() if isinstance(value, BaseModel) else value
    return Response(orjson.dumps(content), status, media_type="application/json")


def promise(accepted: Accepted) -> Response:
    """Return the immediate response to an asynchronous operation, which names its future."""
    spans.submitted(accepted.request_id)
    content: dict[str, Any] = {"request_id": accepted.request_id}
    if accepted.model_id is not None:
        content["model_id"] = accepted.model_id
    if accepted.sample_sequence_ids is not None:
        content["sample_sequence_ids"] = accepted.sample_sequence_ids
    return reply(content)


def done() -> Response:
    """Return an empty response (204)."""
    return Response(status_code=204)
