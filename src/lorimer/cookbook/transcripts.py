"""Turns of rollouts from tokens: the text of prompts and answers, and where each token begins in it.

What a trajectory of RL is as a rollout is in ``rl/transcripts.py``; ``rollout_log.py`` sends rollouts.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from lorimer.chat.conversation import Message, text_of
from lorimer.types import EncodedTextChunk, ModelInput, RolloutTurn
from lorimer.types.rollouts import MAX_PARTS

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
IMAGE = "[image]"
MAX_LOG_CHARS = 10_000
MAX_LABEL_CHARS = 100


def sampled_turn(
    tokenizer: Any,
    tokens: Sequence[int],
    logprobs: Sequence[float] | None,
    *,
    advantages: Sequence[float] | None = None,
    **fields: Any,
) -> RolloutTurn:
    """Return what a policy sampled, as the turn of an assistant."""
    content, offsets = text_with_offsets(tokenizer, tokens)
    return RolloutTurn(
        role="assistant",
        content=content,
        tokens=list(tokens),
        logprobs=None if logprobs is None else [finite(value) for value in logprobs],
        advantages=None if advantages is None else [finite(value) for value in advantages],
        offsets=offsets,
        **fields,
    )


def prompt_turn(tokenizer: Any, prompt: ModelInput, role: str = "prompt") -> RolloutTurn:
    """Return what a policy reads; images are named in their places."""
    texts = [
        str(tokenizer.decode(list(chunk.tokens))) if isinstance(chunk, EncodedTextChunk) else IMAGE
        for chunk in prompt.chunks
    ]
    is_text = all(isinstance(chunk, EncodedTextChunk) for chunk in prompt.chunks)
    return RolloutTurn(role=role, content="".join(texts), tokens=prompt.to_ints() if is_text else None)


def message_turn(message: Message) -> RolloutTurn:
    return RolloutTurn(role=label(str(message["role"])), content=text_of(message))


def text_with_offsets(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[int] | None]:
    """Return the text of tokens and where each begins in it; none if the tokenizer does not let that be known."""
    if not tokens:
        return "", []
    text = str(tokenizer.decode(list(tokens)))
    pieces = [str(piece) for piece in tokenizer.batch_decode([[token] for token in tokens])]
    if "".join(pieces) != text:  # characters of several tokens, or spaces that depend on the token before
        pieces = _pieces(tokenizer, tokens)
    if "".join(pieces) != text:
        return text, None
    return text, [0, *accumulate(map(len, pieces[:-1]))]


def _pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Decode each token beside those before it; one that ends within a character has an empty piece."""
    pieces: list[str] = []
    before, begin = 0, 0  # text up to ``begin`` is known, and decoded again from ``before`` on
    for end in range(1, len(tokens) + 1):
        known = str(tokenizer.decode(list(tokens[before:begin])))
        text = str(tokenizer.decode(list(tokens[before:end])))
        if text.endswith(REPLACEMENT) and end < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(known) :])
        before, begin = begin, end
    return pieces


def finite(value: float | None) -> float | None:
    """Return the number, or none if it is not one: JSON has no others."""
    return float(value) if value is not None and math.isfinite(value) else None


def label(text: str) -> str:
    """Return a name as servers accept it."""
    kept = "".join(char if char.isprintable() else "_" for char in text)
    return kept[:MAX_LABEL_CHARS] or "_"


def numbers(values: Mapping[str, float | int]) -> dict[str, float]:
    """Return the numbers that are finite."""
    found = {name: finite(value) for name, value in list(values.items())[:MAX_PARTS]}
    return {name: value for name, value in found.items() if value is not None}


def logs(values: Mapping[str, str | int | float]) -> dict[str, str | float]:
    """Return logs as they are sent: long texts are cut, and numbers that are not finite become text."""
    found: dict[str, str | float] = {}
    for name, value in list(values.items())[:MAX_PARTS]:
        number = None if isinstance(value, str) else finite(value)
        found[name] = str(value)[:MAX_LOG_CHARS] if number is None else number
    return found
