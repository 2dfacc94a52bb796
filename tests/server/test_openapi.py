"""The description of the API: complete, valid where it points, in step with the routes."""

import re
from typing import Any

import pytest

from lorimer import types
from lorimer.server.openapi import Endpoint, describe
from lorimer.server.routes import ALL_ROUTES

DOCUMENT = describe(ALL_ROUTES)


def every(value: Any, key: str):
    if isinstance(value, dict):
        for name, item in value.items():
            if name == key:
                yield item
            yield from every(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from every(item, key)


def test_every_route_is_described():
    described = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    served = {(route.method, re.sub(r":\w+}", "}", route.path)) for route in ALL_ROUTES}
    assert described == served


def test_references_lead_somewhere():
    references = set(every(DOCUMENT, "$ref"))
    assert references
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in DOCUMENT["components"]["schemas"]


def test_operations_have_their_own_names_and_a_sentence():
    operations = [operation for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] for operation in operations)


def test_path_parameters_are_those_of_the_path():
    for path, item in DOCUMENT["paths"].items():
        for operation in item.values():
            named = [entry["name"] for entry in operation["parameters"] if entry["in"] == "path"]
            assert named == re.findall(r"{(\w+)}", path)


def test_bodies_have_schemas():
    body = DOCUMENT["paths"]["/api/v1/create_session"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert DOCUMENT["components"]["schemas"][body["$ref"].rpartition("/")[2]]["required"] == ["tags", "sdk_version"]
    assert set(DOCUMENT["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]) == {
        "application/json",
        "application/x-protobuf",
    }


def test_chunks_are_described_as_they_are_read():
    """Every kind that the parser names when it meets another one, and no other."""
    schemas = DOCUMENT["components"]["schemas"]
    chosen = schemas["ModelInput"]["properties"]["chunks"]["items"]["oneOf"]
    described = [schemas[one["$ref"].rpartition("/")[2]]["properties"]["type"]["const"] for one in chosen]
    with pytest.raises(ValueError, match="video") as refused:
        types.ModelInput.model_validate({"chunks": [{"type": "video"}]})
    (named,) = re.findall(r"encoded_text, [\w, ]+ or \w+", str(refused.value))
    assert sorted(described) == sorted(re.split(r", | or ", named))


def test_no_path_and_method_is_served_twice():
    served = [(route.method, route.path) for route in ALL_ROUTES]
    assert len(set(served)) == len(served)
    assert all(isinstance(route, Endpoint) for route in ALL_ROUTES)
