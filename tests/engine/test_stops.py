"""What ends a sequence."""

import random

import pytest

from lorimer.engine.model.base_model import load_tokenizer
from lorimer.engine.sampling.stops import Stop
from lorimer.errors import InvalidInput
from lorimer.models.debug import make_debug_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("debug")
    make_debug_model(directory)
    return load_tokenizer(directory)


def first_stop(stop, tokens):
    """How many tokens it takes to end, or ``None``."""
    watch = stop.begin()
    return next((n for n in range(1, len(tokens) + 1) if watch.ends(tokens[:n])), None)


def test_none_means_end_of_sequence_and_an_empty_list_nothing():
    assert first_stop(Stop(None, [2, 7], None), [5, 7, 2]) == 2
    assert first_stop(Stop([], [2, 7], None), [5, 7, 2]) is None


def test_ids_stop_besides_end_of_sequence():
    assert first_stop(Stop([9], [2], None), [5, 9, 2]) == 2
    assert first_stop(Stop([9], [2], None), [5, 2, 9]) == 2


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        ("lo w", "hello world", "hello w"),
        (["zzz", "o"], "hello world", "hello"),
        ("é", "un café noir", "un café"),
        ("\n\n", "a\n\nb", "a\n\n"),
        ("<|im_end|>", "hi<|im_end|>", "hi<|im_end|>"),
        ("日本", "in 日本 now", "in 日本"),
    ],
)
def test_strings_stop_wherever_token_borders_lie(tokenizer, stop, text, kept):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    length = first_stop(Stop(stop, [], tokenizer), tokens)
    decoded = tokenizer.decode(tokens[:length], skip_special_tokens=False)
    assert decoded.startswith(kept)
    assert length == len(tokens) or len(decoded) - len(kept) < len(tokenizer.decode(tokens[length - 1 : length]))


def test_a_string_that_does_not_come_does_not_stop(tokenizer):
    tokens = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    assert first_stop(Stop("lazy", [], tokenizer), tokens) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_sequence_ends_where_its_whole_text_first_holds_a_string(tokenizer, seed):
    """Texts of several times what is decoded together, with characters of many tokens and broken ones."""
    rng = random.Random(seed)
    text = "".join(rng.choice(["a", "b", " ", "é", "日", "😀", "ab "]) for _ in range(120))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for _ in range(3):
        tokens.insert(rng.randrange(len(tokens)), tokenizer.encode("日", add_special_tokens=False)[0])
    start = rng.randrange(len(text) - 9)
    stops = [text[start : start + size] for size in (9, 6, 40)] + ["zz", "日😀b"]
    decoded = (tokenizer.decode(tokens[:n], skip_special_tokens=False) for n in range(1, len(tokens) + 1))
    expected = next((n for n, seen in enumerate(decoded, 1) if any(stop in seen for stop in stops)), None)
    assert first_stop(Stop(stops, [], tokenizer), tokens) == expected


def test_long_strings_need_no_more_tokens_decoded_than_short_ones(tokenizer):
    """What a request may send: 64 of 1,003 characters. As many tokens were decoded after each that was sampled."""
    num_decoded = []

    class Counting:
        def decode(self, tokens, **options):
            num_decoded.append(len(tokens))
            return tokenizer.decode(tokens, **options)

    long = "a" * 1000
    tokens = tokenizer.encode("a", add_special_tokens=False) * 3000
    assert first_stop(Stop([f"{long}{chr(0x100 + i)}bc" for i in range(64)], [], Counting()), tokens) is None
    assert sum(num_decoded) < 30 * len(tokens)


def test_strings_without_a_tokenizer_are_refused():
    with pytest.raises(InvalidInput, match="need a tokenizer"):
        Stop("x", [], None)
