"""Tokens to text while they come: never half a character, never a piece of a stop string.

A token is taken for its bytes, which a decoder of UTF-8 turns into text as soon as they make characters. Tokenizers
that are not made of bytes decode a token beside the ones before it, on which its spaces depend.
"""

import codecs
import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from lorimer.types.stops import StopMatcher

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT = 4
"""Tokens beside which the next one is decoded."""


class TokenBytes:
    """The tokens of one tokenizer as bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._is_byte_level = '"ByteLevel"' in _decoder_state(tokenizer)

    def of(self, token: int, before: Sequence[int] = ()) -> bytes:
        """What ``token`` adds after the tokens ``before`` it; a number that is no token adds nothing."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes([_ALPHABET[char] for char in text])
            except KeyError:  # an added token, which is written as it is
                return str(text).encode()
        if found := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(found[1], 16)])
        context = [one for one in before[-_CONTEXT:] if not self._is_byte(one)]
        start = len(self._decode(context))
        return self._decode([*context, token])[start:].encode()

    def _is_byte(self, token: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


class Detokenizer:
    """The text of one sequence. Special tokens are silent unless they are among ``shown``; ``before`` is its prompt."""

    def __init__(self, tokens: TokenBytes, before: Sequence[int], shown: Iterable[int], silent: Iterable[int]) -> None:
        self._tokens = tokens
        self._silent = (tokens.special | set(silent)) - set(shown)
        self._before = [token for token in before[-_CONTEXT:] if token not in self._silent]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The characters that this token completes."""
        if token in self._silent:
            return ""
        data = self._tokens.of(token, self._before)
        self._before = [*self._before, token][-_CONTEXT:]
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: a character that was begun and will not be completed shows as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopText:
    """Passes text on up to the stop string that is complete first; what may begin one is held until that is known."""

    def __init__(self, matcher: StopMatcher) -> None:
        self._matcher, self._state = matcher, matcher.start
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def is_stopped(self) -> bool:
        return self.found is not None

    def add(self, text: str) -> str:
        if self.is_stopped:
            return ""
        end, self._held = len(self._held), self._held + text
        for char in text:
            end += 1
            self._state = self._matcher.step(self._state, char)
            self.found = self._state.found
            if self.found is not None:
                passed, self._held = self._held[: end - len(self.found)], ""
                return passed
        size = len(self._held) - self._state.depth
        passed, self._held = self._held[:size], self._held[size:]
        return passed

    def finish(self) -> str:
        passed, self._held = self._held, ""
        return passed


def _decoder_state(tokenizer: Tokenizer) -> str:
    return "" if tokenizer.decoder is None else tokenizer.decoder.__getstate__().decode()


def _byte_alphabet() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones of Latin-1 as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
