"""The real OpenAI client against a real server: models, completions, chat, tools, schemas, errors."""

import json
import math
from typing import Any

import openai
import pydantic
import pytest

import lorimer
from lorimer import types
from tests.server.openai.conftest import PLAIN, TINY, TOOLED

QUESTION = [{"role": "user", "content": "Tell me a story about a shepherd and the ships that come over the sea."}]
GREEDY: Any = {"model": TINY, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["one", "two"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
STOP = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}},
}


def refusal(call) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return caught.value


@pytest.fixture(scope="module")
def checkpoint(server) -> dict[str, str]:
    """Weights of ada's that say one sentence, of both kinds."""
    with lorimer.ServiceClient(base_url=server.url, api_key=server.keys["ada"]) as service:
        trainer = service.create_lora_training_client(TINY, rank=8, seed=0)
        tokenizer = trainer.get_tokenizer()
        text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
        tokens = tokenizer.encode(text + "Ask a shepherd.<|im_end|>", add_special_tokens=False)
        datum = types.Datum(
            types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        )
        for _ in range(25):
            trainer.forward_backward([datum], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=5e-3))
        saved = {"sampler": trainer.save_weights_for_sampler("told"), "training": trainer.save_state("told")}
        return {kind: future.result().path for kind, future in saved.items()}


def test_models_are_listed_with_checkpoints(client, server, checkpoint):
    listed = [model.id for model in client.models.list()]
    assert listed[:3] == [TINY, TOOLED, PLAIN]
    assert set(checkpoint.values()) <= set(listed)
    assert client.models.retrieve(checkpoint["sampler"]).owned_by == client.models.list().data[-1].owned_by
    assert client.models.retrieve(TINY).id == TINY
    with server.client("bob") as bob:
        assert not set(checkpoint.values()) & {model.id for model in bob.models.list()}


def test_chat_answers_in_the_template_of_the_model(client):
    answer = client.chat.completions.create(**GREEDY)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == TINY
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert "<|im_" not in choice.message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = client.chat.completions.create(**GREEDY)
    assert again.choices[0].message.content == choice.message.content
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens


@pytest.mark.parametrize("extra", [{}, {"stop": "e"}, {"n": 2, "seed": 5, "temperature": 1}, {"model": TOOLED}])
def test_a_stream_is_the_whole_answer_in_pieces(client, extra):
    # A long answer: tokens that come faster than they are sent share a piece.
    fields = {
        **GREEDY,
        "messages": [{"role": "user", "content": "Tell me a story about a dog."}],
        "max_tokens": 200,
        **extra,
    }
    whole = client.chat.completions.create(**fields)
    found = {choice.index: "" for choice in whole.choices}
    reasons = {}
    with client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert found == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[0].choices[0].delta.role == "assistant"
    # Besides its pieces: the beginning, the end, the usage. Before the stop string there is room for one piece only.
    assert len(chunks) > (3 if "stop" in extra else 5)


