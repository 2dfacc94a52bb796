"""Turns from tokens: the text is the tokenizer's, and every token is found in it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorimer.cookbook.transcripts import finite, label, logs, prompt_turn, prompt_turns, sampled_turn, text_with_offsets
from lorimer.types import EncodedTextChunk, ImageChunk, ModelInput
from tests.cookbook.chat_templates import QWEN3, tokenizer_with
from tests.cookbook.rl.episodes import tiny_renderer

TOKENIZER = tiny_renderer().tokenizer
TEMPLATED = tokenizer_with(QWEN3)


class WordTokenizer:
    """As those of sentencepiece: the first word of a text loses its space."""

    words = ("▁the", "▁cat", "s", "▁sat", "!")

    def decode(self, tokens):
        return "".join(self.words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    def batch_decode(self, sequences):
        return [self.decode(tokens) for tokens in sequences]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, TEMPLATED], ids=["tiny", "qwen"])
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=20), cut=st.integers(0, 3))
def test_offsets_cut_the_text_into_what_each_token_adds(tokenizer, text, cut):
    tokens = tokenizer.encode(text)
    tokens = tokens[: max(len(tokens) - cut, 0)]  # may end within a character
    found, offsets = text_with_offsets(tokenizer, tokens)
    assert found == (tokenizer.decode(tokens) if tokens else "")
    assert offsets is not None and len(offsets) == len(tokens) and offsets == sorted(offsets)
    for place, begin in enumerate(offsets):
        known = tokenizer.decode(tokens[:place])
        assert found[:begin] == known.removesuffix("\N{REPLACEMENT CHARACTER}") or not found.startswith(known)


def test_spaces_that_depend_on_the_token_before():
    assert text_with_offsets(WordTokenizer(), [0, 1, 2, 3, 4]) == ("the cats sat!", [0, 3, 7, 8, 12])


def test_turns():
    tokens = TOKENIZER.encode("hello there")
    turn = sampled_turn(TOKENIZER, tokens, [-1.0] * (len(tokens) - 1) + [float("-inf")], reward=1.0)
    assert (turn.role, turn.content, turn.reward, turn.logprobs[-1]) == ("assistant", "hello there", 1.0, None)
    picture = ImageChunk(data=b"x", format="png", expected_tokens=3)
    prompt = ModelInput(chunks=[EncodedTextChunk(tokens=tokens), picture])
    assert prompt_turn(TOKENIZER, prompt).content == "hello there[image]"
    assert prompt_turn(TOKENIZER, ModelInput.from_ints(tokens), "environment").tokens == tokens


def test_messages_of_a_template_are_turns():
    """By special tokens alone: a text that looks like one stays in its message."""
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_ start|>x"}]
    prompt = TEMPLATED.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    tokens = TEMPLATED.encode(prompt, add_special_tokens=False)
    turns = prompt_turns(TEMPLATED, ModelInput.from_ints(tokens))
    assert [(one.role, one.content) for one in turns] == [(one["role"], one["content"]) for one in asked]
    assert [token for one in turns for token in one.tokens] == tokens
    rest = TEMPLATED.encode("and more<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")
    turns = prompt_turns(TEMPLATED, ModelInput.from_ints(rest), "environment")
    assert [(one.role, one.content) for one in turns] == [("environment", "and more"), ("tool", "4")]
    plain = prompt_turns(TEMPLATED, ModelInput.from_ints(TEMPLATED.encode("no message")))
    assert [(one.role, one.content) for one in plain] == [("prompt", "no message")]


def test_values_are_made_acceptable():
    assert [finite(value) for value in (1, float("nan"), float("inf"), None)] == [1.0, None, None, None]
    assert label("a\nb" + "c" * 200) == "a_b" + "c" * 97 and label("") == "_"
    assert logs({"a": 1, "b": float("nan"), "c": "x" * 20_000}) == {"a": 1.0, "b": "nan", "c": "x" * 10_000}
