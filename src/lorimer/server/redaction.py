"""Redacts and truncates telemetry events, which may contain the headers of a failed request."""

import re
from typing import Any

import orjson

SECRET_NAMES = re.compile(
    r"(?i)^(proxy-)?authorization$|^(set-)?cookie$|api[-_]?key|client-secret|access[-_]?token|password|^jwt$"
)
"""Names of headers and fields whose values are removed."""
SECRET_TEXT = re.compile(r"tml-[A-Za-z0-9_-]{4,}|eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
"""API keys and tokens anywhere in a text."""
SECRET_PAIRS = re.compile(
    r"(?i)((?:x-api-key|authorization|cookie|client-secret|access[-_]token)[\"']?\s*[:=,]\s*[\"']?)([^\"'\r\n,;})\]]+)"
)
"""A header inside a text, such as the repr of a request in a traceback."""
REDACTED = "[removed]"
MAX_TEXT = 8192
MAX_EVENT_BYTES = 64 * 1024
CORE = ("event", "event_id", "event_session_index", "severity", "timestamp", "event_name", "error_type")


def clean_events(events: list[Any], max_events: int) -> list[dict[str, Any]]:
    """Redact the first `max_events` events that are objects. Reduce very large events to their main fields."""
    return [clean_event(event) for event in events[:max_events] if isinstance(event, dict)]


def clean_event(event: dict[str, Any]) -> dict[str, Any]:
    cleaned: dict[str, Any] = redact(event)
    if len(orjson.dumps(cleaned)) <= MAX_EVENT_BYTES:
        return cleaned
    core = {name: cleaned[name] for name in CORE if isinstance(cleaned.get(name), str | int)}
    return core | {"truncated": True}


def redact(value: Any) -> Any:
    """Replace secrets in a value at any depth."""
    if isinstance(value, dict):
        return {
            redact_text(name): REDACTED if SECRET_NAMES.search(name) else redact(item) for name, item in value.items()
        }
    if isinstance(value, list):
        if len(value) == 2 and isinstance(value[0], str) and SECRET_NAMES.search(value[0]):
            return [value[0], REDACTED]  # a header as a (name, value) pair
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    shortened = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
    return SECRET_PAIRS.sub(rf"\1{REDACTED}", SECRET_TEXT.sub(REDACTED, shortened))
