"""Stop conditions of sampled sequences: end-of-sequence tokens, given tokens, or strings across token borders.

Besides grammars (``constraints.py``), this is the engine's only use of a tokenizer.
"""

from collections.abc import Sequence
from typing import Any

from lorimer.errors import InvalidInput
from lorimer.types.stops import StopMatcher

_CONTEXT = 4
"""Number of preceding tokens decoded with the next ones, so that spaces come out right."""
_TOGETHER = 16
"""Decode this many tokens again and again before moving on, and more while a character is incomplete."""


class Stop:
    """The stop condition of the sequences of one request.

    ``None`` means the model's end-of-sequence tokens; an empty list nothing at all; strings or token ids those, besides
    end of sequence. The token that completes a stop is part of the sample.
    """

    def __init__(self, stop: str | Sequence[str | int] | None, eos_token_ids: Sequence[int], tokenizer: Any) -> None:
        wanted = [stop] if isinstance(stop, str) else list(stop or [])
        self.strings = [s for s in wanted if isinstance(s, str)]
        self.ids = {i for i in wanted if isinstance(i, int)}
        if stop is None or wanted:
            self.ids.update(eos_token_ids)
        if self.strings and tokenizer is None:
            raise InvalidInput(
                f"stop strings {self.strings!r} need a tokenizer, and this model has none; use token ids"
            )
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(self.strings)

    def begin(self) -> "StopWatch":
        """For the sequences of a request, one each."""
        return StopWatch(self.ids, self._matcher if self.strings else None, self._tokenizer)


class StopWatch:
    """Decides after each token whether one sequence has ended."""

    def __init__(self, ids: set[int], matcher: StopMatcher | None, tokenizer: Any) -> None:
        self._ids, self._matcher, self._tokenizer = ids, matcher, tokenizer
        self._num_seen = self._first = self._num_before = 0
        """Tokens whose text ``_state`` has seen; where decoding begins, and how much text comes before the new one."""
        self._state = matcher.start if matcher is not None else None

    def ends(self, tokens: list[int]) -> bool:
        """Return whether the last of ``tokens`` completes a stop."""
        if tokens[-1] in self._ids:
            return True
        if self._matcher is None or self._state is None:
            return False
        text, state = self._decode(tokens[self._first :]), self._state
        for char in text[self._num_before :]:
            state = self._matcher.step(state, char)
            if state.found is not None:
                return True
        num_new = len(tokens) - self._num_seen
        if num_new >= _TOGETHER and (not text.endswith("\ufffd") or num_new >= 2 * _TOGETHER):
            self._num_seen, self._state = len(tokens), state
            self._first = max(0, self._num_seen - _CONTEXT)
            self._num_before = len(self._decode(tokens[self._first :]))
        return False

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
