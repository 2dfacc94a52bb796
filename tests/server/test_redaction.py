"""Telemetry keeps no secrets and has bounds."""

import orjson
import pytest

from lorimer.server.redaction import MAX_EVENT_BYTES, REDACTED, clean_events, redact

KEY = "tml-Abc123Def456Ghi789"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    "value",
    [
        {"request_headers": {"X-API-Key": "anything", "Cookie": "a=b", "Authorization": "Basic x"}},
        {"headers": [["x-api-key", "anything"], ["authorization", "Basic x"]]},
        {"error_message": f"bad key {KEY}, or {JWT}"},
        {"traceback": "headers={'x-api-key': 'anything', 'authorization': 'Basic x', 'cookie': 'a=b'}"},
        {"event_data": {"deep": [{"deeper": {KEY: f"{KEY}"}}]}},
        {"CF-Access-Client-Secret": "anything", "weights_access_token": "anything"},
    ],
    ids=["headers", "pairs", "key and token in text", "headers in text", "nested and as a name", "other secrets"],
)
def test_secrets_are_replaced(value):
    kept = orjson.dumps(redact(value)).decode()
    assert REDACTED in kept
    for secret in (KEY, JWT, "anything", "Basic", "a=b"):
        assert secret not in kept


def test_what_is_no_secret_stays():
    event = {"event": "GENERIC_EVENT", "event_data": {"ms": 1.5, "ok": True, "none": None, "list": [1, "two"]}}
    assert redact(event) == event


def test_events_are_bounded():
    large = {"event": "GENERIC_EVENT", "event_id": "e", "event_data": {str(number): "x" * 8000 for number in range(50)}}
    kept = clean_events([large, "no event", 3, {"event": "SESSION_START"}, {"event": "SESSION_END"}], 4)
    assert kept == [{"event": "GENERIC_EVENT", "event_id": "e", "truncated": True}, {"event": "SESSION_START"}]
    [shortened] = clean_events([{"traceback": "x" * 10 * MAX_EVENT_BYTES}], 1)
    assert len(shortened["traceback"]) < MAX_EVENT_BYTES
