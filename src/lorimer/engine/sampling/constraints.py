"""Samples confined to a grammar: which tokens may come next, by llguidance.

Tokens that the grammar does not allow lose all probability before the draw, so that the log probabilities of a
confined sample are those of the distribution it was drawn from. llguidance is loaded by the first grammar; its view of
the tokenizer is made then and kept.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorimer.errors import InvalidInput, Unsupported

_SHOWN_CHARS = 500
_MAX_COMPILED = 32


class Constraint:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> "Constraint":
        return Constraint(self._matcher.deep_copy())

    def allowed(self, vocab_size: int) -> np.ndarray:
        """``bool[vocab_size]``: the tokens that may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(bool)

    def mask_(self, logits_V: Tensor) -> None:
        """Take all probability from tokens that may not come next."""
        allowed = torch.from_numpy(self.allowed(len(logits_V))).to(logits_V.device)
        logits_V.masked_fill_(~allowed, float("-inf"))

    def advance(self, token: int) -> str:
        """Take the token that was drawn; gives what is wrong if the grammar cannot be followed any further."""
        if self._matcher.consume_token(token):
            return ""
        return f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}"

    @property
    def is_complete(self) -> bool:
        """Nothing but an end of sequence can follow."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiles grammars for one model; those used last are kept, for a program asks with the same one many times."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._view: Any = None
        self._compiled: OrderedDict[str, Constraint] = OrderedDict()

    def compile(self, grammar: str) -> Constraint:
        """The beginning of a grammar; ``InvalidInput`` with the reason if there is something wrong with it."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return self._compiled[grammar].copy()

    def _compile(self, grammar: str) -> Constraint:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise Unsupported(
                "grammars and JSON schemas need the package llguidance: pip install llguidance"
            ) from error
        matcher = LLMatcher(self._tokenizer_view(), LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise InvalidInput(f"the grammar is refused: {_first_line(matcher.get_error())}")
        return Constraint(matcher)

    def _tokenizer_view(self) -> Any:
        if self._view is None:
            from llguidance import LLTokenizer

            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None or not self._eos:
                missing = "no fast tokenizer" if backend is None else "no end-of-sequence token"
                raise Unsupported(f"samples cannot be confined to a grammar: the model has {missing}")
            self._view = LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=self._eos)
        return self._view


def _first_line(error: str) -> str:
    """The reason without the dump of the parser's state that follows it."""
    return error.partition("\n")[0].partition("<state>")[0].strip()[:_SHOWN_CHARS]
