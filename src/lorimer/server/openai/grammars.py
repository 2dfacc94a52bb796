"""What an answer is confined to: a JSON schema, a call of a tool, or both as alternatives, as rules of Lark.

The engine compiles them (``engine/sampling/constraints.py``) and says what is wrong with one that it refuses.
"""

import json
from typing import Any

from lorimer.chat.templates import ChatTemplate
from lorimer.chat.tools import JSON_FORM, ToolSyntax, syntax_of
from lorimer.errors import TooLarge, Unsupported
from lorimer.server.openai.parameters import BadParameter
from lorimer.server.openai.schemas import ChatRequest, ChosenTool, ResponseFormat, Tool
from lorimer.server.openai.text import TextModel

MAX_CHARS = 64 * 1024
"""Of one grammar: an engine compiles it between two steps, and one of this size may take half a second."""


def chosen_tools(body: ChatRequest) -> dict[str, Tool]:
    """The tools the model may call; with ``tool_choice`` 'none' it is not told of any."""
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice != "none" and body.tool_choice != "auto":
            raise BadParameter("tool_choice", "tool_choice asks for a call, and there are no tools")
        return {}
    tools = {tool.function.name: tool for tool in body.tools}
    if len(tools) < len(body.tools):
        raise BadParameter("tools", "tools holds one name twice; each name is accepted once")
    if isinstance(body.tool_choice, ChosenTool) and body.tool_choice.function.name not in tools:
        name, known = body.tool_choice.function.name, ", ".join(map(repr, tools))
        raise BadParameter("tool_choice", f"tool_choice names {name[:100]!r}, which is not among the tools {known}")
    return tools


def tool_syntax(text: TextModel, template: ChatTemplate) -> ToolSyntax:
    syntax = syntax_of(template)
    if syntax is None:
        raise BadParameter(
            "tools",
            f"tools are not available with {text.name!r}: its chat template "
            + ("has no place for them" if not template.reads("tools") else "writes calls in a way that is not known"),
            "unsupported_parameter",
        )
    return syntax


def answer_grammar(body: ChatRequest, tools: dict[str, Tool], syntax: ToolSyntax | None, text: TextModel) -> str:
    """Rules that every sampled answer obeys; none if it is free."""
    schema = response_schema(body.response_format)
    wants_call = syntax is not None and body.tool_choice != "auto"
    rules: dict[str, str] = {}
    if schema is not None and not wants_call:
        rules["json"] = f"json: %json {json.dumps({**schema, **JSON_FORM})}"
    if syntax is not None and (wants_call or schema is not None):
        named = body.tool_choice.function.name if isinstance(body.tool_choice, ChosenTool) else None
        wanted = {name: tool.function.parameters for name, tool in tools.items() if named in (None, name)}
        try:
            rules["calls"] = syntax.grammar(wanted, body.parallel_tool_calls and named is None, text.added_token)
        except Unsupported as error:
            raise BadParameter("tool_choice", str(error), "unsupported_parameter") from None
    grammar = "\n".join([f"start: {' | '.join(rules)}", *rules.values()]) if rules else ""
    if len(grammar) > MAX_CHARS:
        raise TooLarge(f"the schemas make a grammar of {len(grammar)} characters; at most {MAX_CHARS} are accepted")
    return grammar


def response_schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise BadParameter("response_format.json_schema", "response_format.json_schema is missing")
    return dict(form.json_schema.json_schema)
