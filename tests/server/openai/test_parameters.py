"""Parameters: what means nothing is accepted, what is not available is refused by its name."""

import pytest

from lorimer.server.openai.parameters import OFF, WITHOUT_EFFECT, BadParameter, check_parameters
from lorimer.server.openai.schemas import ChatRequest, CompletionRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


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
    "image": (
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
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


def test_an_image_is_refused_by_its_name():
    assert "'image_url'" in str(refusal(WRONG["image"][0]))


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2, 3], [[1, 2], [3]]])
def test_prompts_are_texts_or_tokens(prompt):
    assert check_parameters({**TEXT, "prompt": prompt}, CompletionRequest).prompt == prompt


def test_messages_that_an_answer_was_copied_from_are_accepted():
    answer = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    made = check_parameters({**CHAT, "messages": [*CHAT["messages"], answer]}, ChatRequest)
    assert made.messages[1].text == ""
