"""Parse a streamed answer into parts: reasoning, content and tool calls.

Text that may begin a marker is buffered until that is known; a call is emitted when it is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lorimer.chat.tools import Call, Tools, ToolSyntax

THINK, END_THINK = "<think>", "</think>"
BARE_BEGINNINGS = ("{", "<|python_tag|>")
"""Beginnings of a call that is the whole answer."""


@dataclass(frozen=True)
class Part:
    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


@dataclass(frozen=True)
class AnswerFormat:
    """Which parts to expect. ``thinks_first``: the prompt has opened the reasoning already."""

    has_thoughts: bool = False
    thinks_first: bool = False
    syntax: ToolSyntax | None = None
    tools: Tools | None = None
    max_calls: int | None = None

    @property
    def markers(self) -> list[str]:
        thoughts = [THINK, END_THINK] if self.has_thoughts else []
        return thoughts + (self.syntax.markers if self.syntax else [])


class AnswerParser:
    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._state: Literal["start", "text", "thought", "call"] = "thought" if form.thinks_first else "start"
        self._held = ""
        self._is_space_dropped = form.thinks_first
        self.num_calls = 0

    @property
    def is_thinking(self) -> bool:
        return self._state == "thought"

    def add(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end of the answer; a call without its closing marker may be complete."""
        parts = self.add("")
        held, self._held = self._held, ""
        if self._state == "call":
            self._take_calls(held, parts, close="")
        elif held:
            self._take(held, parts)
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Advance to the next marker; return false if more text is needed."""
        if self._state == "start":
            return self._begin()
        if self._state == "thought":
            return self._until(END_THINK, "text", parts)
        syntax = self._form.syntax
        if self._state == "text":
            return self._until(syntax.open if syntax else "", "call", parts)
        if syntax is None or not syntax.close or syntax.close not in self._held:
            return False
        text, _, self._held = self._held.partition(syntax.close)
        self._take_calls(text, parts, syntax.close)
        self._state = "text"
        return True

    def _begin(self) -> bool:
        """Decide by the first characters what the answer begins with."""
        begun = self._held.lstrip()
        beginnings = [THINK] if self._form.has_thoughts else []
        is_bare = self._form.syntax is not None and not self._form.syntax.open
        beginnings += BARE_BEGINNINGS if is_bare else ()
        if any(beginning.startswith(begun) and beginning != begun for beginning in beginnings):
            return False
        if self._form.has_thoughts and begun.startswith(THINK):
            self._state, self._held = "thought", begun.removeprefix(THINK)
            self._is_space_dropped = True
        else:
            self._state = "call" if is_bare and begun.startswith(BARE_BEGINNINGS) else "text"
        return True

    def _until(self, marker: str, then: Literal["text", "call"], parts: list[Part]) -> bool:
        """Emit text up to the marker."""
        if marker and marker in self._held:
            text, _, self._held = self._held.partition(marker)
            self._take(text, parts)
            self._state, self._is_space_dropped = then, True
            return True
        size = len(self._held) - _num_begun(self._held, marker)
        self._take(self._held[:size], parts)
        self._held = self._held[size:]
        return False

    def _take(self, text: str, parts: list[Part]) -> None:
        if self._is_space_dropped:  # after a marker
            text = text.lstrip()
        if text:
            self._is_space_dropped = False
            parts.append(Part("reasoning" if self._state == "thought" else "content", text))

    def _take_calls(self, text: str, parts: list[Part], close: str) -> None:
        syntax, tools = self._form.syntax, self._form.tools
        assert syntax is not None and tools is not None
        try:
            calls = syntax.parse(text, tools)
        except (ValueError, RecursionError):
            self._is_space_dropped = False
            parts.append(Part("content", syntax.open + text + close))
            return
        room = len(calls) if self._form.max_calls is None else self._form.max_calls - self.num_calls
        parts += [Part("call", call=call) for call in calls[: max(0, room)]]
        self.num_calls += len(calls[: max(0, room)])


def _num_begun(text: str, marker: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``marker``."""
    return max((size for size in range(1, len(marker)) if text.endswith(marker[:size])), default=0)


def merged(parts: Sequence[Part]) -> list[Part]:
    """Merge consecutive parts of one kind."""
    found: list[Part] = []
    for part in parts:
        if found and part.call is None and found[-1].kind == part.kind:
            found[-1] = Part(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return found


def joined(parts: Sequence[Part], kind: Literal["content", "reasoning"]) -> str:
    return "".join(part.text for part in parts if part.kind == kind)
