"""The format of every error response, and the table from Lorimer's exceptions to status codes.

``{"detail": "<sentence>", "code": "<snake_case>", "request_id": "<id>"}``. A body is never empty: the SDK takes an
empty 400 for a proxy failure and retries the request.
"""

import logging
import re
from collections.abc import Mapping

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from lorimer import errors
from lorimer.server.foreign_errors import foreign_fields

logger = logging.getLogger(__name__)

STATUS: dict[type[errors.LorimerError], tuple[int, str]] = {
    errors.InvalidJson: (400, "invalid_json"),
    errors.InvalidField: (422, "invalid_field"),
    errors.InvalidInput: (400, "invalid_input"),
    errors.Unsupported: (400, "unsupported"),
    errors.TooLarge: (413, "too_large"),
    errors.QuotaExceeded: (429, "quota_exceeded"),
    errors.NotFound: (404, "not_found"),
    errors.Unauthorized: (401, "unauthorized"),
    errors.Forbidden: (403, "forbidden"),
    errors.Gone: (410, "gone"),
    errors.UnknownFuture: (410, "gone"),
    errors.Busy: (429, "busy"),
    errors.StorageError: (503, "storage_error"),
    errors.DiskFull: (507, "disk_full"),
    errors.NameTaken: (503, "storage_error"),
    errors.ModelRefused: (400, "model_refused"),
    errors.ModelNotFound: (404, "model_not_found"),
    errors.CheckpointError: (400, "checkpoint_error"),
    errors.Cancelled: (410, "cancelled"),
    errors.EngineDied: (503, "engine_died"),
    errors.EngineError: (500, "engine_error"),
    errors.LorimerError: (500, "internal_error"),
}
FAILED_LOOKUPS = (errors.NotFound, errors.UnknownFuture, errors.Unauthorized, errors.Forbidden)
"""Errors met by callers who guess ids, tokens and signatures; these are rate-limited."""
RETRY_AFTER = {429: "1", 503: "5"}
FULL_QUOTA = {"retry-after": "60", "x-should-retry": "false"}
"""Headers of a quota error: it persists until the user deletes something, so the SDK must raise it instead of retrying.
"""
HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
HTTP_DETAILS = {404: "there is nothing at this path", 405: "this path does not answer to this method"}


class Refusal(errors.LorimerError):
    """An error response with its own status and code, where ``STATUS`` is not specific enough."""

    def __init__(self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


def error_response(
    scope: Scope, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Build an error response. Tell clients when to retry, and that a conflict, which they would retry, stays one."""
    state = scope.get("state", {})
    shape = {"detail": printable(detail), "code": code, "request_id": state.get("request_id", "")}
    foreign = foreign_fields(scope["path"], status, code, shape["detail"], state.get("param"))
    body = orjson.dumps(shape | foreign)
    retry = {"retry-after": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    if status == 409:
        retry = {"x-should-retry": "false"}
    return Response(body, status, {**retry, **(headers or {})}, media_type="application/json")


def status_of(error: errors.LorimerError) -> tuple[int, str]:
    """Return the status and code of the nearest class of ``error`` in ``STATUS``."""
    if isinstance(error, Refusal):
        return error.status, error.code
    if isinstance(error, errors.StorageError) and errors.is_disk_full(error):
        return STATUS[errors.DiskFull]
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def printable(text: str) -> str:
    """Escape control characters and lone surrogates, because a message may quote text from the request."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: ascii(found[0])[1:-1], text)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a ``LorimerError`` raised by a route."""
    assert isinstance(error, errors.LorimerError)
    status, code = status_of(error)
    if status >= 500 and not isinstance(error, Refusal):
        logger.error("%s", code, exc_info=error, extra={"request_id": request.scope["state"].get("request_id", "")})
    request.scope["state"]["param"] = getattr(error, "param", None)
    quota = FULL_QUOTA if isinstance(error, errors.QuotaExceeded) else None
    headers = error.headers if isinstance(error, Refusal) else quota
    return error_response(request.scope, status, code, hide_data_directory(request, str(error)) or code, headers)


def hide_data_directory(request: Request, text: str) -> str:
    """Replace the path of the data directory, which users must not see."""
    app = request.scope.get("app")
    return text if app is None else text.replace(str(app.state.context.directory.path), "the data directory")


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer the errors that Starlette raises: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    detail = HTTP_DETAILS.get(status) or error.detail or "the request was refused"
    return error_response(request.scope, status, HTTP_CODES.get(status, "http_error"), detail, error.headers)
