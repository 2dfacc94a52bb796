"""The real Anthropic client against a real server: messages, streams, tools, counting, refusals."""

from collections.abc import Iterator

import anthropic
import pytest

from tests.server.openai.conftest import TINY, TOOLED

QUESTION = [{"role": "user", "content": "Tell me a story about a shepherd and the sea."}]
ADD = {
    "name": "add",
    "description": "Add.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
}

LINKED = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/a.png"}}


@pytest.fixture(scope="module")
def claude(server) -> Iterator[anthropic.Anthropic]:
    made = anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key=server.keys["ada"], max_retries=0)
    with made as client:
        yield client


def refusal(call) -> anthropic.APIStatusError:
    with pytest.raises(anthropic.APIStatusError) as caught:
        call()
    return caught.value


def test_a_message_is_the_answer_of_chat(claude, client):
    fields = {"model": TINY, "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}}
    answer = claude.messages.create(**fields, system=[{"type": "text", "text": "Be brief."}])
    told = [{"role": "system", "content": "Be brief."}, *QUESTION]
    expected = client.chat.completions.create(**{**fields, "messages": told})
    assert [block.text for block in answer.content] == [expected.choices[0].message.content]
    assert answer.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[expected.choices[0].finish_reason]
    used = answer.usage
    assert used.input_tokens + used.cache_read_input_tokens == expected.usage.prompt_tokens
    assert used.output_tokens == expected.usage.completion_tokens
    counted = claude.messages.count_tokens(model=TINY, messages=QUESTION, system="Be brief.")
    assert counted.input_tokens == expected.usage.prompt_tokens


def test_a_stream_is_the_message_in_events(claude):
    fields = {"model": TINY, "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_stop_sequences_are_told(claude):
    fields = {"model": TINY, "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}}
    text = claude.messages.create(**fields).content[0].text
    answer = claude.messages.create(**fields, stop_sequences=[text[3:5]])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[3:5])
    assert answer.content[0].text == text.partition(text[3:5])[0]


def test_tools_are_called_and_answered(claude):
    fields = {"model": TOOLED, "max_tokens": 200, "tools": [ADD]}
    called = claude.messages.create(**fields, messages=QUESTION, tool_choice={"type": "tool", "name": "add"})
    (block,) = called.content
    assert called.stop_reason == "tool_use" and block.name == "add" and 0 <= block.input["a"] <= 9
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "5"}]}
    conversation = [*QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(**{**fields, "max_tokens": 5}, messages=conversation)
    assert answer.usage.output_tokens == 5 or (answer.stop_reason == "end_turn" and answer.usage.output_tokens < 5)
    with claude.messages.stream(**fields, messages=QUESTION, tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    # A call that max_tokens cuts off is text.
    calls = final.content if final.stop_reason == "tool_use" else final.content[:-1]
    assert {block.type for block in calls} == {"tool_use"} and calls[0].input.keys() == {"a"}


def test_thoughts_are_blocks(claude):
    fields = {"model": TOOLED, "messages": QUESTION, "max_tokens": 8}
    answer = claude.messages.create(**fields, thinking={"type": "adaptive"})
    assert [block.type for block in answer.content] == ["thinking"]


@pytest.mark.parametrize(
    ("extra", "status", "text"),
    [
        ({"model": "claude-9"}, 404, "not served here"),
        ({"container": "x"}, 400, "'container' is not known"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "Well"}]}, 400, "not available"),
        ({"messages": [{"role": "user", "content": [LINKED]}]}, 400, "'url' is not opened; accepted is 'base64'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "'document'"),
        ({"tools": [ADD]}, 400, "has no place for them"),
    ],
    ids=["model", "parameter", "prefill", "image", "document", "tools"],
)
def test_refusals_are_in_their_shape(claude, extra, status, text):
    body = {"model": TINY, "messages": QUESTION, "max_tokens": 5, **extra}
    error = refusal(lambda: claude.post("/v1/messages", body=body, cast_to=object))
    assert error.status_code == status
    assert error.body["type"] == "error" and text in error.body["error"]["message"]


def test_a_wrong_key_is_refused_in_their_shape(server):
    with anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key="no", max_retries=0) as client:
        error = refusal(lambda: client.messages.create(model=TINY, messages=QUESTION, max_tokens=5))
    assert isinstance(error, anthropic.AuthenticationError)
    assert error.body["error"]["type"] == "authentication_error"
