"""The chat formats of Nemotron 3 and 3.5 without images: those of Qwen3.5 with other blocks of thinking and tools.

Every conversation has a system message, and every answer a block of thinking, which is empty where there is none.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lorimer.chat.conversation import Content, Message, ToolSpec
from lorimer.chat.format_renderer import Place, Written, has_thought
from lorimer.chat.formats import begin, function_of
from lorimer.chat.qwen35 import OPEN, TOOLS, Qwen35Renderer
from lorimer.errors import Unsupported

EMPTY = "<think></think>"


class Nemotron3Renderer(Qwen35Renderer):
    """Nemotron 3 Nano and Super. ``effort`` is a text about reasoning that the last message of a user ends with."""

    NEXT_RESPONSE, AFTER_RESPONSE = "", "\n"

    def __init__(
        self, tokenizer: Any, *, is_told_not_to_think: bool = False, keeps_thoughts: bool = False, effort: str = ""
    ) -> None:
        super().__init__(tokenizer, is_told_not_to_think=is_told_not_to_think, keeps_thoughts=keeps_thoughts)
        self.has_extension_property = keeps_thoughts
        self._effort = f"\n\n{{reasoning effort: {effort}}}" if effort else ""

    def write(self, message: Message, place: Place) -> Written:
        if self._effort and message["role"] == "user" and place.position == place.last_user:
            message = {**message, "content": self._with_effort(message["content"])}
        return super().write(message, place)

    def _with_effort(self, content: Content) -> Content:
        if not isinstance(content, str):
            raise Unsupported("the last message of a user is a list of parts; with less effort only a text is accepted")
        return content + self._effort

    def _split_at_prompt(self, head: str, text: str, place: Place, *, is_sampled: bool) -> Written:
        return Written(header=self._encode(head), output=self._encode(text))

    def _prompt_text(self, role: str, place: Place) -> str:
        return begin(role, place) + (EMPTY if self.is_told_not_to_think else OPEN)

    def _prepared(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> list[Message]:
        prepared = super()._prepared(messages, tools)
        if prepared and prepared[0]["role"] == "system":
            return prepared
        return [{"role": "system", "content": ""}, *prepared]

    def _trimmed(self, content: Content) -> Content:
        return content.strip() if isinstance(content, str) else content

    def _keeps_thoughts_at(self, place: Place) -> bool:
        return self._keeps_thoughts or place.position >= place.last_user

    def _block(self, thought: str) -> str:
        return f"<think>\n{thought}\n</think>\n"

    def _empty_block(self, message: Message, place: Place) -> str:
        if not has_thought(message["content"]):
            return EMPTY
        if self._keeps_thoughts_at(place):
            return ""
        return EMPTY + self._after_lost_thought(message)

    def _after_lost_thought(self, message: Message) -> str:
        return "\n" if _has_text(message["content"]) and not message.get("tool_calls") else ""

    def _written_calls(self, message: Message) -> str:
        content = message["content"]
        ends_with_block = not isinstance(content, str) and has_thought(content) and not _has_text(content)
        return ("" if ends_with_block else "\n") + self._call_lines(message)

    def _call_lines(self, message: Message) -> str:
        return "".join(self._written_call(call) + "\n" for call in message["tool_calls"])

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[Message]:
        lines = "\n".join(_written_tool(function_of(tool)) for tool in tools)
        texts = [system_prompt, TOOLS.format(lines=lines) if tools else ""]
        return [{"role": "system", "content": "\n\n".join(filter(None, texts))}]


class Nemotron3UltraRenderer(Nemotron3Renderer):
    """Nemotron 3 Ultra and 3.5: no line breaks around the end of a block."""

    def _with_effort(self, content: Content) -> Content:
        if isinstance(content, str):
            return content + self._effort
        return [*content, {"type": "text", "text": self._effort}]

    def _block(self, thought: str) -> str:
        return f"<think>\n{thought}</think>"

    def _after_lost_thought(self, message: Message) -> str:
        return ""

    def _written_calls(self, message: Message) -> str:
        return "\n" + self._call_lines(message)


def _has_text(content: Content) -> bool:
    return not isinstance(content, str) and any(part["type"] == "text" and part["text"] for part in content)


def _written_tool(tool: Mapping[str, Any]) -> str:
    """Return the description of a tool as XML elements; those that the format does not know follow at the end."""
    lines = ["<function>", _element("name", tool["name"])]
    if description := tool.get("description", "").strip():
        lines.append(_element("description", description))
    lines.append("<parameters>")
    parameters = tool.get("parameters") or {}
    for name, fields in parameters.get("properties", {}).items():
        lines += ["<parameter>", _element("name", name)]
        if "type" in fields:
            lines.append(_element("type", str(fields["type"])))
        if "description" in fields:
            lines.append(_element("description", fields["description"].strip()))
        if "enum" in fields:
            lines.append(_element("enum", json.dumps(fields["enum"])))
        lines += [*_others(fields, "name", "type", "description", "enum"), "</parameter>"]
    lines += _others(parameters, "type", "properties", "required")
    if "required" in parameters:
        lines.append(_element("required", json.dumps(parameters["required"])))
    lines += ["</parameters>", *_others(tool, "type", "name", "description", "parameters"), "</function>"]
    return "\n".join(lines)


def _element(name: str, text: str) -> str:
    return f"<{name}>{text}</{name}>"


def _others(fields: Mapping[str, Any], *known: str) -> list[str]:
    return [
        _element(name, json.dumps(value) if isinstance(value, dict | list) else str(value))
        for name, value in fields.items()
        if name not in known
    ]
