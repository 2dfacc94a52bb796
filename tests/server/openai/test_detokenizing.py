"""Tokens to text in pieces: the same text as in one piece, no half characters, no piece of a stop string."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from lorimer.models.debug import byte_level_tokenizer
from lorimer.server.openai.detokenizing import Detokenizer, StopText, TokenBytes
from lorimer.types.stops import StopMatcher

BYTE_LEVEL = byte_level_tokenizer()


def sentencepiece() -> Tokenizer:
    """Words with a mark for their space, and bytes for what is no word, as Llama 2 has it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "▁", "a", "!"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


SENTENCEPIECE = sentencepiece()


def pieces(tokenizer, tokens, before=(), shown=(), silent=()):
    detokenizer = Detokenizer(TokenBytes(tokenizer), before, shown, silent)
    return [*map(detokenizer.add, tokens), detokenizer.finish()]


@given(st.text(max_size=30))
def test_byte_level_pieces_make_the_text(text):
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    found = pieces(BYTE_LEVEL, tokens)
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found) or "\ufffd" in text


def test_a_character_of_four_tokens_comes_at_once():
    tokens = BYTE_LEVEL.encode("x😀y", add_special_tokens=False).ids
    assert [piece for piece in pieces(BYTE_LEVEL, tokens) if piece] == ["x", "😀", "y"]


def test_bytes_that_are_no_text_show_as_such_and_hold_nothing_up():
    alphabet = {char: index for char, index in BYTE_LEVEL.get_vocab().items() if len(char) == 1}
    lone = BYTE_LEVEL.encode("é", add_special_tokens=False).ids[0]
    assert pieces(BYTE_LEVEL, [lone, alphabet["a"], lone]) == ["", "\ufffda", "", "\ufffd"]


def test_special_tokens_are_silent_unless_shown():
    end = BYTE_LEVEL.token_to_id("<|im_end|>")
    a = BYTE_LEVEL.token_to_id("a")
    assert "".join(pieces(BYTE_LEVEL, [a, end, a])) == "aa"
    assert "".join(pieces(BYTE_LEVEL, [a, end, a], shown=[end])) == "a<|im_end|>a"
    assert "".join(pieces(BYTE_LEVEL, [a, a], silent=[a])) == ""


def test_sentencepiece_spaces_depend_on_what_comes_before():
    hello, world, bang = (SENTENCEPIECE.get_vocab()[text] for text in ("▁Hello", "▁world", "!"))
    assert pieces(SENTENCEPIECE, [hello, world, bang]) == ["Hello", " world", "!", ""]
    assert "".join(pieces(SENTENCEPIECE, [world], before=[hello])) == " world"
    assert SENTENCEPIECE.decode([hello, world, bang]) == "Hello world!"


def test_sentencepiece_bytes_make_characters():
    euro = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    world = SENTENCEPIECE.token_to_id("▁world")
    assert pieces(SENTENCEPIECE, [world, *euro, world]) == ["world", "", "", "€", " world", ""]


@given(st.text("ab\n", max_size=25), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_are_found_wherever_the_text_is_cut(text, stops, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    found = StopText(StopMatcher(stops))
    passed = ""
    for start, end in zip([0, *places], [*places, len(text)], strict=True):
        passed += found.add(text[start:end])
        assert not any(stop in passed for stop in stops)
    passed += found.finish()
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert passed == (text[: min(ends)[1]] if ends else text)
    assert found.is_stopped == bool(ends)


def test_the_stop_string_that_is_complete_first_ends_the_text():
    for pieces in (["aba"], ["ab", "a"], ["a", "b", "a"]):
        found = StopText(StopMatcher(["aba", "b"]))
        assert "".join(map(found.add, pieces)) == "a"
        assert found.found == "b"


def test_long_stop_strings_that_almost_match_cost_little():
    """What a request may send: 64 of 1,003 characters. Looking for each at every token took 8.7 s."""
    long = "a" * 1000
    found = StopText(StopMatcher([f"{long}{chr(0x100 + i)}bc" for i in range(64)]))
    start = time.process_time()
    passed = "".join(found.add("aa") for _ in range(1500))
    assert passed + found.finish() == "aa" * 1500
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("kind", ["ByteLevel", "Sequence"])
def test_the_kind_of_tokenizer_is_read_off_its_decoder(kind):
    tokenizer = Tokenizer.from_str(BYTE_LEVEL.to_str())
    if kind == "Sequence":
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert kind in json.loads(tokenizer.to_str())["decoder"]["type"]
    tokens = tokenizer.encode("x😀", add_special_tokens=False).ids
    assert TokenBytes(tokenizer).of(tokens[1]) == "😀".encode()[:1]
