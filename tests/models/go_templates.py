"""Reads Modelfiles and renders Go templates as Ollama does: the quotes of its parser, a part of text/template.

Written after Ollama's ``parser/parser.go`` and Go's documentation, not after what Lorimer writes; anything else is an
error. A test with Go itself compares both where Go is installed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|:=|[(),]|\$?[\w.]+|\$')


class GoError(Exception):
    """The template fails, as Go says when it runs it."""


def read_modelfile(text: str) -> list[tuple[str, str]]:
    """Return the instructions in their order; a parameter is named ``PARAMETER name``."""
    found, rest = [], text
    while rest := rest.lstrip():
        if rest.startswith("#"):
            rest = rest.partition("\n")[2]
            continue
        name, _, rest = rest.partition(" ")
        if name == "PARAMETER":
            parameter, _, rest = rest.partition(" ")
            name = f"PARAMETER {parameter}"
        ends = (n for n in range(1, len(rest) + 1) if rest[n : n + 1] in ("", "\n", " "))
        length, value = next((n, value) for n in ends if (value := _closed(rest[:n])) is not None)
        found.append((name, value))
        rest = rest[length:]
    return found


def _closed(value: str) -> str | None:
    for quote in ('"""', '"'):
        if value.startswith(quote):
            return value[len(quote) : -len(quote)] if value.endswith(quote) and len(value) >= 2 * len(quote) else None
    return value


def render(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Return what Ollama sends to a model for messages of alternating roles."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    values = [{"Role": message["role"], "Content": message["content"]} for message in messages]
    root = {"Messages": values, "System": system, "Prompt": messages[-1]["content"], "Response": ""}
    parts = re.split(r"\{\{(.*?)\}\}", template, flags=re.DOTALL)
    pieces = iter((bool(number % 2), part) for number, part in enumerate(parts))
    nodes, end = _parse(pieces)
    assert end == "", end
    return _run(nodes, root, {"$": root})


def _parse(pieces: Iterator[tuple[bool, str]]) -> tuple[list[Any], str]:
    """Return the nodes up to the action that closes them."""
    nodes: list[Any] = []
    for is_action, piece in pieces:
        action = piece.strip()
        if not is_action:
            nodes.append(piece)
        elif action == "end" or action.startswith("else"):
            return nodes, action
        elif action.startswith(("if ", "range ")):
            nodes.append(_block(action, pieces))
        else:
            nodes.append((TOKENS.findall(action),))
    return nodes, ""


def _block(action: str, pieces: Iterator[tuple[bool, str]]) -> tuple[str, list[str], list[Any], list[Any]]:
    word, *tokens = TOKENS.findall(action)
    body, closing = _parse(pieces)
    other: list[Any] = []
    if closing.startswith("else if"):
        other = [_block(closing.removeprefix("else "), pieces)]
    elif closing == "else":
        other, closing = _parse(pieces)
    return word, tokens, body, other


def _run(nodes: list[Any], dot: Any, variables: dict[str, Any]) -> str:
    text = ""
    for node in nodes:
        match node:
            case str():
                text += node
            case ([name, ":=", *tokens],):
                variables[name] = _value(tokens, dot, variables)
            case (tokens,):
                text += _value(tokens, dot, variables)
            case ("if", tokens, body, other):
                text += _run(body if _value(tokens, dot, variables) else other, dot, variables)
            case ("range", [index, ",", each, ":=", *tokens], body, _):
                for number, item in enumerate(_value(tokens, dot, variables)):
                    text += _run(body, item, variables | {index: number, each: item})
    return text


def _value(tokens: list[str], dot: Any, variables: Mapping[str, Any]) -> Any:
    rest = list(tokens)
    values = []
    while rest:
        values.append(_operand(rest, dot, variables))
    function, *arguments = values
    if not callable(function):
        assert not arguments, tokens
        return function
    return function(*arguments)


def _operand(rest: list[str], dot: Any, variables: Mapping[str, Any]) -> Any:
    token = rest.pop(0)
    if token == "(":
        depth, inner = 1, []
        while depth:
            inner.append(rest.pop(0))
            depth += {"(": 1, ")": -1}.get(inner[-1], 0)
        value = _value(inner[:-1], dot, variables)
        return _field(value, rest.pop(0)) if rest and rest[0].startswith(".") else value
    if token.startswith('"'):
        return token[1:-1]
    if token.isdigit():
        return int(token)
    if token.startswith("$"):
        name, dotted, path = token.partition(".")
        return _field(variables[name], dotted + path)
    return _field(dot, token) if token.startswith(".") else FUNCTIONS[token]


def _field(value: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        value = value[name]
    return value


def _slice(value: Any, first: int = 0, last: int | None = None) -> Any:
    if first > len(value) or (last or 0) > len(value):
        raise GoError(f"error calling slice of {value!r}: index out of range")
    return value[first:last]


FUNCTIONS = {
    "eq": lambda first, second: first == second,
    "ne": lambda first, second: first != second,
    "not": lambda value: not value,
    "and": lambda first, second: second if first else first,
    "or": lambda first, second: first or second,
    "len": len,
    "slice": _slice,
    "index": lambda values, number: values[number],
}
