"""The chat format of gpt-oss (Harmony): each message has a role and a channel, and calls are messages to a function.

Thoughts are in the channel ``analysis``, calls in ``commentary`` and answers in ``final``. Tools are described in
TypeScript.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from lorimer.chat.conversation import (
    ContentPart,
    Message,
    Termination,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    add_calls,
    make_tool_call,
)
from lorimer.chat.format_renderer import FormatRenderer, Place, Written, only_text
from lorimer.chat.formats import function_of, name_and_text, unknown_part
from lorimer.errors import InvalidInput

SYSTEM_ROLE = "harmony_system"
"""The role ``system`` of the format; a system message of a conversation has the role ``developer`` there."""
SYSTEM = """\
You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {date}

Reasoning: {effort}

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
TOOLS_SYSTEM = "Calls to these tools must go to the commentary channel: 'functions'."
TOOLS = "# Tools\n\n## functions\n\nnamespace functions {{\n\n{lines}\n\n}} // namespace functions"
ENDS = re.compile(r"<\|(?:end|call|return)\|>")
CHANNEL = re.compile(r"<\|channel\|>([^<\s]+)")
RECIPIENT = re.compile(r"to=([^\s<]+)")


class GptOssRenderer(FormatRenderer):
    """With an ``effort``, a conversation begins with OpenAI's system message, which states it and the date."""

    has_extension_property = False

    def __init__(self, tokenizer: Any, *, effort: str = "", current_date: str | None = None) -> None:
        super().__init__(tokenizer)
        self._return, self._call = self._token("<|return|>"), self._token("<|call|>")
        self._effort = effort
        self.current_date = current_date
        """The date of the system message, such as 2026-01-31; without one, the date of today."""

    def write(self, message: Message, place: Place) -> Written:
        role = message["role"]
        if role == "assistant":
            header, text = "<|start|>assistant", self._answer(message, place)
        elif role == "tool":
            header = f"<|start|>{_tool_name(message, place)} to=assistant"
            text = f"<|channel|>commentary<|message|>{only_text(message)}<|end|>"
        elif role == "system":
            header = "<|start|>developer"
            text = f"<|message|># Instructions\n\n{only_text(message)}\n\n<|end|>"
        else:
            header = f"<|start|>{'system' if role == SYSTEM_ROLE else role}"
            text = f"<|message|>{only_text(message)}<|end|>"
        return Written(self._encode(header), self._encode(text))

    def _answer(self, message: Message, place: Place) -> str:
        thought, text = _thought_and_text(message)
        calls = message.get("tool_calls") or []
        said = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought else []
        if not calls:
            said.append(f"<|channel|>final<|message|>{text}" + ("<|return|>" if place.is_last else "<|end|>"))
        elif text:
            said.append(f"<|channel|>commentary<|message|>{text}<|end|>")
        for name, arguments in map(name_and_text, calls):
            said.append(f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>{arguments}<|call|>")
        return "<|start|>assistant".join(said)

    def _prepared(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> list[Message]:
        prepared = super()._prepared(messages, tools)
        if not self._effort:
            return prepared
        date = self.current_date or datetime.now().strftime("%Y-%m-%d")
        return [{"role": SYSTEM_ROLE, "content": SYSTEM.format(date=date, effort=self._effort)}, *prepared]

    def get_stop_sequences(self) -> list[int] | list[str]:
        return [self._return, self._call]

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[Message]:
        lines = "\n\n".join(map(_written_tool, map(function_of, tools)))
        texts = [
            f"# Instructions\n\n{system_prompt}" if system_prompt else "",
            TOOLS.format(lines=lines) if tools else "",
        ]
        prefix: list[Message] = [{"role": SYSTEM_ROLE, "content": TOOLS_SYSTEM}] if tools else []
        if content := "\n\n".join(filter(None, texts)):
            prefix.append({"role": "developer", "content": content})
        return prefix

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        tokens = list(response)
        ends = [index for index, token in enumerate(tokens) if token in (self._return, self._call)]
        if not ends:
            return {"role": "assistant", "content": str(self.tokenizer.decode(tokens))}, Termination.MALFORMED
        if max(tokens.count(self._return), tokens.count(self._call)) > 1:
            raise InvalidInput(
                f"a response has the end of a message {len(ends)} times, at most once is accepted; sample with "
                "stop=renderer.get_stop_sequences()"
            )
        text = str(self.tokenizer.decode(tokens[: ends[0]]))
        parts, calls, unparsed = _split(text)
        message: Message = {"role": "assistant", "content": parts or text}
        add_calls(message, calls, unparsed)
        return message, Termination.STOP_SEQUENCE


def _tool_name(message: Message, place: Place) -> str:
    name = message.get("name")
    if not name:
        raise InvalidInput(
            f"message {place.position} is of a tool and has no 'name', which the format of gpt-oss needs"
        )
    return name if name.startswith("functions.") else f"functions.{name}"


def _thought_and_text(message: Message) -> tuple[str, str]:
    content = message["content"]
    if isinstance(content, str):
        return "", content
    thought, text = "", ""
    for part in content:
        if part["type"] == "thinking":
            thought += part["thinking"]
        elif part["type"] == "text":
            text += part["text"]
        else:
            raise unknown_part(part)
    return thought, text


# ── responses ─────────────────────────────────────────────────────────────────────────────────────────


def _split(text: str) -> tuple[list[ContentPart], list[ToolCall], list[UnparsedToolCall]]:
    """Split a response into parts (thinking and texts in order), calls, and calls that cannot be parsed."""
    parts: list[ContentPart] = []
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    for header, body, block in _messages(text):
        recipient, channel = RECIPIENT.search(header), CHANNEL.search(header)
        if not body.strip():
            continue
        if recipient and recipient[1].startswith("functions."):
            _read_call(recipient[1].removeprefix("functions."), body, block, calls, unparsed)
        elif channel and channel[1] == "analysis":
            parts.append({"type": "thinking", "thinking": body})
        elif channel and channel[1] in ("final", "commentary"):
            parts.append({"type": "text", "text": body})
    if text.count("to=functions.") > len(calls) + len(unparsed):
        unparsed.append({"text": text[max(text.rfind("<|start|>"), 0) :], "error": "the call has no arguments"})
    return parts, calls, unparsed


def _messages(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield header, body and whole text of each message; the header of the first may begin in the prompt."""
    position, mark = 0, "<|message|>"
    while (at := text.find(mark, position)) >= 0:
        start = max(text.rfind("<|start|>", position, at), position)
        end = ENDS.search(text, at + len(mark))
        position = end.end() if end else len(text)
        yield text[start:at], text[at + len(mark) : end.start() if end else len(text)], text[start:position]


def _read_call(name: str, body: str, block: str, calls: list[ToolCall], unparsed: list[UnparsedToolCall]) -> None:
    try:
        arguments = json.loads(body)
        if not isinstance(arguments, dict):
            raise ValueError("an object of arguments is needed")
    except ValueError as error:
        unparsed.append({"text": block, "error": str(error)})
    else:
        calls.append(make_tool_call(name, arguments))


# ── tools in TypeScript ───────────────────────────────────────────────────────────────────────────────


def _written_tool(tool: Mapping[str, Any]) -> str:
    comment = f"// {tool['description']}\n" if tool.get("description") else ""
    return f"{comment}type {tool['name']} = {_parameters(tool.get('parameters') or {})} => any;"


def _parameters(schema: Mapping[str, Any]) -> str:
    if schema.get("type") != "object" or not schema.get("properties"):
        return "()"
    lines = ["(_:" + (f" // {schema['description']}" if schema.get("description") else ""), "{"]
    for name, fields in schema["properties"].items():
        lines += [f"// {comment}" for comment in _comments(fields)]
        default = f" // default: {json.dumps(fields['default'])}" if "default" in fields else ""
        lines.append(f"{_property(name, fields, schema)},{default}")
    return "\n".join([*lines, "})"])


def _comments(fields: Mapping[str, Any]) -> list[str]:
    comments = [str(fields["title"]), ""] if fields.get("title") else []
    if fields.get("description"):
        comments.append(str(fields["description"]))
    if fields.get("examples"):
        comments += ["Examples:", *(f"- {json.dumps(example)}" for example in fields["examples"])]
    return comments


def _property(name: str, fields: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    return f"{name}{'' if name in schema.get('required', []) else '?'}: {_type(fields)}"


def _type(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as a type of TypeScript."""
    kind = schema.get("type", "any")
    choices = (
        schema.get("oneOf")
        or schema.get("anyOf")
        or ([{"type": one} for one in kind] if isinstance(kind, list) else [])
    )
    if choices:
        return " | ".join(map(_type, choices))
    if kind == "string" and "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if kind == "array":
        written = _type(schema.get("items", {})) + "[]"
    elif kind == "object":
        properties = schema.get("properties", {}).items()
        written = "{ " + ", ".join(_property(name, fields, schema) for name, fields in properties) + " }"
    else:
        written = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}.get(kind, "any")
    return f"{written} | null" if schema.get("nullable") else written
