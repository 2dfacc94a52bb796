"""Parameters: what means nothing is accepted, what is not available is refused by its name."""

import pytest

from lorimer.server.openai.parameters import OFF, WITHOUT_EFFECT, BadParameter, check_parameters
from lorimer.server.openai.schemas import ChatRequest, CompletionRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def refusal(values, model=ChatRequest) -> BadParameter:
    with pytest.raises(BadParameter) as caught:
        check_parameters(values, model)
    return caught.value


@pytest.mark.parametrize("name", sorted(OFF))
def test_what_is_not_available_is_refused_unless_it_is_off(name):
    for value in OFF[name]:
        check_parameters({**CHAT, name: value}, ChatRequest)
    check_parameters({**CHAT, name: None}, ChatRequest)
    error = refusal({**CHAT, name: {"50256": -100}})
    assert error.param == name and error.code == "unsupported_parameter" and repr(name) in str(error)


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_who_asks_has_no_effect(name):
    check_parameters({**CHAT, name: "x"}, ChatRequest)
    check_parameters({**TEXT, name: {"a": "b"}}, CompletionRequest)


def test_unknown_ones_are_refused_by_name():
    error = refusal({**CHAT, "temprature": 1})
    assert error.param == "temprature" and "'temprature' is not known; accepted are" in str(error)
    assert error.status == 400


WRONG = {
    "no model": ({"messages": CHAT["messages"]}, "model"),
    "no messages": ({"model": "m", "messages": []}, "messages"),
    "role": ({**CHAT, "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "audio": (
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content",
    ),
    "detail": (
        {**CHAT, "messages": [{"role": "user", "content": [IMAGE | {"image_url": {"url": "x", "detail": "low"}}]}]},
        "messages[0].content",
    ),
    "n": ({**CHAT, "n": 129}, "n"),
    "n of another type": ({**CHAT, "n": True}, "n"),
    "temperature": ({**CHAT, "temperature": -1}, "temperature"),
    "top_p": ({**CHAT, "top_p": 0}, "top_p"),
    "max_tokens": ({**CHAT, "max_tokens": 0}, "max_tokens"),
    "top_logprobs": ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "field of a message": ({**CHAT, "messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
    "no object": ([], ""),
}


@pytest.mark.parametrize(("values", "param"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_named_with_their_place(values, param):
    assert refusal(values).param == param


def test_parts_that_are_neither_text_nor_image_are_refused_by_name():
    assert "'input_audio'; accepted are 'text' and 'image_url'" in str(refusal(WRONG["audio"][0]))
    assert "'low'" in str(refusal(WRONG["detail"][0]))


def test_images_are_parts_beside_texts():
    content = [{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}]
    (message,) = check_parameters({**CHAT, "messages": [{"role": "user", "content": content}]}, ChatRequest).messages
    assert [part.type for part in message.parts] == ["text", "image_url", "text"]
    assert message.text == "ab"


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2, 3], [[1, 2], [3]]])
def test_prompts_are_texts_or_tokens(prompt):
    assert check_parameters({**TEXT, "prompt": prompt}, CompletionRequest).prompt == prompt


def test_messages_that_an_answer_was_copied_from_are_accepted():
    answer = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    made = check_parameters({**CHAT, "messages": [*CHAT["messages"], answer]}, ChatRequest)
    assert made.messages[1].text == ""
