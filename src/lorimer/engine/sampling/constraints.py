"""Constrained sampling: llguidance says which tokens a grammar allows next.

Tokens that the grammar does not allow lose all probability before the draw, so that the log probabilities of a
constrained sample are those of the distribution it was drawn from. The first grammar loads llguidance and builds its
view of the tokenizer, which is kept.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lorimer.engine.model.device import upload
from lorimer.errors import InvalidInput, Unsupported

_SHOWN_CHARS = 500
_MAX_COMPILED = 32


class Constraint:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> "Constraint":
        return Constraint(self._matcher.deep_copy())

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return ``bool[vocab_size]``: the tokens that are allowed next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(bool)

    def advance(self, token: int) -> str:
        """Advance by the token that was drawn; return the reason if the grammar cannot be followed any further."""
        if self._matcher.consume_token(token):
            return ""
        return f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}"

    @property
    def is_complete(self) -> bool:
        """Whether only an end of sequence can follow."""
        return bool(self._matcher.is_stopped())


def mask_(logits_NV: Tensor, allowed: Mapping[int, NDArray[np.bool_]]) -> None:
    """Mask the logits of tokens that are not allowed next; ``allowed`` has the constrained rows."""
    if allowed:
        rows, masks = upload([np.array(list(allowed)), ~np.stack(list(allowed.values()))], logits_NV.device)
        logits_NV[rows] = logits_NV[rows].masked_fill_(masks, float("-inf"))


class Grammars:
    """Compiles grammars for one model and caches the most recently used: a program reuses the same grammar."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._view: Any = None
        self._compiled: OrderedDict[str, Constraint] = OrderedDict()

    def compile(self, grammar: str) -> Constraint:
        """Return the initial state of a grammar; raise ``InvalidInput`` with the reason if it does not compile."""
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
    """Return the reason without the dump of the parser's state that follows it."""
    return error.partition("\n")[0].partition("<state>")[0].strip()[:_SHOWN_CHARS]
