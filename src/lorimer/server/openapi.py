"""Generates the OpenAPI document from the routes.

An `Endpoint` is a Starlette route that also declares its request body and response; `describe` turns a list of
endpoints into an OpenAPI document. Other routes are omitted.
"""

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lorimer import __version__

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

ERROR_SCHEMA = {
    "type": "object",
    "required": ["detail", "code", "request_id"],
    "properties": {"detail": {"type": "string"}, "code": {"type": "string"}, "request_id": {"type": "string"}},
}


class Endpoint(Route):
    """One HTTP method of one path."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        body: type[BaseModel] | dict[str, Any] | None = None,
        answer: type[BaseModel] | dict[str, Any] | None = None,
        query: dict[str, dict[str, Any]] | None = None,
        status: int = 200,
        media: tuple[str, ...] = (JSON,),
        answer_media: tuple[str, ...] = (JSON,),
    ) -> None:
        """`body` and `answer` are models or schemas; `query` is the schema of each parameter.

        `media` is what is accepted.
        """
        super().__init__(path, endpoint, methods=[method])
        self.method = method
        self.body = body
        self.answer = answer
        self.query = query or {}
        self.status = status
        self.media = media
        self.answer_media = answer_media


def describe(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """Generate the OpenAPI document of the endpoints among `routes`."""
    endpoints = [route for route in routes if isinstance(route, Endpoint)]
    schemas, components = _schemas(endpoints)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lorimer", "version": __version__, "description": "The Tinker protocol, served by yourself."},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
    }


def _schemas(endpoints: list[Endpoint]) -> tuple[dict[tuple[type[BaseModel], str], Any], dict[str, Any]]:
    """Return the schema of each model as read (validation) or written (serialization), and their shared definitions."""
    wanted: list[tuple[type[BaseModel], Any]] = []
    for endpoint in endpoints:
        for model, mode in ((endpoint.body, "validation"), (endpoint.answer, "serialization")):
            if isinstance(model, type) and (model, mode) not in wanted:
                wanted.append((model, mode))
    found, definitions = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
    schemas: dict[tuple[Any, Any], Any] = dict(found)
    return schemas, definitions.get("$defs", {})


def _operation(endpoint: Endpoint, schemas: dict[tuple[type[BaseModel], str], Any]) -> dict[str, Any]:
    def schema(model: type[BaseModel] | dict[str, Any], mode: str) -> Any:
        return schemas[model, mode] if isinstance(model, type) else model

    answer: dict[str, Any] = {"description": "done"}
    if endpoint.answer is not None:
        written = schema(endpoint.answer, "serialization")
        answer["content"] = {media: {"schema": written if media == JSON else {}} for media in endpoint.answer_media}
    error = {"description": "refused", "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    operation: dict[str, Any] = {
        "operationId": endpoint.name if endpoint.method != "DELETE" else f"delete_{endpoint.name}",
        "summary": (endpoint.endpoint.__doc__ or endpoint.name).strip().partition("\n")[0],
        "parameters": _parameters(endpoint),
        "responses": {str(endpoint.status): answer, "4XX": error, "5XX": error},
    }
    if endpoint.body is not None:
        read = schema(endpoint.body, "validation")
        content = {media: {"schema": read if media == JSON else {}} for media in endpoint.media}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in endpoint.param_convertors
    ]
    in_query = [
        {"name": name, "in": "query", "required": schema.get("required", False), "schema": _without_required(schema)}
        for name, schema in endpoint.query.items()
    ]
    return in_path + in_query


def _without_required(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != "required"}
