"""The chat format of DeepSeek V4.1: turns without line breaks between them, calls as tags, results in a user's turn.

A thinking model reads how much effort to spend before everything else; one that does not think gets a closed block of
thoughts. Thoughts before the last turn of a user or a tool are dropped, unless tools are declared.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from lorimer.chat.conversation import (
    Message,
    Termination,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    add_calls,
    make_tool_call,
)
from lorimer.chat.deepseek import ASSISTANT, BEGIN, END, USER, unclosed, with_thoughts_apart
from lorimer.chat.format_renderer import FormatRenderer, Place, Written, only_text
from lorimer.chat.formats import call_id_of, function_of, name_and_arguments, thought_and_text
from lorimer.errors import InvalidInput, Unsupported

SYSTEM = "<｜System｜>"
DECLARE = "tool_declare"
"""The role of the message after the system message that declares the tools."""
EFFORTS = {"low": 50, "high": 75, "max": 100}
EFFORT = "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
MARK = "｜DSML｜"
CALLS_BEGIN, CALLS_END = f"<{MARK} calls>", f"</{MARK} calls>"
CALLS = re.compile(rf"(?:\n\n)?{CALLS_BEGIN}(.*?){CALLS_END}", re.DOTALL)
CALL = re.compile(rf'<{MARK} invoke name="(.*?)">\n(.*?)</{MARK} invoke>', re.DOTALL)
PARAMETER = re.compile(rf'<{MARK} parameter name="(.*?)" string="(true|false)">(.*?)</{MARK} parameter>', re.DOTALL)
TOOLS = f"""\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"{CALLS_BEGIN}" block like the following:

{CALLS_BEGIN}
<{MARK} invoke name="$TOOL_NAME">
<{MARK} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{MARK} parameter>
...
</{MARK} invoke>
<{MARK} invoke name="$TOOL_NAME2">
...
</{MARK} invoke>
{CALLS_END}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{{schemas}}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
"""The description of tools after the system message, as in the chat template of DeepSeek V4.1."""
TURN_OF_USER = ("user", "tool")


