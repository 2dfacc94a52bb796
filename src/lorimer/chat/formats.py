"""Hard-coded chat formats of the official cookbook: plain dialogue, Llama 3, Qwen3 and Qwen3-VL."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lorimer.chat.conversation import (
    PART_TYPES,
    Content,
    ContentPart,
    Message,
    Termination,
    ToolCall,
    UnparsedToolCall,
    add_calls,
    call_arguments,
    make_tool_call,
)
from lorimer.chat.format_renderer import FormatRenderer, Place, Written, only_text
from lorimer.chat.tools import read_call
from lorimer.errors import InvalidInput, Unsupported

Thinking = Literal["on", "off", "never"]


class RoleColonRenderer(FormatRenderer):
    """``User: ...`` and ``Assistant: ...``, each ended by an empty line, for base models."""

    STOP = "\n\nUser:"

    def write(self, message: Message, place: Place) -> Written:
        return Written(
            header=self._encode(message["role"].capitalize() + ":"),
            output=self._encode(f" {only_text(message)}\n\n"),
            # The official renderer writes the placeholder after a last message of any other role.
            overlap=tuple(self._encode("User:" if message["role"] == "assistant" else "<UNUSED>")),
        )

    def get_stop_sequences(self) -> list[int] | list[str]:
        return [self.STOP]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        tokens = list(response)
        eos = self.tokenizer.eos_token_id
        is_ended = eos is not None and tokens[-1:] == [eos]
        said, *others = str(self.tokenizer.decode(tokens[:-1] if is_ended else tokens)).split(self.STOP)
        if others:
            is_clean = len(others) == 1 and not is_ended
            termination = Termination.STOP_SEQUENCE if is_clean else Termination.MALFORMED
        else:
            termination = Termination.EOS if is_ended else Termination.MALFORMED
        return {"role": "assistant", "content": said.removeprefix(" ").removesuffix("\n\n")}, termination

    def _beginning(self) -> list[int]:
        return self._encode(self.tokenizer.bos_token) if self.tokenizer.bos_token else []


class Llama3Renderer(FormatRenderer):
    """Llama 3's headers, without the dates that its chat template adds to the system message."""

    def write(self, message: Message, place: Place) -> Written:
        return Written(
            header=self._encode(f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n"),
            output=self._encode(only_text(message) + "<|eot_id|>"),
        )

    def get_stop_sequences(self) -> list[int] | list[str]:
        return [self._token("<|eot_id|>")]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        text, termination = self._until(response, self._token("<|eot_id|>"))
        return {"role": "assistant", "content": text}, termination

    def _beginning(self) -> list[int]:
        return [self._token("<|begin_of_text|>")]


TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{lines}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The description of tools in the system message, as in the chat template of Qwen3."""
BLOCKS = re.compile(r"<think>(.*?)</think>|<tool_call>(.*?)</tool_call>", re.DOTALL)


class Qwen3Renderer(FormatRenderer):
    """Qwen3's markers. Earlier answers lose their thinking; the last one has a block for it, empty or not.

    With thinking ``off`` the prompt closes that block; models that ``never`` think have none.
    """

    def __init__(self, tokenizer: Any, *, thinking: Thinking = "on") -> None:
        super().__init__(tokenizer)
        self._end = self._token("<|im_end|>")
        self._thinking = thinking
        self.has_extension_property = thinking == "never"
        self.is_told_not_to_think = thinking == "off"

    def write(self, message: Message, place: Place) -> Written:
        is_last_answer = message["role"] == "assistant" and place.is_last and message["content"]
        if self.is_told_not_to_think and is_last_answer and place.last_user < 0:
            raise InvalidInput(
                f"message {place.position} answers no user; the chat template of Qwen3 then leaves out the empty block "
                "of thoughts that every prompt without thinking ends with. A conversation with a user is accepted"
            )
        text, is_begun = self._said(message, place)
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
        if "tool_calls" in message:
            text += ("\n" if is_begun else "") + "\n".join(map(_written_call, message["tool_calls"]))
        # Markers in the content must not become special tokens.
        said = self._encode(text, split_special_tokens=True)
        return Written(header=self._encode(header(message["role"], place)), output=[*said, self._end])

    def _said(self, message: Message, place: Place) -> tuple[str, bool]:
        """Return the text of a message with its thinking, and whether there is more than an empty block."""
        content, is_assistant = message["content"], message["role"] == "assistant"
        has_block = is_assistant and place.is_last and place.last_user >= 0 and self._thinking != "never"
        if isinstance(content, str):
            text, has_thought = content, "<think>" in content
            if has_block and "</think>" in content:
                before, _, after = content.partition("</think>")
                text = _block(before.rpartition("<think>")[2]) + after.lstrip("\n")
        else:
            has_thought = any(part["type"] == "thinking" for part in content)
            text = _joined(content, keeps_thoughts=place.is_last or not is_assistant, has_block=has_block)
        if has_block and not has_thought:
            return _block("") + text.lstrip("\n"), bool(text)
        return text, bool(text)

    def _prompt_header(self, role: str, place: Place) -> list[int]:
        return self._encode(begin(role, place) + _block("") if self.is_told_not_to_think else header(role, place))

    def get_stop_sequences(self) -> list[int] | list[str]:
        return [self._end]

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[Message]:
        functions = [{"type": "function", "function": function_of(tool)} for tool in tools]
        text = TOOLS.format(lines="\n".join(map(json.dumps, functions))) if functions else ""
        return [{"role": "system", "content": f"{system_prompt}\n\n{text}" if system_prompt else text}]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        text, termination = self._until(response, self._end)
        message: Message = {"role": "assistant", "content": text}
        if not termination.is_clean:
            return message, termination
        parts, calls, unparsed = split_blocks(text)
        if "<think>" in text or "<tool_call>" in text:
            message["content"] = parts if self._thinking == "never" else _without_block(parts)
        if text.count("<tool_call>") > text.count("</tool_call>"):
            rest = text[text.rindex("<tool_call>") :]
            unparsed.append({"text": rest, "error": "the call does not end with '</tool_call>'"})
        add_calls(message, calls, unparsed)
        return message, termination


class Qwen3VLRenderer(Qwen3Renderer):
    """Qwen3-VL without images: earlier answers lose their thinking, and no block is added to any answer."""

    def __init__(self, tokenizer: Any, *, thinking: Thinking = "on") -> None:
        super().__init__(tokenizer, thinking=thinking)
        self.has_extension_property = False

    def write(self, message: Message, place: Place) -> Written:
        content, is_assistant = message["content"], message["role"] == "assistant"
        if isinstance(content, str):
            text = content
        else:
            text = _joined(content, keeps_thoughts=place.is_last or not is_assistant, has_block=False)
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
        if "tool_calls" in message:
            text += "\n" + "\n".join(map(_written_call, message["tool_calls"]))
        return Written(header=self._encode(header(message["role"], place)), output=self._encode(text + "<|im_end|>"))


def header(role: str, place: Place) -> str:
    return begin("user" if role == "tool" else role, place)


def begin(role: str, place: Place) -> str:
    return ("\n" if place.position else "") + f"<|im_start|>{role}\n"


def _block(thought: str) -> str:
    return "<think>\n" + thought.strip("\n") + "\n</think>\n\n"


def _joined(content: Sequence[ContentPart], *, keeps_thoughts: bool, has_block: bool) -> str:
    text, follows_block = "", False
    for part in content:
        if part["type"] == "text":
            text += part["text"].lstrip("\n") if follows_block else part["text"]
            follows_block = False
        elif part["type"] == "thinking":
            if keeps_thoughts:
                text += _block(part["thinking"]) if has_block else f"<think>{part['thinking']}</think>"
                follows_block = has_block
        else:
            raise unknown_part(part)
    return text


def unknown_part(part: ContentPart) -> Unsupported:
    return Unsupported(f"a message has a part of type {part['type']!r}; accepted are {', '.join(PART_TYPES[:2])}")


def thought_and_text(content: Content) -> tuple[str, str]:
    """Return the thoughts of a message and its texts, each joined; thoughts within a text stay there."""
    if isinstance(content, str):
        return "", content
    thought = text = ""
    for part in content:
        if part["type"] == "text":
            text += part["text"]
        elif part["type"] == "thinking":
            thought += part["thinking"]
        else:
            raise unknown_part(part)
    return thought, text


def function_of(tool: Any) -> Any:
    """Return the function of a tool; in the official cookbook, the tool is the function itself."""
    return tool["function"] if tool.get("type") == "function" else tool


def name_and_arguments(call: Any) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call, which is a dictionary or, in the official cookbook, an object."""
    if not isinstance(call, Mapping):
        call = make_tool_call(call.function.name, json.loads(call.function.arguments))
    return call["function"]["name"], call_arguments(call)


def name_and_text(call: Any) -> tuple[str, str]:
    """Return name and arguments of a call, the arguments as JSON text, unchanged if they are text already."""
    function = call["function"] if isinstance(call, Mapping) else vars(call.function)
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)


