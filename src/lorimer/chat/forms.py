"""Learn how a chat template writes an assistant's message by rendering probes, and parse responses accordingly.

A template is a program; unique words as content, thinking and tool calls show what it writes around them. Calls can be
parsed if they are JSON objects between markers, or nothing but such an object.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lorimer.chat.conversation import Message, ToolCall, ToolSpec, UnparsedToolCall, add_calls, make_tool_call
from lorimer.errors import InvalidInput, LorimerError

QUESTION, ANSWER, THOUGHT, FOLLOW_UP = "zqquestionqz", "zqanswerqz", "zqthoughtqz", "zqfollowqz"
TOOL, KEY, VALUE = "zqtoolqz", "zqkeyqz", "zqvalueqz"
MARK = "zqmarkqz"
"""Content that shows whether a template writes it, and where."""
WITH_IMAGE = [{"type": "image"}, {"type": "text", "text": MARK}]
CALL_ID = "zqcallidz"
"""Nine letters and digits, which is all that some templates accept."""


class Render(Protocol):
    def __call__(
        self, messages: list[Message], *, prompt: bool = False, tools: list[ToolSpec] | None = None
    ) -> str: ...


def writes(render: Callable[[Any], str], content: Any) -> bool:
    """Return whether a template writes ``content``, which holds ``MARK``; ``render`` renders it as a user's message."""
    try:
        return MARK in render(content)
    except InvalidInput:
        return False


def wants_parts(render: Callable[[Any], str]) -> bool:
    """Return whether a template writes content that is a list of parts, but omits content that is a string."""
    return not writes(render, MARK) and writes(render, [{"type": "text", "text": MARK}])


@dataclass(frozen=True, kw_only=True)
class ThinkingForm:
    before: str
    """Text before the thinking; empty if the prompt ends with it."""
    after: str
    """Text between the thinking and the content."""


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """``open {name_key: ..., arguments_key: ...} close``, for each call."""

    open: str
    close: str
    name_key: str
    arguments_key: str

    def parse(self, text: str) -> tuple[str, list[ToolCall], list[UnparsedToolCall]]:
        """Return the text besides the calls, the calls, and calls that cannot be parsed."""
        calls: list[ToolCall] = []
        unparsed: list[UnparsedToolCall] = []
        if not self.open:
            if text.lstrip().startswith("{"):
                self._read(text, calls, unparsed)
            return ("", calls, []) if calls else (text, [], [])
        said, *blocks = text.split(self.open)
        for block in blocks:
            inside, close, after = block.partition(self.close) if self.close else (block, "", "")
            if self.close and not close:
                unparsed.append({"text": block, "error": f"the call does not end with {self.close!r}"})
                continue
            self._read(inside, calls, unparsed)
            said = said.rstrip("\n") + ("\n" + after if after.strip() else "")
        return said, calls, unparsed

    def _read(self, text: str, calls: list[ToolCall], unparsed: list[UnparsedToolCall]) -> None:
        try:
            value = json.loads(text)
            name, arguments = value[self.name_key], value[self.arguments_key]
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise ValueError("a name and an object of arguments are needed")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            unparsed.append({"text": text, "error": reason})
        else:
            calls.append(make_tool_call(name, arguments))


@dataclass(frozen=True, kw_only=True)
class TemplateForm:
    content_prefix: str
    """Text between the prompt and the content of a message without thinking."""
    ends: tuple[str, ...]
    """Single tokens, as text, that may end a message."""
    thinking: ThinkingForm | None
    call: CallForm | None
    has_extension_property: bool

    def parse(self, text: str) -> Message:
        """Parse a sampled text without its end token as a message."""
        thought, said = self._split_thought(text)
        message: Message = {"role": "assistant", "content": said}
        if self.call is not None:
            said, calls, unparsed = self.call.parse(said)
            if calls or unparsed:
                message["content"] = said.rstrip("\n")
            add_calls(message, calls, unparsed)
        if thought:
            message["thinking"] = thought
        return message

    def _split_thought(self, text: str) -> tuple[str, str]:
        if self.thinking is not None:
            opening, closing = self.thinking.before.strip(), self.thinking.after.strip()
            begun = text.lstrip() if opening else text
            if begun.startswith(opening):
                # Without an end marker, all of it is truncated thinking.
                thought, _, said = begun[len(opening) :].partition(closing)
                return thought.strip("\n"), said.lstrip("\n")
        return "", text.removeprefix(self.content_prefix)


