"""Examples: shifted by one, weighted by example or by token, cut to length."""

import numpy as np
import pytest

from lorimer import ModelInput
from lorimer.chat.conversation import TrainOn
from lorimer.cookbook.datums import (
    conversation_to_datum,
    conversation_to_datums,
    datum_from_tokens,
    mean_nll,
    num_tokens,
)
from lorimer.cookbook.renderers import TemplateRenderer
from lorimer.errors import InvalidInput, TooLarge
from tests.cookbook.chat_templates import QWEN3, tokenizer_with

CHAT = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 4 + 4?"},
    {"role": "assistant", "content": "8"},
]


def parts(datum):
    inputs = datum.loss_fn_inputs
    return datum.model_input.to_ints(), inputs["target_tokens"].tolist(), inputs["weights"].tolist()


def test_tokens_are_predicted_from_those_before():
    datum = datum_from_tokens(ModelInput.from_ints([5, 6, 7, 8]), [1, 0, 1, 1], reduction="sum")
    assert parts(datum) == ([5, 6, 7], [6, 7, 8], [0, 1, 1])
    assert parts(datum_from_tokens([5, 6, 7, 8], [1, 0, 1, 1])) == ([5, 6, 7], [6, 7, 8], [0, 0.5, 0.5])
    assert num_tokens([datum, datum]) == 6


def test_weights_must_fit_and_weigh():
    with pytest.raises(InvalidInput, match="2 weights for 3 tokens"):
        datum_from_tokens([1, 2, 3], [1, 1])
    with pytest.raises(InvalidInput, match="nothing to train on"):
        datum_from_tokens([1, 2, 3], [1, 0, 0])


def test_conversation_is_cut_to_length():
    renderer = TemplateRenderer(tokenizer_with())
    whole = conversation_to_datum(CHAT, renderer, train_on=TrainOn.ALL_ASSISTANT_MESSAGES)
    assert renderer.tokenizer.decode(parts(whole)[1]).endswith("assistant\n8<|im_end|>"), "no line break after it"
    length = renderer.build_supervised_example(CHAT)[0].length
    cut = conversation_to_datum(CHAT, renderer, length - 2, TrainOn.ALL_ASSISTANT_MESSAGES)
    assert parts(cut)[1] == parts(whole)[1][:-1]
    assert sum(parts(cut)[2]) == pytest.approx(1)
    with pytest.raises(TooLarge, match=f"the first 5 of {length} tokens"):
        conversation_to_datum(CHAT, renderer, 5)
    assert conversation_to_datums(CHAT, renderer, 5) == []


def test_conversation_becomes_several_examples_where_the_template_asks_for_it():
    renderer = TemplateRenderer(tokenizer_with(QWEN3))
    assert len(conversation_to_datums(CHAT, renderer, train_on=TrainOn.ALL_ASSISTANT_MESSAGES)) == 2


def test_mean_is_weighted():
    data = [datum_from_tokens([1, 2, 3], [0, 1, 1], "sum"), datum_from_tokens([1, 2], [0, 1], "sum")]
    assert mean_nll(data, [np.array([-1.0, -2.0]), np.array([-6.0])]) == pytest.approx(3)
