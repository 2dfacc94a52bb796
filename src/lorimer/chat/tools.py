"""The known syntaxes of tool calls: how to parse them, and the grammars that force a model to write one.

The chat template of a model tells which syntax it has. Calls that cannot be parsed stay text, which the reader sees.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lorimer.errors import Unsupported

if TYPE_CHECKING:
    from lorimer.chat.templates import ChatTemplate  # needs Jinja

JSON_FORM = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""Allow one way to write a value: a small model may never stop writing optional spaces."""
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

Tools = Mapping[str, Mapping[str, Any]]
"""The schemas of the parameters, by name of the function."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    """JSON."""
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True)
class ToolSyntax:
    """Calls are enclosed by ``open`` and ``close``; without an ``open`` they are the whole answer."""

    open: str
    close: str
    parse: Callable[[str, Tools], list[Call]]
    """Raises ``ValueError`` if the text is not a call."""
    arguments_name: str = "arguments"
    is_array: bool = False
    is_json: bool = True
    """Whether a grammar can force the model to write a call."""

    @property
    def markers(self) -> list[str]:
        return [marker for marker in (self.open, self.close) if marker]

    def grammar(self, tools: Tools, several: bool, token_of: Callable[[str], int | None]) -> str:
        """Return Lark rules for ``calls``: one call, or ``several``, of these tools."""
        if not self.is_json:
            raise Unsupported("tool_choice can only be 'auto' or 'none' with this model: its calls are not JSON")
        rules = [f"tool_{i}: %json {json.dumps(self._schema(name, tools[name]))}" for i, name in enumerate(tools)]
        call = "(" + " | ".join(f"tool_{i}" for i in range(len(tools))) + ")"
        if self.is_array:
            body = f'"[" {call}' + (f' ("," {call})*' if several else "") + ' "]"'
            return "\n".join([f"calls: {_marker(self.open, token_of)} {body}", *rules])
        if self.open:
            call = f'{_marker(self.open, token_of)} "\\n" {call} "\\n" {_marker(self.close, token_of)}'
        more = f' ("\\n" {call})*' if several and self.open else ""
        return "\n".join([f"calls: {call}{more}", *rules])

    def _schema(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments_name: parameters or {"type": "object"}},
            "required": ["name", self.arguments_name],
            "additionalProperties": False,
            **JSON_FORM,
        }


def _marker(text: str, token_of: Callable[[str], int | None]) -> str:
    """Return the rule of a marker: a marker that is one token must be matched as a token, not by its characters."""
    token = token_of(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


# ── parsing ───────────────────────────────────────────────────────────────────────────────────────────


def read_call(value: object) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a call that is a JSON object; raise ``ValueError`` if it is not one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("an object with a name is needed")
    if not isinstance(value.get("arguments"), dict):
        raise ValueError("an object of arguments is needed")
    return value["name"], value["arguments"]


def _parse_object(value: Any, tools: Tools) -> Call:
    """Read a call of one of ``tools``; ``parameters`` may stand for ``arguments``, and both may be absent."""
    if isinstance(value, dict):
        value = {"arguments": value.get("parameters", {}), **value}
    name, arguments = read_call(value)
    if name not in tools:
        raise ValueError("it names no tool")
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def parse_tagged(text: str, tools: Tools) -> list[Call]:
    """Parse one call: a JSON object, or a function with its parameters as XML elements."""
    if (found := _FUNCTION.fullmatch(text.strip())) is None:
        return [_parse_object(json.loads(text), tools)]
    name = found[1].strip()
    if name not in tools:
        raise ValueError("it names no tool")
    types = tools[name].get("properties", {})
    arguments = {key: _typed(value, types.get(key)) for key, value in _PARAMETER.findall(found[2])}
    return [Call(name, json.dumps(arguments, ensure_ascii=False))]


def _typed(text: str, schema: object) -> Any:
    """Convert a parameter from text to the type in its schema."""
    if isinstance(schema, dict) and schema.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_array(text: str, tools: Tools) -> list[Call]:
    values = json.loads(text)
    if not isinstance(values, list) or not values:
        raise ValueError("it is no array of calls")
    return [_parse_object(value, tools) for value in values]


def parse_bare(text: str, tools: Tools) -> list[Call]:
    """Parse one JSON object, or several separated by semicolons."""
    decoder, calls, text = json.JSONDecoder(), [], text.removeprefix("<|python_tag|>").strip()
    while text:
        value, end = decoder.raw_decode(text)
        calls.append(_parse_object(value, tools))
        text = text[end:].lstrip("; \n")
    return calls


def syntax_of(template: "ChatTemplate") -> ToolSyntax | None:
    """Return the syntax of tool calls in this template; None if it is unknown."""
    source = template.source
    if not template.reads("tools"):
        return None
    if "<tool_call>" in source and "<arg_key>" not in source:
        return ToolSyntax("<tool_call>", "</tool_call>", parse_tagged, is_json="<function=" not in source)
    if "[TOOL_CALLS]" in source and "[ARGS]" not in source:
        return ToolSyntax("[TOOL_CALLS]", "", parse_array, is_array=True)
    if '"parameters": ' in source and "ipython" in source:
        return ToolSyntax("", "", parse_bare, arguments_name="parameters")
    return None