def learn_form(render: Render, marks_in: Callable[[str], list[str]]) -> TemplateForm:
    """Learn the form of the template behind ``render``; ``marks_in`` returns the added tokens in a text."""
    question: Message = {"role": "user", "content": QUESTION}
    prompt = render([question], prompt=True)
    plain = render([question, {"role": "assistant", "content": ANSWER}])
    if ANSWER not in plain:
        raise InvalidInput("the chat template does not write what the assistant says; it cannot be used")
    head, _, tail = plain.partition(ANSWER)
    end = next(iter(marks_in(tail)), "")
    if not end or not tail.strip().startswith(end):
        raise InvalidInput(
            f"the chat template ends an assistant's message with {tail!r}, which is no token of its own, so that no "
            "model can be told to stop there; use TextRenderer, or register a renderer for this model"
        )
    prefix = head.removeprefix(prompt) if head.startswith(prompt) else ""
    call, call_end = _learn_call(render, question, prefix, end, marks_in)
    return TemplateForm(
        content_prefix=prefix,
        ends=tuple(dict.fromkeys([end, call_end])) if call_end else (end,),
        thinking=_learn_thinking(render, question, prompt),
        call=call,
        has_extension_property=_is_extended(render, question, prompt, end),
    )


def _learn_thinking(render: Render, question: Message, prompt: str) -> ThinkingForm | None:
    text = _try_render(render, [question, {"role": "assistant", "content": ANSWER, "thinking": THOUGHT}])
    if THOUGHT not in text or ANSWER not in text or not text.startswith(prompt):
        return None
    before, _, rest = text[len(prompt) :].partition(THOUGHT)
    return ThinkingForm(before=before, after=rest.partition(ANSWER)[0])


def _learn_call(
    render: Render, question: Message, prefix: str, end: str, marks_in: Callable[[str], list[str]]
) -> tuple[CallForm | None, str]:
    """Return the form of a call, and the token that ends a message with calls."""
    schema = {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]}
    tool: ToolSpec = {"type": "function", "function": {"name": TOOL, "description": TOOL, "parameters": schema}}
    call = make_tool_call(TOOL, {KEY: VALUE}, CALL_ID)
    prompt = _try_render(render, [question], tools=[tool], prompt=True)
    text = _try_render(render, [question, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=[tool])
    if not text.startswith(prompt) or TOOL not in text[len(prompt) :]:
        return None, ""
    text = text[len(prompt) :].removeprefix(prefix)
    found = _find_object(text)
    if found is None:
        return None, ""
    begin, stop, name_key, arguments_key = found
    rest = text[stop:]
    call_end = end if end in rest else next(reversed(marks_in(rest)), "")
    close = rest.partition(call_end)[0] if call_end else rest
    form = CallForm(open=text[:begin].strip(), close=close.strip(), name_key=name_key, arguments_key=arguments_key)
    return form, call_end


def _find_object(text: str) -> tuple[int, int, str, str] | None:
    """Find the JSON object of the probe's call; return its bounds and its keys for name and arguments."""
    for match in re.finditer(r"\{", text[: text.index(TOOL)]):
        try:
            value, stop = json.JSONDecoder().raw_decode(text, match.start())
        except json.JSONDecodeError:
            continue
        keys = {_probe_part(item): key for key, item in value.items()}
        if "name" in keys and "arguments" in keys:
            return match.start(), stop, keys["name"], keys["arguments"]
    return None


def _probe_part(item: Any) -> str:
    return "name" if item == TOOL else "arguments" if item == {KEY: VALUE} else "other"


def _is_extended(render: Render, question: Message, prompt: str, end: str) -> bool:
    """Return whether a later prompt contains an earlier message as it was sampled, with and without thinking."""
    for answer in (
        Message(role="assistant", content=ANSWER),
        Message(role="assistant", content=ANSWER, thinking=THOUGHT),
    ):
        sampled = _try_render(render, [question, answer])
        later = _try_render(render, [question, answer, {"role": "user", "content": FOLLOW_UP}], prompt=True)
        if not sampled.startswith(prompt) or not later.startswith(sampled[: sampled.rindex(end) + len(end)]):
            return False
    return True


def _try_render(render: Render, messages: list[Message], **options: Any) -> str:
    """Render a probe; return an empty text if the template refuses it, and so does not support it."""
    try:
        return render(messages, **options)
    except LorimerError:
        return ""
