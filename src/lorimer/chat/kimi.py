"""The chat formats of Kimi K2, K2.5 and K2.6 without images: a token for each kind of role, calls in a section.

Every conversation has a system message; one without gets the model's own. An answer has a block of thoughts, which is
empty in turns before the last answer that called no tool. Prompts of K2.5 and K2.6 open the block, or close it too.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lorimer.chat.conversation import (
    Message,
    Termination,
    ToolCall,
    ToolSpec,
    TrainOn,
    UnparsedToolCall,
    add_calls,
    make_tool_call,
)
from lorimer.chat.deepseek import unclosed, with_thoughts_apart
from lorimer.chat.format_renderer import FormatRenderer, Place, Written, only_text
from lorimer.chat.formats import call_id_of, function_of, name_and_text, thought_and_text, unknown_part
from lorimer.chat.typescript_tools import declare_tools
from lorimer.types import ModelInput

SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
DECLARE = "tool_declare"
"""The role of the message before the system message that declares the tools."""
SECTIONS = tuple((f"<|{name}_section_begin|>", f"<|{name}_section_end|>") for name in ("tool_calls", "tool_call"))
"""The model is known to write either."""
CALL_BEGIN, CALL_MIDDLE, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SECTION = re.compile("|".join(f"{re.escape(begin)}(.*?){re.escape(end)}" for begin, end in SECTIONS), re.DOTALL)
CALL = re.compile(
    rf"{re.escape(CALL_BEGIN)}\s*([^<]+:\d+)\s*{re.escape(CALL_MIDDLE)}\s*(.*?)\s*{re.escape(CALL_END)}", re.DOTALL
)


class KimiK2Renderer(FormatRenderer):
    has_extension_property = False

    def __init__(self, tokenizer: Any, *, keeps_thoughts: bool = False) -> None:
        super().__init__(tokenizer)
        self._end = self._token("<|im_end|>")
        self._keeps_thoughts = keeps_thoughts

    def write(self, message: Message, place: Place) -> Written:
        role = message["role"]
        if role == "assistant":
            header, said = "<|im_assistant|>assistant<|im_middle|>", self._encode(self._answer(message, place))
        elif role == "user":
            header, said = "<|im_user|>user<|im_middle|>", self._content(message)
        elif role == "tool":
            header = f"<|im_system|>{message.get('name') or role}<|im_middle|>"
            header += f"## Return of {message.get('tool_call_id', '')}\n"
            said = self._content(message)
        else:
            header, said = f"<|im_system|>{role}<|im_middle|>", self._content(message)
        return Written(self._encode(header), said)

    def _content(self, message: Message) -> list[int]:
        return self._encode(only_text(message) + "<|im_end|>")

    def _answer(self, message: Message, place: Place) -> str:
        thought, said = thought_and_text(message["content"])
        kept = thought if place.keeps_thoughts or self._keeps_thoughts else ""
        calls = "".join(_written_call(call, index) for index, call in enumerate(message.get("tool_calls") or []))
        section = SECTIONS[0][0] + calls + SECTIONS[0][1] if calls else ""
        return f"<think>{kept}</think>{said}{section}<|im_end|>"

    def _turn_start(self, messages: Sequence[Message]) -> int:
        """Return the index after the last answer that called no tool: calls and their results belong to one turn."""
        answers = (
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and not message.get("tool_calls")
        )
        return max(answers, default=-1) + 1

    def _prepared(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> list[Message]:
        prepared = super()._prepared(messages, tools)
        position = 1 if prepared and prepared[0]["role"] == DECLARE else 0
        if len(prepared) == position or prepared[position]["role"] != "system":
            prepared.insert(position, {"role": "system", "content": SYSTEM})
        return prepared

    def build_supervised_examples(
        self,
        messages: Sequence[Message],
        train_on_what: TrainOn = TrainOn.LAST_ASSISTANT_TURN,
        tools: Sequence[ToolSpec] | None = None,
    ) -> list[tuple[ModelInput, NDArray[np.float32]]]:
        """Return one sequence for the last message or turn, and otherwise one that ends with each turn of a user."""
        prepared, train_on = self._prepared(messages, tools), TrainOn(train_on_what)
        if train_on in (TrainOn.LAST_ASSISTANT_MESSAGE, TrainOn.LAST_ASSISTANT_TURN):
            return [self._example(prepared, train_on)]
        users = [index for index, message in enumerate(prepared) if message["role"] == "user"]
        of_turn = TrainOn.LAST_ASSISTANT_TURN if train_on is TrainOn.ALL_ASSISTANT_MESSAGES else train_on
        return [self._example(prepared[:end], of_turn) for end in [*users[1:], len(prepared)]]

    def get_stop_sequences(self) -> list[int] | list[str]:
        return [self._end]

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[Message]:
        system: Message = {"role": "system", "content": system_prompt or SYSTEM}
        functions = [{"type": "function", "function": function_of(tool)} for tool in tools]
        return [{"role": DECLARE, "content": self._declared(functions)}, system] if functions else [system]

    def _declared(self, tools: list[dict[str, Any]]) -> str:
        return json.dumps(tools, separators=(",", ":"), sort_keys=True)

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        text, termination = self._until(response, self._end)
        message: Message = {"role": "assistant", "content": text}
        if not termination.is_clean:
            return message, termination
        section = SECTION.search(text)
        calls, unparsed = _read_calls(section[1] or section[2] or "") if section else ([], [])
        unparsed += unclosed(text, [*SECTIONS, (CALL_BEGIN, CALL_END)])
        message["content"] = with_thoughts_apart(text[: section.start()] if section else text)
        add_calls(message, calls, unparsed)
        return message, termination


class KimiK25Renderer(KimiK2Renderer):
    """Also for K2.6, which may keep the thoughts of earlier turns."""

    def __init__(self, tokenizer: Any, *, is_told_not_to_think: bool = False, keeps_thoughts: bool = False) -> None:
        super().__init__(tokenizer, keeps_thoughts=keeps_thoughts)
        self._open, self._close = self._token("<think>"), self._token("</think>")
        self.is_told_not_to_think = is_told_not_to_think

    def _content(self, message: Message) -> list[int]:
        content = message["content"]
        if isinstance(content, str) or len(content) == 1:
            return super()._content(message)
        tokens: list[int] = []
        for part in content:
            if part["type"] != "text":
                raise unknown_part(part)
            tokens += self._encode(part["text"])
        return [*tokens, self._end]

    def _prompt_header(self, role: str, place: Place) -> list[int]:
        block = [self._open, self._close] if self.is_told_not_to_think else [self._open]
        return super()._prompt_header(role, place) + block

    def _declared(self, tools: list[dict[str, Any]]) -> str:
        return declare_tools(tools)

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        tokens = list(response)
        if tokens[:1] != [self._open] and self._close in tokens:
            tokens = [self._open, *tokens]  # the prompt has opened the block
        return super().parse_response(tokens)


def _written_call(call: Any, index: int) -> str:
    name, arguments = name_and_text(call)
    return f"{CALL_BEGIN}{call_id_of(call) or f'functions.{name}:{index}'}{CALL_MIDDLE}{arguments}{CALL_END}"


def _read_calls(section: str) -> tuple[list[ToolCall], list[UnparsedToolCall]]:
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    for match in CALL.finditer(section):
        call_id = match[1].strip()
        name = call_id.partition(":")[0]
        try:
            arguments = json.loads(match[2])
            if not isinstance(arguments, dict):
                raise ValueError("an object of arguments is needed")
        except ValueError as error:
            unparsed.append({"text": match[0], "error": str(error)})
        else:
            calls.append(make_tool_call(name.partition(".")[2] if "." in name else name, arguments, call_id))
    return calls, unparsed
