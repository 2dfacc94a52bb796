"""When a sampled sequence ends: at end-of-sequence tokens, at given tokens, or at strings wherever token borders lie.

This is the engine's only use of a tokenizer.
"""

from collections.abc import Sequence
from typing import Any

from lorimer.errors import InvalidInput


class Stop:
    """What ends the sequences of one request.

    ``None`` means the model's end-of-sequence tokens; an empty list nothing at all; strings or token ids those, besides
    end of sequence. The token that completes a stop is part of the sample.
    """

    def __init__(self, stop: str | Sequence[str | int] | None, eos_token_ids: Sequence[int], tokenizer: Any) -> None:
        wanted = [stop] if isinstance(stop, str) else list(stop or [])
        self._strings = [s for s in wanted if isinstance(s, str)]
        self._ids = {i for i in wanted if isinstance(i, int)}
        if stop is None or wanted:
            self._ids.update(eos_token_ids)
        if self._strings and tokenizer is None:
            raise InvalidInput(
                f"stop strings {self._strings!r} need a tokenizer, and this model has none; use token ids"
            )
        self._tokenizer = tokenizer
        # Every token adds at least a byte; some more, so that the first ones decode in context.
        self._window = max((len(s.encode()) for s in self._strings), default=0) + 4

    def ends(self, tokens: list[int]) -> bool:
        """Whether the last of ``tokens`` completes a stop."""
        if tokens[-1] in self._ids:
            return True
        if not self._strings:
            return False
        text = self._tokenizer.decode(tokens[-self._window :], skip_special_tokens=False)
        return any(string in text for string in self._strings)
