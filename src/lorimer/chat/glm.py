"""The chat format of GLM-5.3: the token of the next role ends a message, and calls are keys and values in tags.

What ends an answer is part of it, because the model must learn to say it; the next message then lacks its token. Every
prompt opens a block of thoughts, and answers keep theirs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lorimer.chat.conversation import (
    Content,
    Message,
    Termination,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    add_calls,
    make_tool_call,
)
from lorimer.chat.format_renderer import FormatRenderer, Place, Written
from lorimer.chat.formats import (
    call_id_of,
    function_of,
    name_and_arguments,
    split_blocks,
    thought_and_text,
    unknown_part,
)
from lorimer.errors import InvalidInput, Unsupported

CALL = re.compile(r"\s*<tool_call>\s*([\w\-.]+)\s*(.*?)\s*</tool_call>\s*", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
UNDECLARED = ("defer_loading", "strict")
TOOLS = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{lines}</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{{function-name}}<arg_key>{{arg-key-1}}</arg_key><arg_value>{{arg-value-1}}</arg_value>\
<arg_key>{{arg-key-2}}</arg_key><arg_value>{{arg-value-2}}</arg_value>...</tool_call>"""
"""The system message that declares tools, as in the chat template of GLM-5.3; it begins with a line break."""


class Glm53Renderer(FormatRenderer):
    def __init__(self, tokenizer: Any, *, effort: str = "max") -> None:
        super().__init__(tokenizer)
        self._tokens = {
            role: self._token(f"<|{mark}|>")
            for role, mark in {
                "system": "system",
                "user": "user",
                "assistant": "assistant",
                "tool": "observation",
            }.items()
        }
        self._eos, self._open, self._close = map(self._token, ("<|endoftext|>", "<think>", "</think>"))
        self._effort = effort.capitalize()

    def write(self, message: Message, place: Place) -> Written:
        role = message["role"]
        if role not in self._tokens:
            raise _unknown_role(role)
        if role == "assistant":
            return self._answer(message, place)
        text = _visible(message["content"])
        if role == "tool":
            text = f"<tool_response>{text}</tool_response>"
        previous = place.previous
        is_begun = previous is not None and (
            _ends_with(previous) == role if previous["role"] == "assistant" else role == previous["role"] == "tool"
        )
        return Written([] if is_begun else [self._tokens[role]], self._encode(text))

    def _answer(self, message: Message, place: Place) -> Written:
        thought, said = _split_thought(message["content"])
        text = f"{thought}</think>{said.strip()}" + "".join(map(_written_call, message.get("tool_calls") or []))
        header, output, end = [self._tokens["assistant"], self._open], self._encode(text), _ends_with(message)
        if place.following is None:
            return Written(header, output, (self._tokens[end],))
        return Written(header, [*output, self._tokens[end]] if place.following["role"] == end else output)

    def _beginning(self) -> list[int]:
        return self._encode(f"[gMASK]<sop><|system|>Reasoning Effort: {self._effort}")

    def _prompt_header(self, role: str, place: Place) -> list[int]:
        if role not in self._tokens:
            raise _unknown_role(role)
        return [self._tokens[role], *([self._open] if role == "assistant" else [])]

    def _prepared(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> list[Message]:
        prepared = super()._prepared(messages, tools)
        begin = 0
        while begin < len(prepared):
            end = begin
            while end < len(prepared) and prepared[end]["role"] == "tool":
                end += 1
            if end > begin > 0:
                prepared[begin:end] = _in_order_of_calls(prepared[begin:end], prepared[begin - 1])
            begin = end + 1
        return prepared

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[Message]:
        functions: list[Mapping[str, Any]] = [function_of(tool) for tool in tools]
        lines = [
            json.dumps({key: value for key, value in one.items() if key not in UNDECLARED}, ensure_ascii=False) + "\n"
            for one in functions
            if not one.get("defer_loading")
        ]
        texts = [TOOLS.format(lines="".join(lines))] if functions else []
        return [{"role": "system", "content": text} for text in [*texts, system_prompt] if text]

    def get_stop_sequences(self) -> list[int] | list[str]:
        return [self._tokens["user"], self._tokens["tool"], self._eos]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        tokens = list(response)
        if tokens[:1] != [self._open] and self._close in tokens:
            tokens = [self._open, *tokens]  # the prompt has opened the block
        stops = self.get_stop_sequences()
        ends = [index for index, token in enumerate(tokens) if token in stops]
        if len(ends) > 1:
            raise InvalidInput(
                f"a response has an end of a message {len(ends)} times, at most once is accepted; sample with "
                "stop=renderer.get_stop_sequences()"
            )
        text = str(self.tokenizer.decode(tokens[: ends[0]] if ends else tokens))
        message: Message = {"role": "assistant", "content": text}
        if not ends:
            return message, Termination.MALFORMED
        if "<think>" in text or "<tool_call>" in text:
            message["content"], calls, blocks = split_blocks(text)
            unparsed: list[UnparsedToolCall] = []
            for block in blocks:
                try:
                    calls.append(_read_call(block["text"]))
                except ValueError as error:
                    unparsed.append({"text": block["text"], "error": str(error)})
            add_calls(message, calls, unparsed)
        return message, Termination.EOS if tokens[ends[0]] == self._eos else Termination.STOP_SEQUENCE


def _unknown_role(role: str) -> Unsupported:
    return Unsupported(f"a message has the role {role!r}; accepted are system, user, assistant and tool")


def _ends_with(answer: Message) -> str:
    """Return the role whose token ends an answer."""
    return "tool" if answer.get("tool_calls") else "user"


def _visible(content: Content) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part["type"] != "text":
            raise unknown_part(part)
        texts.append(part["text"])
    return "".join(texts)


def _split_thought(content: Content) -> tuple[str, str]:
    if isinstance(content, str):
        if "</think>" not in content:
            return "", content
        before, *_, said = content.split("</think>")
        return before.rpartition("<think>")[2], said
    return thought_and_text(content)


def _in_order_of_calls(results: list[Message], caller: Message) -> list[Message]:
    """Sort the results of tools like the calls before them, if each has an id that tells its call."""
    call_ids = [call_id_of(call) for call in caller.get("tool_calls") or []]
    found = {message.get("tool_call_id"): message for message in results}
    is_clear = all(call_ids) and len(set(call_ids)) == len(call_ids)
    if not is_clear or len(found) < len(results) or not found.keys() <= set(call_ids):
        return results
    return [found[call_id] for call_id in call_ids if call_id in found]


def _written_call(call: Any) -> str:
    name, arguments = name_and_arguments(call)
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}</tool_call>"


def _read_call(text: str) -> ToolCall:
    match = CALL.fullmatch(text)
    if match is None:
        raise ValueError("a name and pairs of keys and values are needed")
    if ARGUMENT.sub("", match[2]).strip():
        raise ValueError("there is more than keys and values in the call")
    arguments: dict[str, Any] = {}
    for key, value in ARGUMENT.findall(match[2]):
        if not key.strip():
            raise ValueError("a key is empty")
        try:
            arguments[key.strip()] = json.loads(value)
        except ValueError:
            arguments[key.strip()] = value
    return make_tool_call(match[1], arguments)