def call_id_of(call: Any) -> str | None:
    found: str | None = call.get("id") if isinstance(call, Mapping) else call.id
    return found


def _written_call(call: Any) -> str:
    name, arguments = name_and_arguments(call)
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def split_blocks(text: str) -> tuple[list[ContentPart], list[ToolCall], list[UnparsedToolCall]]:
    """Split a response into parts (thinking and texts in order), calls, and calls that cannot be parsed."""
    parts: list[ContentPart] = []
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    done = 0
    for match in BLOCKS.finditer(text):
        if before := text[done : match.start()]:
            parts.append({"type": "text", "text": before})
        thought, call = match.groups()
        if thought:
            parts.append({"type": "thinking", "thinking": thought})
        elif call is not None:
            _read_call(call, match.group(), calls, unparsed)
        done = match.end()
    if rest := text[done:]:
        parts.append({"type": "text", "text": rest})
    return parts, calls, unparsed


def _read_call(text: str, block: str, calls: list[ToolCall], unparsed: list[UnparsedToolCall]) -> None:
    try:
        value = json.loads(text)
        name, arguments = read_call(value)
    except ValueError as error:
        unparsed.append({"text": block, "error": str(error)})
        return
    call_id = value.get("id")
    calls.append(make_tool_call(name, arguments, call_id if isinstance(call_id, str) else None))


def _without_block(parts: Sequence[ContentPart]) -> list[ContentPart]:
    """Strip the line breaks around blocks of thinking, and drop empty blocks."""
    kept: list[ContentPart] = []
    follows_block = False
    for part in parts:
        if part["type"] == "thinking":
            if thought := part["thinking"].strip("\n"):
                kept.append({"type": "thinking", "thinking": thought})
        elif part["type"] == "text":
            kept.append({"type": "text", "text": part["text"].lstrip("\n") if follows_block else part["text"]})
        follows_block = part["type"] == "thinking"
    return kept
