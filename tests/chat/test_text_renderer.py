"""Conversations as plain text."""

import pytest

from lorimer.chat.conversation import Termination, TrainOn
from lorimer.cookbook.renderers import TextRenderer
from lorimer.errors import InvalidInput, Unsupported
from tests.cookbook.chat_templates import tokenizer_with

CHAT = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 4 + 4?"},
    {"role": "assistant", "content": "It is 8."},
]


@pytest.fixture
def renderer():
    return TextRenderer(tokenizer_with(eos="<|endoftext|>"))


def trained_text(renderer, example):
    tokens, weights = example
    return renderer.tokenizer.decode([t for t, w in zip(tokens.to_ints(), weights, strict=True) if w])


def test_prompt(renderer):
    prompt = renderer.build_generation_prompt(CHAT[:3], prefill="It")
    text = "User: What is 2 + 3?\n\nAssistant: 5\n\nUser: And 4 + 4?\n\nAssistant: It"
    assert renderer.tokenizer.decode(prompt.to_ints()) == text
    assert renderer.get_stop_sequences() == ["\n\nUser:"]


def test_answers_are_trained_to_where_they_stop(renderer):
    last = renderer.build_supervised_example(CHAT)
    assert trained_text(renderer, last) == " It is 8.\n\nUser:"
    prompt = renderer.build_generation_prompt(CHAT[:3]).to_ints()
    assert last[0].to_ints()[: len(prompt)] == prompt
    assert not last[1][: len(prompt)].any()
    both = renderer.build_supervised_example(CHAT, TrainOn.ALL_ASSISTANT_MESSAGES)
    assert trained_text(renderer, both) == " 5\n\nUser: It is 8.\n\nUser:"
    assert renderer.build_supervised_example(CHAT, TrainOn.ALL_TOKENS)[1].all()


def test_first_token_of_a_text():
    tokenizer = tokenizer_with("{{ messages }}")
    tokenizer.bos_token = "<|endoftext|>"
    assert TextRenderer(tokenizer).build_generation_prompt(CHAT[:1]).to_ints()[0] == tokenizer.bos_token_id


ENDINGS = {
    " 5\n\nUser:": Termination.STOP_SEQUENCE,
    " 5<|endoftext|>": Termination.EOS,
    " 5": Termination.MALFORMED,
    " 5\n\nUser: And": Termination.MALFORMED,
}


@pytest.mark.parametrize(("text", "termination"), ENDINGS.items())
def test_responses(renderer, text, termination):
    assert renderer.parse_response(renderer.tokenizer.encode(text)) == (
        {"role": "assistant", "content": "5"},
        termination,
    )


def test_what_plain_text_cannot_express(renderer):
    with pytest.raises(Unsupported, match="tools"):
        renderer.build_generation_prompt(CHAT[:1], tools=[{"type": "function"}])
    with pytest.raises(Unsupported, match="thinking"):
        renderer.build_supervised_example([CHAT[0], CHAT[1] | {"thinking": "hm"}])
    with pytest.raises(InvalidInput, match="no message is trained on"):
        renderer.build_supervised_example(CHAT[:1])
