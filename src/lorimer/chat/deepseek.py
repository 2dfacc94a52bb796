"""The chat format of DeepSeek V3 and V3.1: tokens that name the role, and calls between tokens of their own.

The model thinks if the prompt opens a block of thoughts; a prompt that closes one makes it answer directly.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lorimer.chat.conversation import (
    Content,
    ContentPart,
    Message,
    Termination,
    ToolCall,
    UnparsedToolCall,
    add_calls,
    make_tool_call,
)
from lorimer.chat.format_renderer import FormatRenderer, Place, Written, has_thought, only_text
from lorimer.chat.formats import function_of, name_and_text, unknown_part
from lorimer.errors import Unsupported

BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
OUTPUT_BEGIN, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_MIDDLE, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS = re.compile(rf"\s*{CALLS_BEGIN}(.*?){CALLS_END}", re.DOTALL)
CALL = re.compile(rf"{CALL_BEGIN}(\w+){CALL_MIDDLE}(.*?){CALL_END}", re.DOTALL)
THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
TOOLS = f"""

## Tools
You have access to the following tools:

{{blocks}}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
{CALLS_BEGIN}{CALL_BEGIN}tool_call_name{CALL_MIDDLE}tool_call_arguments{CALL_END}{CALLS_END}

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""
"""The description of tools after the system message, as on the model card of DeepSeek V3.1."""


class DeepSeekV3Renderer(FormatRenderer):
    """Without ``thinks``, answers have no thoughts; with it, only the last answer and those with calls keep them."""

    def __init__(self, tokenizer: Any, *, thinks: bool = False) -> None:
        super().__init__(tokenizer)
        self._begin, self._end, self._user, self._assistant = map(self._token, (BEGIN, END, USER, ASSISTANT))
        self._open, self._close = self._token("<think>"), self._token("</think>")
        self._thinks = thinks
        self.has_extension_property = not thinks

    def write(self, message: Message, place: Place) -> Written:
        match message["role"]:
            case "assistant":
                return self._answer(message, place)
            case "user":
                return Written([self._user], self._encode(only_text(message)))
            case "tool":
                return Written(self._encode(OUTPUT_BEGIN), self._encode(only_text(message) + OUTPUT_END))
            case "system" if place.position == 0:
                return Written([], self._encode(only_text(message)))
        raise Unsupported(
            f"message {place.position} has the role {message['role']!r}; accepted are user, assistant and tool, and "
            "system for the first message"
        )

    def _answer(self, message: Message, place: Place) -> Written:
        """Write an answer; one that follows the output of a tool continues the answer before it."""
        text = self._said(message, place)
        calls = message.get("tool_calls") or []
        # The official renderer ends no message without content, not even one that calls a tool.
        end = [self._end] if (message["content"] if place.follows_tool or self._thinks else text) else []
        said = (
            self._encode(text + (CALLS_BEGIN + "".join(map(_written_call, calls)) + CALLS_END if calls else "")) + end
        )
        if place.follows_tool:
            return Written([], said)
        if not self._thinks or not place.is_last:
            return Written([self._assistant, self._close], said)
        needs_block = message["content"] and not has_thought(message["content"])
        return Written([self._assistant], [self._open, self._close, *said] if needs_block else said)

    def _said(self, message: Message, place: Place) -> str:
        content = message["content"]
        is_direct = not self._thinks and not place.follows_tool
        if isinstance(content, str):
            return THOUGHT.sub("", content) if is_direct else content
        keeps_thoughts = not is_direct and (place.is_last or bool(message.get("tool_calls")))
        text = ""
        for part in content:
            if part["type"] == "text":
                text += part["text"]
            elif part["type"] == "thinking":
                text += f"<think>{part['thinking']}</think>" if keeps_thoughts else ""
            else:
                raise unknown_part(part)
        return text

    def _beginning(self) -> list[int]:
        return [self._begin]

    def _prompt_header(self, role: str, place: Place) -> list[int]:
        header = super()._prompt_header(role, place)
        return [*header, self._open] if self._thinks and not place.follows_tool else header

    def get_stop_sequences(self) -> list[int] | list[str]:
        return [self._end]

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[Message]:
        blocks = "\n".join(map(_written_tool, map(function_of, tools)))
        return [{"role": "system", "content": system_prompt + (TOOLS.format(blocks=blocks) if tools else "")}]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        tokens = list(response)
        if self._thinks and tokens[:1] != [self._open] and self._close in tokens:
            tokens = [self._open, *tokens]  # the prompt has opened the block
        text, termination = self._until(tokens, self._end)
        message: Message = {"role": "assistant", "content": text}
        if not termination.is_clean:
            return message, termination
        calls, unparsed = _read_calls(text)
        if calls or unparsed:
            text = CALLS.sub("", text).strip()
        message["content"] = with_thoughts_apart(text)
        add_calls(message, calls, unparsed)
        return message, termination


def _written_call(call: Any) -> str:
    name, arguments = name_and_text(call)
    return f"{CALL_BEGIN}{name}{CALL_MIDDLE}{arguments}{CALL_END}"


def _written_tool(tool: Mapping[str, Any]) -> str:
    return f"### {tool['name']}\nDescription: {tool['description']}\n\nParameters: {json.dumps(tool['parameters'])}"


def _read_calls(text: str) -> tuple[list[ToolCall], list[UnparsedToolCall]]:
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    section = CALLS.search(text)
    for match in CALL.finditer(section[1] if section else ""):
        try:
            arguments = json.loads(match[2])
            if not isinstance(arguments, dict):
                raise ValueError("an object of arguments is needed")
        except ValueError as error:
            unparsed.append({"text": match[0], "error": str(error)})
        else:
            calls.append(make_tool_call(match[1], arguments))
    return calls, unparsed + unclosed(text, [(CALLS_BEGIN, CALLS_END), (CALL_BEGIN, CALL_END)])


def unclosed(text: str, marks: Sequence[tuple[str, str]]) -> list[UnparsedToolCall]:
    """Return the first kind of block that begins more often than it ends, from its last beginning on."""
    for begin, end in marks:
        if text.count(begin) > text.count(end):
            return [{"text": text[text.rindex(begin) :], "error": f"the call does not end with {end!r}"}]
    return []


def with_thoughts_apart(text: str) -> Content:
    """Split a text with thoughts into them and the texts between them."""
    if "<think>" not in text:
        return text
    parts: list[ContentPart] = []
    for index, piece in enumerate(THOUGHT.split(text)):
        if piece:
            parts.append({"type": "thinking", "thinking": piece} if index % 2 else {"type": "text", "text": piece})
    return parts
