"""Declares tools as types of TypeScript, as the chat templates of Kimi K2.5 and K2.6 do.

A JSON schema with ``$ref`` or ``$defs``, or one that is none of the forms below, is refused.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lorimer.errors import InvalidInput, Unsupported

INDENT = "  "
CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""The fields of a schema that its comment states, sorted, by type."""
NAMES = {"integer": "number", "object": "{}", "array": "Array<any>"}
"""How a type is written in a list of types, where it differs."""


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(_function(tool["function"]) for tool in tools)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


def _function(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    if "$defs" in parameters:
        raise Unsupported("a tool has parameters with '$defs'; a schema without references is accepted")
    comment = _comment(function.get("description") or "", "")
    return f"{comment}type {function['name']} = (_: {_object(parameters, '')}) => any;"


def _comment(text: str, indent: str) -> str:
    """Return the lines of a comment, each with its line break; empty lines stay empty."""
    return "".join((f"{indent}// {line}" if line else "") + "\n" for line in text.split("\n")) if text else ""


def _notes(schema: Any, indent: str) -> str:
    """Return the description and the constraints of a schema as comments."""
    if not isinstance(schema, Mapping):
        return ""
    kind = schema.get("type") if _form(schema) == "type" else None
    names = CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
    constraints = ", ".join(f"{name}: {schema[name]}" for name in names if name in schema)
    return _comment(schema.get("description", ""), indent) + (f"{indent}// {constraints}\n" if constraints else "")


def _form(schema: Mapping[str, Any]) -> str:
    """Return the field that decides how a schema is written."""
    return next((name for name in ("$ref", "anyOf", "enum", "type") if name in schema), "")


def _type(schema: Any, indent: str) -> str:
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if schema == {}:
        return "any"
    match _form(schema):
        case "$ref":
            raise Unsupported("a tool has parameters with '$ref'; a schema without references is accepted")
        case "anyOf":
            return " | ".join(_type(one, indent) for one in schema["anyOf"])
        case "enum":
            return " | ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in schema["enum"])
        case "type" if isinstance(schema["type"], list):
            return " | ".join(str(NAMES.get(one, one)) for one in schema["type"])
        case "type" if schema["type"] == "object":
            return _object(schema, indent)
        case "type" if schema["type"] == "array":
            return _array(schema.get("items") or {}, indent)
        case "type":
            return "number" if schema["type"] == "integer" else str(schema["type"])
    raise InvalidInput(f"a tool has the schema {schema!s:.200}; one with type, enum or anyOf is accepted")


def _array(items: Any, indent: str) -> str:
    inner = indent + INDENT
    if notes := _notes(items, inner):
        return f"Array<\n{notes}{inner}{_type(items, inner)}\n{indent}>"
    return f"Array<{_type(items, indent)}>"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    inner = indent + INDENT
    required = schema.get("required", [])
    properties = sorted(schema.get("properties", {}).items(), key=lambda item: (item[0] not in required, item[0]))
    fields = [_field(name, value, name in required, inner) for name, value in properties]
    others = schema.get("additionalProperties")
    if others is not None:
        kind = {True: "any", False: "never"}[others] if isinstance(others, bool) else _type(others, inner)
        fields.append(f"{inner}[k: string]: {kind}")
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _field(name: str, schema: Any, is_required: bool, indent: str) -> str:
    default = schema.get("default") if isinstance(schema, Mapping) else None
    notes = _notes(schema, indent)
    if default is not None:
        shown = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
        notes += f"{indent}// Default: {shown}\n"
    return f"{notes}{indent}{name}{'' if is_required else '?'}: {_type(schema, indent)}"