class DeepSeekV41Renderer(FormatRenderer):
    def __init__(self, tokenizer: Any, *, effort: str | None = "high", keeps_thoughts: bool = False) -> None:
        """``effort`` is one of ``EFFORTS``, or None for a model that does not think."""
        super().__init__(tokenizer)
        self._begin, self._end = self._token(BEGIN), self._token(END)
        self._open, self._close = self._token("<think>"), self._token("</think>")
        self._effort = None if effort is None else EFFORT.format(effort=EFFORTS[effort])
        self._keeps_thoughts = keeps_thoughts
        self.has_extension_property = effort is None or keeps_thoughts

    def write(self, message: Message, place: Place) -> Written:
        role, opening = message["role"], self._opening(message["role"]) if place.position == 0 else ""
        if role == "assistant":
            return self._answer(message, place, opening)
        if role == "system":
            return self._system(opening or SYSTEM, only_text(message))
        if role in TURN_OF_USER:
            if _role(place.previous) in TURN_OF_USER:  # the first message of the turn has its whole text
                return Written([], [])
            return Written(self._encode(opening + USER), self._encode(only_text(message)))
        if role == DECLARE:  # the system message has its text
            return Written([], [])
        raise Unsupported(
            f"message {place.position} has the role {role!r}; accepted are system, user, assistant and tool"
        )

    def _opening(self, role: str) -> str:
        if self._effort is not None:
            return SYSTEM + self._effort
        return SYSTEM if role == "system" else ""

    def _system(self, before: str, text: str) -> Written:
        """Write both as one text, because line breaks that meet are one token, which then belongs to the header."""
        tokens, count = self._encode(before + text), 0
        while count < len(tokens) and len(self.tokenizer.decode(tokens[:count])) < len(before):
            count += 1
        return Written(tokens[:count], tokens[count:])

    def _answer(self, message: Message, place: Place, opening: str) -> Written:
        thought, said = thought_and_text(message["content"])
        thinks = self._effort is not None and place.keeps_thoughts
        # The end of a turn names the assistant; there is no turn before an answer that comes first or follows another.
        previous = _role(place.previous)
        follows_turn = previous in TURN_OF_USER or (previous == "system" and place.position > 1)
        header = opening + (ASSISTANT + ("<think>" if thinks else "</think>") if follows_turn else "")
        text = (f"{thought}</think>" if thinks else "") + said
        if calls := message.get("tool_calls"):
            text += f"\n\n{CALLS_BEGIN}\n" + "\n".join(map(_written_call, calls)) + f"\n{CALLS_END}"
        return Written(self._encode(header), [*self._encode(text), self._end])

    def _beginning(self) -> list[int]:
        return [self._begin]

    # ── conversations ─────────────────────────────────────────────────────────────────────────────────

    def _turn_start(self, messages: Sequence[Message]) -> int:
        return _last(messages, ("user",)) + 1

    def _first_kept(self, messages: Sequence[Message], *, is_prompt: bool) -> int:
        if self._keeps_thoughts or any(message["role"] == DECLARE for message in messages):
            return 0
        return _last(messages, TURN_OF_USER) + 1

    def _prompt_before(self, messages: list[Message], position: int) -> list[int]:
        return self._prompt(messages[:position], first_kept=self._first_kept(messages, is_prompt=False))

    def _prepared(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> list[Message]:
        """Return the messages with the tools in the system message, and each turn of a user in its first message."""
        prepared = _with_declared_tools(super()._prepared(messages, tools))
        order: dict[str, int] = {}
        begin = 0
        while begin < len(prepared):
            if calls := prepared[begin].get("tool_calls"):
                order = {call_id: index for index, call in enumerate(calls) if (call_id := call_id_of(call))}
            end = begin
            while end < len(prepared) and prepared[end]["role"] in TURN_OF_USER:
                end += 1
            if end > begin:
                prepared[begin:end] = _joined_turn(prepared[begin:end], order)
            begin = max(end, begin + 1)
        return prepared

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[Message]:
        prefix: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if tools:
            functions = [{"type": "function", "function": dict(function_of(tool))} for tool in tools]
            prefix.append({"role": DECLARE, "content": json.dumps(functions)})
        return prefix

    # ── responses ─────────────────────────────────────────────────────────────────────────────────────

    def get_stop_sequences(self) -> list[int] | list[str]:
        return [self._end]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        tokens = list(response)
        if self._effort is not None and tokens[:1] != [self._open] and self._close in tokens:
            tokens = [self._open, *tokens]  # the prompt has opened the block
        text, termination = self._until(tokens, self._end)
        message: Message = {"role": "assistant", "content": text}
        if not termination.is_clean:
            return message, termination
        calls: list[ToolCall] = []
        unparsed: list[UnparsedToolCall] = []
        if block := CALLS.search(text):
            calls, unparsed = _read_calls(block[0], block[1])
            if after := text[block.end() :].strip():
                unparsed.append({"text": text[block.end() :], "error": f"{after!r:.200} follows the calls"})
            text = text[: block.start()]
        rest = unclosed(text, [(CALLS_BEGIN, CALLS_END)])
        if not rest and MARK in text:
            rest = [{"text": text, "error": f"{MARK!r} is not within calls"}]
        message["content"] = with_thoughts_apart(text)
        add_calls(message, calls, unparsed + rest)
        return message, termination


def _role(message: Message | None) -> str:
    return "" if message is None else message["role"]


def _last(messages: Sequence[Message], roles: tuple[str, ...]) -> int:
    """Return the index of the last message of these roles, or of a later system message; -1 if there is none."""
    found = (
        index
        for index, message in enumerate(messages)
        if message["role"] in roles or (message["role"] == "system" and index)
    )
    return max(found, default=-1)


def _with_declared_tools(messages: list[Message]) -> list[Message]:
    """Move the declaration of tools into the system message before it, or into an empty one."""
    positions = [index for index, message in enumerate(messages) if message["role"] == DECLARE]
    if not positions:
        return messages
    if positions not in ([0], [1]) or (positions == [1] and messages[0]["role"] != "system"):
        raise InvalidInput(
            f"message {positions[-1]} declares tools; one declaration is accepted, first or after the system message"
        )
    declaration = messages[positions[0]]
    functions = [tool["function"] for tool in json.loads(only_text(declaration))]
    schemas = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    before = only_text(messages[0]) if positions == [1] else ""
    first = messages[0] if positions == [1] else declaration
    system: Message = {**first, "role": "system", "content": f"{before}\n\n{TOOLS.format(schemas=schemas)}"}
    return [system, {**declaration, "content": ""}, *messages[positions[0] + 1 :]]


def _joined_turn(turn: Sequence[Message], order: dict[str, int]) -> list[Message]:
    """Put the text of a turn of users and tools into its first message, results in the order of their calls."""
    results = sorted(
        (message for message in turn if message["role"] == "tool"),
        key=lambda message: order.get(message.get("tool_call_id") or "", 0),
    )
    waiting = iter(results)
    texts = [
        f"<tool_result>{only_text(next(waiting))}</tool_result>" if message["role"] == "tool" else only_text(message)
        for message in turn
    ]
    return [{**message, "content": "" if index else "\n\n".join(texts)} for index, message in enumerate(turn)]


def _written_call(call: Any) -> str:
    name, arguments = name_and_arguments(call)
    parameters = [
        f'<{MARK} parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{MARK} parameter>"
        for key, value in arguments.items()
    ]
    return f'<{MARK} invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{MARK} invoke>"


def _read_calls(block: str, inside: str) -> tuple[list[ToolCall], list[UnparsedToolCall]]:
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    found = list(CALL.finditer(inside))
    if not found or CALL.sub("", inside).strip():
        return [], [{"text": block, "error": "there is something else than calls between the marks of calls"}]
    for match in found:
        try:
            calls.append(_read_call(match[1], match[2]))
        except ValueError as error:
            unparsed.append({"text": match[0], "error": str(error)})
    return calls, unparsed


def _read_call(name: str, text: str) -> ToolCall:
    if not name.strip():
        raise ValueError("the call has no name")
    if PARAMETER.sub("", text).strip():
        raise ValueError("there is more than parameters in the call")
    arguments: dict[str, Any] = {}
    for key, is_string, value in PARAMETER.findall(text):
        if not key.strip() or key in arguments:
            raise ValueError(f"the parameter {key!r} has no name, or comes twice")
        arguments[key] = value if is_string == "true" else json.loads(value)
    return make_tool_call(name, arguments)
