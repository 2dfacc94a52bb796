"""Adds the error fields that OpenAI and Anthropic clients expect, on the paths of those APIs.

The server's own fields stay: every error response has ``detail`` and ``request_id``.
"""

from typing import Any

OPENAI = ("/v1/", "/oai/api/v1/")
ANTHROPIC = ("/anthropic/api/",)
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OPENAI_CODES = {"unauthorized": "invalid_api_key"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def openai_error(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """Return ``{"message", "type", "param", "code"}``."""
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": param, "code": _OPENAI_CODES.get(code, code)}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return ``{"type", "message"}``."""
    default = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": _ANTHROPIC_TYPES.get(status, default), "message": message}


def foreign_fields(path: str, status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
    """Return the extra fields of an error response on ``path``."""
    if path.startswith(OPENAI):
        return {"error": openai_error(status, code, message, param)}
    if path.startswith(ANTHROPIC):
        return {"type": "error", "error": anthropic_error(status, message)}
    return {}
