"""Every route with input that makes no sense: an answer in our shape, never a 500, never an empty 400."""

import re
from itertools import product

import pytest

from lorimer.server.openapi import PROTOBUF
from lorimer.server.routes import ALL_ROUTES

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODIES = {
    "nothing": b"",
    "null": b"null",
    "number": b"5",
    "text": b'"x"',
    "list": b"[]",
    "object": b"{}",
    "torn": b'{"a": ',
    "no UTF-8": b"\xff\xfe",
    "NaN": b'{"model_id": NaN}',
    "deep": b"[" * 5000 + b"]" * 5000,
    "long number": b'{"seq_id": ' + b"9" * 5000 + b"}",
    "key twice": b'{"model_id": "a", "model_id": "b"}',
    "wrong types": (
        b'{"model_id": [], "seq_id": {}, "session_id": 1.5, "path": {"a": 1}, "request_id": null, "prompt": "p", '
        b'"sampling_params": [], "target": 3, "tags": "x", "reason": "r", "tinker_path": [], "sdk_version": {}}'
    ),
    "NUL": (
        b'{"model_id": "a\\u0000b", "seq_id": 1, "session_id": "a\\u0000b", "path": "tinker://a\\u0000b/weights/c", '
        b'"request_id": "a\\u0000b", "optimizer": false, "tinker_path": "tinker://a\\u0000b/weights/c"}'
    ),
}
MEDIA = ("application/json", PROTOBUF, "text/plain")
SHAPE = {"detail", "code", "request_id"}
ROUTES = {f"{route.method} {route.path}": route for route in ALL_ROUTES}


# One takes no input, and would end the key of the other tests.
TAKING_INPUT = {name: route for name, route in ROUTES.items() if name != "DELETE /api/v1/auth/apikey/me"}


async def test_nonsense_is_answered_in_shape(ada):
    unexpected = {}
    for name, route in TAKING_INPUT.items():
        shape = SHAPE | {"error"} if route.path.startswith("/v1/") else SHAPE  # what OpenAI's clients read
        values = ("x", "a%00b", "%2e%2e", "x" * 3000) if "{" in route.path else ("",)
        for (label, body), media, value in product(BODIES.items(), MEDIA, values):
            path = re.sub(r"{\w+(:\w+)?}", value, route.path)
            headers = {**ada.headers, "content-type": media}
            response = await ada.http.request(route.method, path, content=body, headers=headers)
            is_refusal = response.status_code >= 400
            if response.status_code >= 500 or (is_refusal and response.json().keys() != shape):
                unexpected[name, label, media, value[:9]] = (response.status_code, response.text[:200])
    assert unexpected == {}


async def test_no_route_answers_without_a_key(server):
    for name, route in ROUTES.items():
        path = re.sub(r"{\w+(:\w+)?}", "x", route.path)
        response = await server.ada.http.request(route.method, path)
        if path.startswith("/api/v1/downloads/"):
            assert response.status_code == 403, f"{name} is signed"
        else:
            assert (response.status_code, response.json()["code"]) == (401, "unauthorized"), name
