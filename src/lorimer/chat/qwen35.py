"""The chat formats of Qwen3.5, Qwen3.6 and Qwen3.8 without images: Qwen3's markers, and calls as XML tags.

Every prompt opens a block of thinking, and also closes it if thinking is disabled. Nemotron's format
(``nemotron.py``) is a variant of it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from lorimer.chat.conversation import (
    Content,
    ContentPart,
    Message,
    Termination,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    add_calls,
    make_tool_call,
    text_of,
)
from lorimer.chat.format_renderer import Place, Written, has_thought
from lorimer.chat.formats import (
    Qwen3Renderer,
    begin,
    function_of,
    header,
    name_and_arguments,
    unknown_part,
)

OPEN, EMPTY = "<think>\n", "<think>\n\n</think>\n\n"
TOOLS = """\
# Tools

You have access to the following functions:

<tools>
{lines}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""
"""The description of tools in the system message, as in the chat template of Qwen3.5."""
CALL = re.compile(r"\s*<tool_call>\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*</tool_call>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\s*(.*?)\s*</parameter>", re.DOTALL)


class Qwen35Renderer(Qwen3Renderer):
    """With ``keeps_thoughts``, earlier answers keep their thinking, which Qwen3.5 removes by default."""

    NEXT_RESPONSE, AFTER_RESPONSE = "\n", ""
    """Text between the responses of several tools, and after each."""

    def __init__(self, tokenizer: Any, *, is_told_not_to_think: bool = False, keeps_thoughts: bool = False) -> None:
        super().__init__(tokenizer)
        self._token("</think>")
        self.is_told_not_to_think = is_told_not_to_think
        self._keeps_thoughts = keeps_thoughts

    def write(self, message: Message, place: Place) -> Written:
        message = {**message, "content": self._trimmed(message["content"])}
        is_tool, is_assistant = message["role"] == "tool", message["role"] == "assistant"
        head = self.NEXT_RESPONSE if is_tool and place.follows_tool else header(message["role"], place)
        if is_assistant:
            head += self._empty_block(message, place)
        text = self._joined(message["content"], not is_assistant or self._keeps_thoughts_at(place))
        if is_tool:
            text = f"<tool_response>\n{text}\n</tool_response>{self.AFTER_RESPONSE}"
        if "tool_calls" in message:
            text += self._written_calls(message)
        if not (is_tool and place.precedes_tool):
            text += "<|im_end|>"
        return self._split_at_prompt(head, text, place, is_sampled=is_assistant and place.is_last)

    def _trimmed(self, content: Content) -> Content:
        """Strip leading and trailing space of the content; leave thinking unchanged."""
        return _trimmed(content)

    def _keeps_thoughts_at(self, place: Place) -> bool:
        return self._keeps_thoughts or place.is_last

    def _empty_block(self, message: Message, place: Place) -> str:
        """Return the block before an answer without thinking: only after the last message of a user."""
        return EMPTY if place.position > place.last_user and not has_thought(message["content"]) else ""

    def _block(self, thought: str) -> str:
        return f"<think>\n{thought}\n</think>\n\n"

    def _joined(self, content: Content, keeps_thoughts: bool) -> str:
        if isinstance(content, str):
            return content
        text = ""
        for part in content:
            if part["type"] == "text":
                text += part["text"]
            elif part["type"] == "thinking":
                text += self._block(part["thinking"]) if keeps_thoughts else ""
            else:
                raise unknown_part(part)
        return text

    def _written_calls(self, message: Message) -> str:
        calls = "\n".join(map(self._written_call, message["tool_calls"]))
        return ("\n\n" if text_of(message).strip() else "") + calls

    def _written_call(self, call: Any) -> str:
        name, arguments = name_and_arguments(call)
        lines = [f"<tool_call>\n<function={name}>"]
        for key, value in arguments.items():
            lines.append(f"<parameter={key}>\n{self._argument(value)}\n</parameter>")
        return "\n".join([*lines, "</function>\n</tool_call>"])

    def _argument(self, value: Any) -> str:
        return json.dumps(value) if isinstance(value, dict | list) else str(value)

    def _split_at_prompt(self, head: str, text: str, place: Place, *, is_sampled: bool) -> Written:
        """Assign the part of an empty block that the prompt contains to the header; the rest is sampled."""
        given = self._prompt_text("assistant", place)
        if is_sampled and head.startswith(given):
            rest = head[len(given) :]
            return Written(header=self._encode(given), output=self._encode(rest) + self._encode(text))
        return Written(header=self._encode(head), output=self._encode(text))

    def _prompt_text(self, role: str, place: Place) -> str:
        return begin(role, place) + (EMPTY if self.is_told_not_to_think else OPEN)

    def _prompt_header(self, role: str, place: Place) -> list[int]:
        return self._encode(self._prompt_text(role, place))

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[Message]:
        lines = "\n".join(json.dumps(function_of(tool)) for tool in tools)
        texts = [TOOLS.format(lines=lines) if tools else "", system_prompt]
        return [{"role": "system", "content": "\n\n".join(filter(None, texts))}]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        """Parse a response, which only closes the block of thinking, because the prompt has opened it."""
        tokens, opening = list(response), self._encode(OPEN)
        if tokens[: len(opening)] != opening and self._token("</think>") in tokens:
            tokens = opening + tokens
        message, termination = super().parse_response(tokens)
        if not termination.is_clean:
            return message, termination
        if not isinstance(message["content"], str):
            message["content"] = _with_trimmed_thoughts(message["content"])
        _read_tagged_calls(message)
        return message, termination


