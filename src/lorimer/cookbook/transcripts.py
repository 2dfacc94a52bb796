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
TEMPLATES = (
    ("<|im_start|>", "\n", "<|im_end|>"),
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ("<start_of_turn>", "\n", "<end_of_turn>"),
)
"""What stands before a role, after it, and after its message: ChatML, Llama 3, Gemma."""


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


def prompt_turns(tokenizer: Any, prompt: ModelInput, role: str = "prompt") -> list[RolloutTurn]:
    """Return the messages of a prompt in the form of a known chat template, each as a turn; else all of it as one.

    Messages begin and end at special tokens, never at a text that looks like one. The tokens of the turns are those of
    the prompt, the marks of the template included.
    """
    if not all(isinstance(chunk, EncodedTextChunk) for chunk in prompt.chunks):
        return [prompt_turn(tokenizer, prompt, role)]
    tokens = prompt.to_ints()
    begins = [_special_token(tokenizer, form[0]) for form in TEMPLATES]
    used = next((form for form, begin in zip(TEMPLATES, begins, strict=True) if begin in tokens), None)
    if used is None:
        return [prompt_turn(tokenizer, prompt, role)]
    begin, head_end, end = used
    places = [at for at, token in enumerate(tokens) if token == _special_token(tokenizer, begin)]
    before = tokens[: places[0]]
    rest = str(tokenizer.decode(before, skip_special_tokens=True)).strip()
    turns = [RolloutTurn(role=role, content=rest, tokens=before)] if rest else []
    places = places if rest else [0, *places[1:]]
    for start, stop in zip(places, [*places[1:], len(tokens)], strict=True):
        part = tokens[start:stop]
        said, _, content = str(tokenizer.decode(part)).partition(begin)[2].partition(head_end)
        if not content and turns:  # the beginning of the answer
            turns[-1] = turns[-1].model_copy(update={"tokens": [*(turns[-1].tokens or ()), *part]})
        else:
            turns.append(RolloutTurn(role=label(said.strip()), content=content.partition(end)[0].strip(), tokens=part))
    return turns


def _special_token(tokenizer: Any, text: str) -> int | None:
    found = tokenizer.convert_tokens_to_ids(text)
    return found if isinstance(found, int) and found != tokenizer.unk_token_id else None


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
