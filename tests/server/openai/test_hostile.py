"""Bodies that are right but for one thing: answered in the shape of their API, never a 500, never a hang."""

import copy
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.openai.conftest import TOOLED

MESSAGES = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "y"}]},
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "1", "content": "z"},
    {"role": "user", "content": "again"},
]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAMPLING = {
    "model": TOOLED,
    "max_tokens": 3,
    "n": 2,
    "stop": ["a", "b"],
    "seed": 1,
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 5,
    "stream": False,
    "stream_options": {"include_usage": True},
}
BODIES = {
    "/v1/completions": {**SAMPLING, "prompt": ["a", "b"], "echo": True, "logprobs": 2},
    "/v1/chat/completions": {
        **SAMPLING,
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": PARAMETERS}},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "/anthropic/api/v1/messages": {
        "model": TOOLED,
        "max_tokens": 3,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "z"}]},
        ],
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["a"],
        "thinking": {"type": "enabled", "budget_tokens": 5},
    },
}
TEXTS = ["\0", "tinker://a/weights/b", "tinker://\0/weights/b", "{{ 1 }}", "a" * 9000]
SCHEMAS = [{"type": "string", "pattern": "(a+)+$"}, {"$ref": "#"}, {"allOf": [{"$ref": "#/x"}]}, {"not": {}}]
WEIRD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=10),
    st.sampled_from([[], {}, [[]], [None], *TEXTS, *SCHEMAS]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in below for place in places(item, (*path, key)))]


def with_value(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(body)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_themselves_are_accepted(server, path):
    headers = {"authorization": f"Bearer {server.keys['ada']}"}
    answer = httpx2.post(server.url + path, json=BODIES[path], headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
def test_one_thing_wrong_is_answered_in_shape(server, path):
    headers = {"authorization": f"Bearer {server.keys['ada']}"}

    with httpx2.Client(base_url=server.url, headers=headers, timeout=60) as http:

        @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(places(BODIES[path])), WEIRD)
        def answered(place, value):
            body = with_value(BODIES[path], place, value)
            answer = http.post(path, json=body)
            assert answer.status_code < 500, (body, answer.text)
            if answer.status_code >= 400:
                assert {"detail", "code", "request_id", "error"} <= answer.json().keys(), answer.text
                assert answer.json()["error"]["message"]

        answered()