async def test_the_async_client_streams_too(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/oai/api/v1", api_key=server.keys["ada"]) as client:
        text = ""
        async for chunk in await client.chat.completions.create(**GREEDY, stream=True):
            text += chunk.choices[0].delta.content or ""
        whole = await client.chat.completions.create(**GREEDY)
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize("kind", ["sampler", "training"])
def test_a_checkpoint_is_a_model(client, server, checkpoint, kind):
    fields = {**GREEDY, "model": checkpoint[kind]}
    assert client.chat.completions.create(**fields).choices[0].message.content == "Ask a shepherd."
    with server.client("bob") as bob:
        error = refusal(lambda: bob.chat.completions.create(**fields))
        assert error.status_code == 404 and "there is no checkpoint" in error.message


def test_a_published_checkpoint_is_a_model_for_everybody(server, checkpoint):
    rest = lorimer.ServiceClient(base_url=server.url, api_key=server.keys["ada"]).create_rest_client()
    path = checkpoint["sampler"]
    rest.publish_checkpoint_from_tinker_path(path).result()
    try:
        with server.client("bob") as bob:
            answer = bob.chat.completions.create(**{**GREEDY, "model": path})
            assert answer.choices[0].message.content == "Ask a shepherd."
    finally:
        rest.unpublish_checkpoint_from_tinker_path(path).result()


def test_stop_strings_end_the_text_before_them(client):
    whole = client.chat.completions.create(**GREEDY).choices[0].message.content
    stop = whole[len(whole) // 2 :][:2]
    cut = client.chat.completions.create(**GREEDY, stop=[stop, "never there"]).choices[0]
    assert cut.message.content == whole.partition(stop)[0]
    assert cut.finish_reason == "stop"


def test_seeds_repeat_and_samples_differ(client):
    fields = {**GREEDY, "temperature": 1.5, "n": 3, "seed": 11}
    first, second = (client.chat.completions.create(**fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


def test_log_probabilities_are_those_of_the_sampler(client, server):
    fields = {**GREEDY, "temperature": 1, "seed": 3}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3).choices[0]
    scores = answer.logprobs.content
    text = b"".join(bytes(score.bytes) for score in scores).decode("utf-8", "replace")
    assert text == answer.message.content
    for score in scores:
        assert score.logprob <= 0 and len(score.top_logprobs) == 3
        assert [top.logprob for top in score.top_logprobs] == sorted(
            (t.logprob for t in score.top_logprobs), reverse=True
        )
        by_token = {tuple(top.bytes): top.logprob for top in score.top_logprobs}
        assert by_token.get(tuple(score.bytes), score.logprob) == score.logprob
    with lorimer.ServiceClient(base_url=server.url, api_key=server.keys["ada"]) as service:
        sampler = service.create_sampling_client(base_model=TINY)
        tokenizer = sampler.get_tokenizer()
        prompt = tokenizer.encode(
            tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False),
            add_special_tokens=False,
        )
        params = types.SamplingParams(max_tokens=24, seed=3, temperature=1)
        sequence = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]
    assert [score.logprob for score in scores] == pytest.approx(sequence.logprobs[: len(scores)], abs=1e-4)
    streamed = []
    for chunk in client.chat.completions.create(**fields, logprobs=True, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [score.token for score in streamed] == [score.token for score in scores]


# ── completions ───────────────────────────────────────────────────────────────────────────────────────


def test_completions_of_text_and_of_tokens(client):
    fields = {"model": TINY, "temperature": 0, "max_tokens": 12}
    one = client.completions.create(prompt="The cat", **fields)
    several = client.completions.create(prompt=["The cat", "A dog"], **fields, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == one.choices[0].text
    assert several.choices[2].text != one.choices[0].text
    scored = client.completions.create(prompt="The cat", **fields, logprobs=0, echo=True).choices[0]
    assert scored.text == "The cat" + one.choices[0].text
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(prompt="The cat", **fields, stream=True, echo=True)
    )
    assert streamed == scored.text


def test_echo_scores_the_prompt_as_the_sampler_does(client, server):
    with lorimer.ServiceClient(base_url=server.url, api_key=server.keys["ada"]) as service:
        sampler = service.create_sampling_client(base_model=TINY)
        tokens = sampler.get_tokenizer().encode("The cat sat on the mat", add_special_tokens=False)
        expected = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    answer = client.completions.create(model=TINY, prompt=tokens, echo=True, logprobs=2, max_tokens=0)
    scores = answer.choices[0].logprobs
    assert answer.choices[0].text == "".join(scores.tokens) == "The cat sat on the mat"
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
    assert all(token in top for token, top in zip(scores.tokens[1:], scores.top_logprobs[1:], strict=True))
    assert [answer.choices[0].text[offset:][:1] for offset in scores.text_offset] == [t[:1] for t in scores.tokens]
    assert answer.usage.completion_tokens == 0
    one = client.completions.create(model=TINY, prompt=[tokens], echo=True, logprobs=1, max_tokens=1, temperature=0)
    assert len(one.choices[0].logprobs.token_logprobs) == len(tokens) + 1


# ── tools and schemas ─────────────────────────────────────────────────────────────────────────────────


def test_a_tool_is_called_when_a_call_is_asked_for(client):
    fields = {"model": TOOLED, "messages": QUESTION, "tools": [ADD, STOP], "max_tokens": 200, "seed": 1}
    named = {"type": "function", "function": {"name": "add"}}
    answer = client.chat.completions.create(**fields, tool_choice=named).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert call.function.name == "add" and call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"a", "b"} and 0 <= arguments["a"] <= 9 and arguments["b"] in ("one", "two")
    conversation = [*QUESTION, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    free = client.chat.completions.create(**{**fields, "messages": conversation, "max_tokens": 5})
    assert free.choices[0].message.content is not None
    forced = client.chat.completions.create(**fields, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert len(forced.message.tool_calls) == 1


def test_calls_are_streamed(client):
    fields = {"model": TOOLED, "messages": QUESTION, "tools": [ADD], "max_tokens": 200, "seed": 2}
    choice = {"type": "function", "function": {"name": "add"}}
    with client.chat.completions.stream(**fields, tool_choice=choice) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["a"] in range(10)
    whole = client.chat.completions.create(**fields, tool_choice=choice)
    assert whole.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_an_answer_obeys_a_schema(client):
    class Animal(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        kind: str = pydantic.Field(max_length=12)
        legs: int = pydantic.Field(ge=0, le=8)
        tags: list[bool] = pydantic.Field(max_length=2)

    for model in (TINY, TOOLED):
        fields = {"model": model, "messages": QUESTION, "max_tokens": 150, "seed": 4}
        parsed = client.chat.completions.parse(**fields, response_format=Animal).choices[0]
        assert isinstance(parsed.message.parsed, Animal), parsed
        assert parsed.finish_reason == "stop"


def test_log_probabilities_of_a_confined_answer_are_of_what_was_left(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    fields = {**GREEDY, "temperature": 1, "seed": 5, "response_format": form}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=5).choices[0]
    assert json.loads(answer.message.content) in ("yes", "no")
    first = answer.logprobs.content[0]
    assert first.logprob == pytest.approx(0, abs=1e-6), "only a quotation mark can begin it"
    for score in answer.logprobs.content:
        assert sum(math.exp(top.logprob) for top in score.top_logprobs) == pytest.approx(1, abs=1e-3)


def test_json_without_a_schema_is_an_object(client):
    fields = {"model": TOOLED, "messages": QUESTION, "max_tokens": 60, "seed": 3}
    answer = client.chat.completions.create(**fields, response_format={"type": "json_object"}).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        json.loads(answer.message.content)


def test_thoughts_are_apart(client):
    fields = {"model": TOOLED, "messages": QUESTION, "max_tokens": 8, "seed": 3, "reasoning_effort": "high"}
    answer = client.chat.completions.create(**fields)
    message = answer.choices[0].message
    assert message.reasoning_content and not message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens
    off = client.chat.completions.create(**{**fields, "reasoning_effort": "none"}).choices[0].message
    assert off.content and "reasoning_content" not in off.model_extra


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────

REFUSED = {
    "unknown model": ({"model": "gpt-9"}, 404, "model", "not served here"),
    "no template": ({"model": PLAIN}, 400, "model", "has no chat template"),
    "no place for tools": ({"tools": [ADD]}, 400, "tools", "has no place for them"),
    "too long": ({"max_tokens": 100_000}, 400, "max_tokens", "exceed the context length"),
    "penalty": ({"presence_penalty": 0.5}, 400, "presence_penalty", "not available"),
    "bias": ({"logit_bias": {"50256": -100}}, 400, "logit_bias", "not available"),
    "call without tools": ({"tool_choice": "required"}, 400, "tool_choice", "there are no tools"),
    "tool not there": (
        {"model": TOOLED, "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        400,
        "tool_choice",
        "not among the tools",
    ),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objet"}}}},
        400,
        None,
        "Invalid type: objet",
    ),
    "template values": (
        {"extra_body": {"chat_template_kwargs": {"messages": []}}},
        400,
        "chat_template_kwargs",
        "'messages', which callers cannot set",
    ),
    "template self": (
        {"extra_body": {"chat_template_kwargs": {"self": 1}}},
        400,
        "chat_template_kwargs",
        "'self', which callers cannot set",
    ),
    "arguments": (
        {
            "messages": [
                *QUESTION,
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "no"}}]},
            ]
        },
        400,
        "messages[1].tool_calls[0].function.arguments",
        "a JSON object is accepted",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("extra", "status", "param", "text"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_parameter(client, extra, status, param, text, stream):
    error = refusal(lambda: client.chat.completions.create(**{**GREEDY, **extra}, stream=stream))
    assert (error.status_code, error.param) == (status, param)
    assert text in error.body["message"]
    assert error.body.keys() == {"message", "type", "param", "code"}
    assert error.type == "invalid_request_error"


PYTHON_NAMES = (
    "values",
    "tools",
    "context",
    "environment",
    "template",
    "tokenize",
    "add_generation_prompt",
    "__class__",
)


@pytest.mark.parametrize("name", [*PYTHON_NAMES, "range", "namespace", "loop", "raise_exception", "cls", "kwargs"])
def test_no_name_of_a_template_value_is_an_error_of_the_server(client, name):
    fields = {**GREEDY, "max_tokens": 1, "extra_body": {"chat_template_kwargs": {name: 1}}}
    try:
        assert client.chat.completions.create(**fields).choices
    except openai.APIStatusError as error:
        assert (error.status_code, error.param) == (400, "chat_template_kwargs"), name


def test_a_wrong_key_is_refused_in_their_shape(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-wrong", max_retries=0) as client:
        error = refusal(lambda: client.models.list())
        assert isinstance(error, openai.AuthenticationError) and error.code == "invalid_api_key"
        error = refusal(lambda: client.post("/embeddings", body={}, cast_to=object))
        assert error.status_code == 401


def test_other_paths_of_theirs_are_not_there(client):
    error = refusal(lambda: client.embeddings.create(model=TINY, input="x"))
    assert error.status_code == 404 and error.type == "invalid_request_error"
