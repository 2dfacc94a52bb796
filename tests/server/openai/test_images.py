"""Images in chat, sent by the real clients: the answer of a native sample of the same prompt, and what is refused."""

import base64
from collections.abc import Iterator
from functools import cache
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

import lorimer
from lorimer import types
from lorimer.server.openai.images import images_of
from lorimer.server.openai.parameters import BadParameter
from lorimer.server.openai.schemas import Message
from lorimer.server.openai.text import TextModel
from lorimer.server.settings import Settings
from tests.cookbook import chat_templates
from tests.engine.pictures import bomb, file_of, picture, png
from tests.server.openai.conftest import LLAVA, MAX_IMAGE_BYTES, SEEING, TINY

PLACEHOLDER = "<|image_pad|>"
NUM_TOKENS = {SEEING: 15, LLAVA: 16}
"""Of a picture of 24 x 40 pixels."""
ASKED: Any = {"max_tokens": 8, "seed": 3, "logprobs": True}


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image(seed: int = 0) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(png(24, 40, seed)), "detail": "high"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


@pytest.fixture(scope="module")
def samplers(server) -> Iterator[Any]:
    with lorimer.ServiceClient(base_url=server.url, api_key=server.keys["ada"]) as service:
        yield cache(lambda model: service.create_sampling_client(base_model=model))


def prompt_of(sampler: Any, messages: list[Any]) -> types.ModelInput:
    """What transformers makes of the messages, with images instead of the placeholders in its text."""
    told = [
        {
            **message,
            "content": [part if part["type"] == "text" else {"type": "image"} for part in message["content"]],
        }
        for message in messages
    ]
    images = [part["image_url"]["url"] for message in messages for part in message["content"] if "image_url" in part]
    tokenizer = sampler.get_tokenizer()
    written = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True).split(PLACEHOLDER)
    chunks: list[Any] = []
    for said, held in zip(written, [*images, ""], strict=True):
        if said:
            chunks.append(types.EncodedTextChunk(tokens=tokenizer.encode(said, add_special_tokens=False)))
        if held:
            chunks.append(types.ImageChunk(data=base64.b64decode(held.partition(",")[2]), format="png"))
    return types.ModelInput(chunks=chunks)


def native(sampler: Any, messages: list[Any], num_samples: int = 1) -> list[list[float]]:
    params = types.SamplingParams(max_tokens=ASKED["max_tokens"], seed=ASKED["seed"])
    found = sampler.sample(prompt_of(sampler, messages), num_samples, params).result().sequences
    ends = sampler.get_tokenizer().eos_token_id
    return [
        [logprob for token, logprob in zip(one.tokens, one.logprobs, strict=True) if token != ends] for one in found
    ]


def scores(choice: Any) -> list[float]:
    return [score.logprob for score in choice.logprobs.content]


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────

CONVERSATIONS = {
    "one image": [user(text("What is this?"), image())],
    "image first": [user(image(1), text("And this?"))],
    "several": [
        user(image(0), image(1), text("Which?")),
        {"role": "assistant", "content": [text("The first.")]},
        user(text("Sure?"), image(2), text("Really?")),
    ],
}


@pytest.mark.parametrize("model", [SEEING, LLAVA])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_answer_is_that_of_the_same_native_prompt(client, samplers, model, messages):
    answer = client.chat.completions.create(model=model, messages=messages, n=2, **ASKED)
    expected = native(samplers(model), messages, 2)
    for choice, logprobs in zip(answer.choices, expected, strict=True):
        np.testing.assert_allclose(scores(choice), logprobs, atol=1e-4)
    prompt = prompt_of(samplers(model), messages)
    num_text = sum(chunk.length for chunk in prompt.chunks if isinstance(chunk, types.EncodedTextChunk))
    num_images = sum(isinstance(chunk, types.ImageChunk) for chunk in prompt.chunks)
    assert answer.usage.prompt_tokens == num_text + num_images * NUM_TOKENS[model]


def test_a_stream_is_the_same_answer_with_the_same_count(client):
    fields = {"model": SEEING, "messages": CONVERSATIONS["several"], **ASKED}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_pictures_and_their_order_make_the_answer(client):
    orders = ([image(0), image(1)], [image(1), image(0)], [image(0), image(1)])
    first, other, same = (
        scores(client.chat.completions.create(model=SEEING, messages=[user(*order)], **ASKED).choices[0])
        for order in orders
    )
    np.testing.assert_allclose(first, same, atol=1e-4)
    assert np.abs(np.subtract(first[0], other[0])) > 1e-3


def test_jpeg_by_both_of_its_names(client):
    photo = file_of(picture(24, 40), "jpeg")
    found = [
        scores(
            client.chat.completions.create(
                model=SEEING, messages=[user({"type": "image_url", "image_url": {"url": url(photo, kind)}})], **ASKED
            ).choices[0]
        )
        for kind in ("jpeg", "jpg")
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_a_template_that_reads_parts_only_is_given_texts_as_parts(client, samplers):
    answer = client.chat.completions.create(
        model=LLAVA, messages=[{"role": "user", "content": "What is a shepherd?"}], **ASKED
    )
    prompt = prompt_of(samplers(LLAVA), [user(text("What is a shepherd?"))])
    assert answer.usage.prompt_tokens == prompt.length
    assert samplers(LLAVA).get_tokenizer().decode(prompt.to_ints()).startswith("USER:\nWhat is a shepherd?")


def test_an_answer_about_an_image_can_be_confined(client):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["cat", "dog"]}}}
    answer = client.chat.completions.create(
        model=SEEING, messages=CONVERSATIONS["one image"], max_tokens=8, response_format=form
    )
    assert answer.choices[0].message.content in ('"cat"', '"dog"')


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────