EFFORTS = {
    "xhigh": "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, "
    "consider plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer.",
    "medium": "",
    "low": "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion "
    "without unnecessary elaboration.",
}
"""What the chat template of Qwen3.8 writes at the beginning of the system message."""


class Qwen38Renderer(Qwen35Renderer):
    """Every answer keeps its thinking, or has an empty block; the system message states the effort of reasoning."""

    def __init__(self, tokenizer: Any, *, effort: str = "xhigh", is_told_not_to_think: bool = False) -> None:
        super().__init__(tokenizer, is_told_not_to_think=is_told_not_to_think, keeps_thoughts=True)
        self._instruction = "" if is_told_not_to_think else EFFORTS[effort]

    def _empty_block(self, message: Message, place: Place) -> str:
        return EMPTY if isinstance(message["content"], str) or not has_thought(message["content"]) else ""

    def _argument(self, value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    def _prepared(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> list[Message]:
        """Begin with a system message that states the effort; leave out an empty one."""
        prepared = super()._prepared(messages, tools)
        added: Message = {"role": "system", "content": ""}
        if any("trainable" in message for message in prepared):
            added["trainable"] = False
        system = prepared.pop(0) if prepared and prepared[0]["role"] == "system" else added
        texts = [self._instruction, text_of(system).strip()]
        content = "\n\n".join(filter(None, texts))
        return [{**system, "content": content}, *prepared] if content else prepared


def _trimmed(content: Content) -> Content:
    if isinstance(content, str):
        return content.strip()
    parts = list(content)
    said = [index for index, part in enumerate(parts) if part["type"] != "thinking"]
    for indices, strip in ((said, str.lstrip), (said[::-1], str.rstrip)):
        for index in indices:
            part = parts[index]
            if part["type"] != "text":
                break
            parts[index] = {"type": "text", "text": strip(part["text"])}
            if strip(part["text"]):
                break
    return parts


def _with_trimmed_thoughts(parts: Sequence[ContentPart]) -> list[ContentPart]:
    """Strip the thinking before the answer."""
    trimmed: list[ContentPart] = []
    for index, part in enumerate(parts):
        if part["type"] == "thinking":
            trimmed.append({"type": "thinking", "thinking": part["thinking"].strip()})
            continue
        if trimmed and any(one["type"] == "thinking" for one in trimmed):
            return [*trimmed, *parts[index:]]
        trimmed.append(part)
    return trimmed


def _read_tagged_calls(message: Message) -> None:
    """Parse unparsed calls that are written as XML tags, and move them to the calls."""
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    for block in message.pop("unparsed_tool_calls", []):
        if "<function=" not in block["text"] or "</tool_call>" not in block["text"]:
            unparsed.append(block)
            continue
        try:
            calls.append(_read_call(block["text"]))
        except ValueError as error:
            unparsed.append({"text": block["text"], "error": str(error)})
    add_calls(message, [*message.get("tool_calls", []), *calls], unparsed)


def _read_call(text: str) -> ToolCall:
    match = CALL.fullmatch(text)
    if match is None or not match[1].strip():
        raise ValueError("a function with a name and its parameters is needed")
    arguments: dict[str, Any] = {}
    for parameter in PARAMETER.finditer(match[2]):
        if not parameter[1].strip():
            raise ValueError("a parameter has no name")
        try:
            arguments[parameter[1].strip()] = json.loads(parameter[2])
        except ValueError:
            arguments[parameter[1].strip()] = parameter[2]
    if PARAMETER.sub("", match[2]).strip():
        raise ValueError("there is more than parameters in the function")
    return make_tool_call(match[1].strip(), arguments)
