"""Parses query strings: bounded numbers, words from a fixed set, times with a time zone."""

from datetime import datetime
from typing import Any, TypeVar

from starlette.requests import Request

from lorimer.errors import InvalidInput
from lorimer.server.routes.ownership import is_id, quote_id

Word = TypeVar("Word", bound=str)

MAX_LIMIT = 10_000
SCOPES = ("owned", "accessible")

PAGE: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 0, "maximum": MAX_LIMIT},
    "offset": {"type": "integer", "minimum": 0},
}
SCOPE: dict[str, dict[str, Any]] = {"access_scope": {"type": "string", "enum": list(SCOPES)}}


def query_text(request: Request, name: str) -> str | None:
    text = request.query_params.get(name)
    if text is not None and not is_id(text):
        raise InvalidInput(f"{name} is {quote_id(text)}; text without NUL is accepted")
    return text


def query_number(request: Request, name: str, default: int, maximum: int = 2**53, minimum: int = 0) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and minimum <= int(text) <= maximum):
        raise InvalidInput(f"{name} is {quote_id(text)}; {minimum} to {maximum} is accepted")
    return int(text)


def query_page(request: Request, default_limit: int) -> tuple[int, int]:
    """Return `limit` and `offset`."""
    return query_number(request, "limit", default_limit, MAX_LIMIT), query_number(request, "offset", 0)


def query_word(request: Request, name: str, accepted: tuple[Word, ...]) -> Word:
    """Return the parameter if it is one of `accepted`; the default is the first."""
    text = request.query_params.get(name)
    for word in accepted:
        if text in (None, word):
            return word
    raise InvalidInput(f"{name} is {quote_id(text or '')}; accepted are {', '.join(accepted)}")


def query_moment(request: Request, name: str) -> datetime:
    """Parse a required RFC 3339 time."""
    text = request.query_params.get(name)
    try:
        # An unescaped plus sign arrives as a space.
        moment = datetime.fromisoformat((text or "").replace(" ", "+"))
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        shown = "missing" if text is None else quote_id(text)
        raise InvalidInput(f"{name} is {shown}; a time with its zone, such as '2026-01-31T00:00:00Z', is accepted")
    return moment
