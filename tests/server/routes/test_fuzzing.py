"""Bodies made from the server's own OpenAPI description, right in shape and wrong in value: never a 500, never a hang.

Every route with a JSON body is asked with values hypothesis draws for its schema, some of them replaced by values of
another type. Ids are those of real objects now and then, so that requests get past the first check.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorimer.server.openapi import describe
from lorimer.server.routes import ALL_ROUTES
from tests.server.routes.conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

DESCRIPTION = describe(ALL_ROUTES)
SCHEMAS: dict[str, Any] = DESCRIPTION["components"]["schemas"]
OPERATIONS = {
    f"{method.upper()} {path}": (method.upper(), path, schema)
    for path, methods in DESCRIPTION["paths"].items()
    for method, operation in methods.items()
    if (schema := operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema"))
}

WEIRD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.just([]),
    st.just({}),
    st.just("../../x"),
    st.just("tinker://a/weights/b"),
)


def values(schema: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a schema; one in eight is of any other type."""
    return st.integers(0, 7).flatmap(lambda number: WEIRD if number == 0 else _right(schema, depth))


def _right(schema: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return values(SCHEMAS[schema["$ref"].rpartition("/")[2]], depth)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of([values(choice, depth) for choice in choices])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of([_right(schema | {"type": one}, depth) for one in kind])
    if kind == "object" and depth < 5 and "properties" not in schema:
        return st.dictionaries(st.text(max_size=8), WEIRD, max_size=3)
    if kind == "object" and depth < 5:
        required = schema.get("required", [])
        fields = {name: values(field, depth + 1) for name, field in schema.get("properties", {}).items()}
        must = {name: field for name, field in fields.items() if name in required}
        return st.fixed_dictionaries(must, optional={n: f for n, f in fields.items() if n not in must})
    if kind == "array" and depth < 5:
        return st.lists(values(schema.get("items", {}), depth + 1), max_size=3)
    simple: dict[str | None, st.SearchStrategy[Any]] = {
        "string": st.text(max_size=30),
        "integer": st.integers(-3, 2000),
        "number": st.floats(-10, 10),
        "boolean": st.booleans(),
    }
    return simple.get(kind, WEIRD)


def with_ids(body: Any, ids: dict[str, str]) -> Any:
    if isinstance(body, dict):
        return {name: ids.get(name, with_ids(value, ids)) for name, value in body.items()}
    return body


@settings(max_examples=25 * len(OPERATIONS), deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(OPERATIONS)), data=st.data())
async def test_drawn_bodies_are_answered_in_shape(ada, name, data):
    method, path, schema = OPERATIONS[name]
    body = data.draw(values(schema))
    if data.draw(st.booleans()):
        session = await ada.ok("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})
        body = with_ids(body, {"session_id": session["session_id"], "base_model": MODEL})
    for place in ("session_id", "training_run_id", "checkpoint_id", "kind", "name"):
        path = path.replace(f"{{{place}}}", "x")
    response = await ada.http.request(method, path.split("{")[0], json=body, headers=ada.headers)
    assert response.status_code < 500, (name, body, response.text)
    if response.status_code >= 400 and response.status_code != 408:
        foreign = {"error"} if path.startswith("/v1/") else set()  # what OpenAI's clients read
        assert response.json().keys() == {"detail", "code", "request_id"} | foreign, response.text
