"""What ends a sequence."""

import pytest

from lorimer.engine.debug import make_debug_model
from lorimer.engine.model import load_tokenizer
from lorimer.engine.stops import Stop
from lorimer.errors import InvalidInput


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("debug")
    make_debug_model(directory)
    return load_tokenizer(directory)


def first_stop(stop, tokens):
    """How many tokens it takes to end, or ``None``."""
    return next((n for n in range(1, len(tokens) + 1) if stop.ends(tokens[:n])), None)


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


def test_strings_without_a_tokenizer_are_refused():
    with pytest.raises(InvalidInput, match="need a tokenizer"):
        Stop("x", [], None)