def linked(address: str) -> list[Any]:
    return [user(text("Look:"), {"type": "image_url", "image_url": {"url": address}})]


NOT_OPENED = {
    "http": "http://127.0.0.1:1/a.png",
    "https": "https://example.org/a.png",
    "file": "file:///etc/hostname",
    "path": "/etc/hostname",
    "other data": "data:text/html;base64,AAAA",
    "another format": "data:image/webp;base64,AAAA",
    "bare data": "data:image/png,AAAA",
    "nothing": "",
}
SMALL = url(png(8, 8))
REFUSED: dict[str, tuple[str, list[Any], int, list[str]]] = {
    "no base64": (SEEING, linked("data:image/png;base64,%%%"), 400, ["messages[0].content[1]", "not base64"]),
    "too many bytes": (SEEING, linked(url(bytes(MAX_IMAGE_BYTES + 1))), 413, ["100001", "(max_image_bytes)"]),
    "too many": (SEEING, [user(*linked(SMALL)[0]["content"][1:] * 65)], 413, ["is 65", "(max_images_per_datum)"]),
    "no picture": (SEEING, linked(url(b"GIF89a")), 400, ["image 0 of messages is no PNG file"]),
    "the second": (SEEING, [user(image(), image()), *linked(url(b"GIF89a"))], 400, ["image 2 of messages is no PNG"]),
    "a bomb": (SEEING, linked(url(bomb(5000, 4000))), 400, ["5000 x 4000 pixels", "max_image_pixels"]),
    "text model": (TINY, CONVERSATIONS["one image"], 400, [f"messages[0].content[1] is an image, which {TINY!r}"]),
    "left out": (SEEING, [{**user(image()), "role": "system"}, user(text("Hm?"))], 400, ["has 0 places"]),
    "mark in a text": (SEEING, [user(image(), text(f"See {PLACEHOLDER}"))], 400, ["has 2 places '<|image_pad|>'"]),
    "too long": (SEEING, [user(*[image()] * 40)], 400, ["context length"]),
}


@pytest.mark.parametrize("address", NOT_OPENED.values(), ids=NOT_OPENED)
def test_no_address_is_opened(client, address):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=SEEING, messages=linked(address), max_tokens=1)
    assert f"messages[0].content[1].image_url.url is {address!r}, which is not opened" in str(caught.value)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("model", "messages", "status", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals_say_what_is_wrong_and_the_server_goes_on(client, model, messages, status, words, stream):
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=model, messages=messages, max_tokens=1, stream=stream)
    assert caught.value.status_code == status
    assert all(word in str(caught.value) for word in words), str(caught.value)
    answer = client.chat.completions.create(model=SEEING, messages=CONVERSATIONS["one image"], max_tokens=1)
    assert answer.usage.completion_tokens == 1


def test_a_template_of_texts_has_no_place_for_images():
    """Although the model itself would read them."""
    model = TextModel.load("m", chat_templates.TINY, [0], 512, "")
    messages = [Message.model_validate(user(text("Look:"), image()))]
    with pytest.raises(BadParameter, match=r"content\[1\] is an image, which 'm' .* template has no place for images"):
        images_of(messages, model, model.template(False), Settings())


# ── Anthropic's shape ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def claude(server) -> Iterator[anthropic.Anthropic]:
    made = anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key=server.keys["ada"], max_retries=0)
    with made as client:
        yield client


def block(seed: int = 0, **source: str) -> dict[str, Any]:
    data = base64.b64encode(png(24, 40, seed)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data, **source}}


def test_blocks_of_images_are_those_of_chat(claude, client):
    fields: Any = {"model": SEEING, "max_tokens": 8, "extra_body": {"temperature": 0}}
    expected = client.chat.completions.create(**fields, messages=[user(text("What is"), image(), text("this?"))])
    content = [text("What is"), block(), text("this?")]
    answer = claude.messages.create(**fields, messages=[{"role": "user", "content": content}])
    with claude.messages.stream(**fields, messages=[{"role": "user", "content": content}]) as stream:
        streamed = stream.get_final_message()
    for found in (answer, streamed):
        assert "".join(one.text for one in found.content) == expected.choices[0].message.content
        assert found.usage.input_tokens + found.usage.cache_read_input_tokens == expected.usage.prompt_tokens


def test_a_tool_may_answer_with_an_image(claude, client):
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("Seen:"), block()]}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(model=SEEING, messages=messages, max_tokens=1)
    told: Any = [messages[0], {"role": "assistant", "content": ""}, {**user(text("Seen:"), image()), "role": "tool"}]
    expected = client.chat.completions.create(model=SEEING, messages=told, max_tokens=1)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == expected.usage.prompt_tokens


WRONG_BLOCKS = {
    "address": (SEEING, block(type="url", url="http://127.0.0.1:1/a.png"), "'url' is not opened"),
    "format": (SEEING, block(media_type="image/gif"), "image/gif"),
    "no base64": (SEEING, block(data="%%%"), "not base64"),
    "text model": (TINY, block(), "does not read: it reads text only"),
}


@pytest.mark.parametrize(("model", "wrong", "words"), WRONG_BLOCKS.values(), ids=WRONG_BLOCKS)
def test_blocks_are_refused_in_their_shape(claude, model, wrong, words):
    body = {"model": model, "messages": [{"role": "user", "content": [wrong]}], "max_tokens": 1}
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.post("/v1/messages", body=body, cast_to=object)
    assert words in caught.value.body["error"]["message"]


def test_images_are_not_counted_without_the_engine(claude):
    with pytest.raises(anthropic.BadRequestError, match="only the engine counts"):
        claude.messages.count_tokens(model=SEEING, messages=[{"role": "user", "content": [block()]}])
