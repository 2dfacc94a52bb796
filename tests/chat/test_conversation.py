"""Conversations: what they say, and which of their messages are trained on."""

from typing import Any

import pytest

from lorimer.chat.conversation import (
    Termination,
    TrainOn,
    call_arguments,
    check_messages,
    make_tool_call,
    text_of,
    thinking_of,
    trained_indices,
)
from lorimer.errors import InvalidInput, Unsupported

CHAT: list[Any] = [
    {"role": role, "content": role} for role in "system user assistant user assistant tool assistant".split()
]

TRAINED = {
    TrainOn.LAST_ASSISTANT_MESSAGE: [6],
    TrainOn.LAST_ASSISTANT_TURN: [4, 6],
    TrainOn.ALL_ASSISTANT_MESSAGES: [2, 4, 6],
    TrainOn.ALL_MESSAGES: list(range(7)),
    TrainOn.ALL_TOKENS: list(range(7)),
    TrainOn.ALL_USER_AND_SYSTEM_MESSAGES: [0, 1, 3],
}


@pytest.mark.parametrize(("train_on", "expected"), TRAINED.items())
def test_trained_messages(train_on, expected):
    assert trained_indices(CHAT, train_on) == expected


def test_chosen_messages_need_the_choice():
    chosen = [message | {"trainable": message["role"] == "tool"} for message in CHAT]
    assert trained_indices(chosen, TrainOn.CUSTOMIZED) == [5]
    with pytest.raises(InvalidInput, match="message 1 has no field 'trainable'"):
        trained_indices([chosen[0], *CHAT[1:]], TrainOn.CUSTOMIZED)


def test_content_in_parts():
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "assistant", "content": parts}
    assert (text_of(message), thinking_of(message)) == ("ab", "hm")
    assert thinking_of({"role": "assistant", "content": "a", "thinking": "so"}) == "so"
    nothing: Any = {"role": "assistant", "content": None}
    assert text_of(nothing) == ""
    audio: Any = {"role": "user", "content": [{"type": "audio"}]}
    with pytest.raises(Unsupported, match="a part of type 'audio'"):
        text_of(audio)


def test_arguments_of_a_call():
    call = make_tool_call("f", {"a": 1}, "id1")
    assert call == {"type": "function", "id": "id1", "function": {"name": "f", "arguments": {"a": 1}}}
    assert call_arguments(call) == {"a": 1}
    assert call_arguments({"type": "function", "function": {"name": "f", "arguments": '{"a": 2}'}}) == {"a": 2}
    for wrong, reason in {"{": "no JSON", "[1]": "a JSON object is accepted"}.items():
        with pytest.raises(InvalidInput, match=reason):
            call_arguments({"type": "function", "function": {"name": "f", "arguments": wrong}})


@pytest.mark.parametrize("wrong", [[], ["hello"], [{"content": "hello"}], [{"role": 1, "content": ""}]])
def test_what_is_no_conversation(wrong):
    with pytest.raises(InvalidInput):
        check_messages(wrong)


def test_clean_ends():
    assert [end.is_clean for end in Termination] == [True, True, False]
