"""Images in conversations: token by token what transformers writes, with the images in their places; then training."""

import base64
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessorPil, LlavaProcessor, Qwen2VLImageProcessorPil

import lorimer
from lorimer.chat.conversation import TrainOn, text_of
from lorimer.chat.images import first_positions, ids_of
from lorimer.cookbook.datums import conversation_to_datum, datum_from_tokens
from lorimer.cookbook.renderers import TemplateRenderer, TextRenderer, get_renderer
from lorimer.cookbook.service import get_image_processor, get_tokenizer
from lorimer.errors import InvalidInput, Unsupported
from lorimer.types import EncodedTextChunk, ImageChunk, ModelInput
from tests.conformance.servers import running_server
from tests.cookbook.chat_templates import LLAMA3, LLAVA, QWEN_VL, VISION_MARKS, applied, tokenizer_with
from tests.engine.pictures import file_of, picture, png

PAD = "<|image_pad|>"
NUM_TOKENS = 15
"""Of a picture of 24 x 40 pixels."""
COUNTS = Qwen2VLImageProcessorPil(size={"shortest_edge": 256, "longest_edge": 4096}, patch_size=4, merge_size=2)
TEMPLATES = {"qwen": QWEN_VL, "llava": LLAVA}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def shown(seed: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": picture(24, 40, seed)}


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


CHAT: list[Any] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": [text("What is "), shown(0), text("this?")]},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(png(24, 40, 1))}}, shown(2)]},
    {"role": "assistant", "content": [{"type": "text", "text": "Two dogs."}]},
]


@pytest.fixture(params=TEMPLATES.values(), ids=list(TEMPLATES))
def renderer(request) -> TemplateRenderer:
    return TemplateRenderer(tokenizer_with(request.param), image_processor=COUNTS)


def expected(tokenizer: Any, messages: list[Any], **options: Any) -> list[int]:
    """What transformers writes, with one placeholder for each image."""
    told = []
    for message in messages:
        content = [text(message["content"])] if isinstance(message["content"], str) else message["content"]
        told.append({**message, "content": [p if p["type"] == "text" else {"type": "image"} for p in content]})
    return applied(tokenizer, told, **options)


def with_pads(renderer: TemplateRenderer, model_input: ModelInput) -> list[int]:
    pad = renderer.tokenizer.convert_tokens_to_ids(PAD)
    return [
        token
        for chunk in model_input.chunks
        for token in (list(chunk.tokens) if isinstance(chunk, EncodedTextChunk) else [pad])
    ]


def images_in(model_input: ModelInput) -> list[ImageChunk]:
    return [chunk for chunk in model_input.chunks if isinstance(chunk, ImageChunk)]


# ── prompts ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [2, 4])
def test_prompt_is_that_of_transformers_with_images_in_their_places(renderer, length):
    prompt = renderer.build_generation_prompt(CHAT[:length])
    assert with_pads(renderer, prompt) == expected(renderer.tokenizer, CHAT[:length], add_generation_prompt=True)
    images = images_in(prompt)
    for seed, image in enumerate(images):
        assert image.expected_tokens == NUM_TOKENS
        found = np.asarray(Image.open(io.BytesIO(image.data), formats=[image.format.upper()]))
        np.testing.assert_array_equal(found, np.asarray(picture(24, 40, seed)))
    assert len(images) == {2: 1, 4: 3}[length]
    assert prompt.length == len(with_pads(renderer, prompt)) + len(images) * (NUM_TOKENS - 1)


def test_bytes_of_a_url_are_sent_as_they_are():
    photo = file_of(picture(24, 40), "jpeg")
    message: Any = {"role": "user", "content": [{"type": "image", "image": url(photo, "jpeg")}]}
    for processor, count in ((None, None), (COUNTS, NUM_TOKENS)):
        renderer = TemplateRenderer(tokenizer_with(QWEN_VL), image_processor=processor)
        (image,) = images_in(renderer.build_generation_prompt([message]))
        assert (image.data, image.format, image.expected_tokens) == (photo, "jpeg", count)


NUMBERED = QWEN_VL.replace("<|vision_start|>", "{% if number %}Picture: {% endif %}<|vision_start|>")


def test_options_may_be_about_images_alone():
    tokenizer = tokenizer_with(QWEN_VL)
    plain = tokenizer_with(NUMBERED)
    plain.add_tokens(VISION_MARKS, special_tokens=True)
    prompt = TemplateRenderer(plain, number=True).build_generation_prompt(CHAT[:2])
    assert "What is Picture: <|vision_start|>" in plain.decode(prompt.chunks[0].tokens)
    with pytest.raises(InvalidInput, match="has no use for 'number'"):
        TemplateRenderer(tokenizer, number=True)


@pytest.mark.parametrize("named", [False, True])
def test_the_mark_of_another_family(named):
    tokenizer = tokenizer_with(LLAVA.replace(PAD, "<image>") + "{# named #}" * named)
    tokenizer.add_tokens(["<image>", PAD], special_tokens=True)
    if named:
        tokenizer.image_token = "<image>"
    prompt = TemplateRenderer(tokenizer).build_generation_prompt(CHAT[:4])
    assert len(images_in(prompt)) == 3
    assert tokenizer.decode(prompt.chunks[0].tokens).endswith("USER:\n")


def test_a_whole_processor_writes_the_same_tokens():
    """Llava's counts by itself, and expands the placeholders."""
    tokenizer = tokenizer_with(LLAVA)
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=LLAVA,
        image_token=PAD,
        num_additional_image_tokens=1,
    )
    chat = [{**message, "content": [text("Hm?"), shown(i)]} for i, message in enumerate(CHAT[1:4])]
    renderer = get_renderer("template", tokenizer, processor)
    prompt = renderer.build_generation_prompt(chat)
    whole = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    ids = ids_of(prompt)
    assert [image.expected_tokens for image in images_in(prompt)] == [16, 16, 16]
    found = [
        pad if here == 0 and there == pad else here for here, there in zip(ids, whole["input_ids"][0], strict=True)
    ]
    assert found == list(whole["input_ids"][0])


# ── training ──────────────────────────────────────────────────────────────────────────────────────────


def trained_text(renderer: TemplateRenderer, example: Any) -> str:
    tokens, weights = example
    return renderer.tokenizer.decode(ids_of(tokens)[weights == 1])


def image_positions(model_input: ModelInput) -> np.ndarray:
    return np.concatenate([np.full(chunk.length, isinstance(chunk, ImageChunk)) for chunk in model_input.chunks])


def test_example_has_weights_for_all_positions_and_none_for_images(renderer):
    tokens, weights = renderer.build_supervised_example(CHAT, TrainOn.ALL_ASSISTANT_MESSAGES)
    assert with_pads(renderer, tokens) == expected(renderer.tokenizer, CHAT)
    assert len(weights) == tokens.length
    assert trained_text(renderer, (tokens, weights)) == "A cat.<|im_end|>Two dogs.<|im_end|>"
    prompt = renderer.build_generation_prompt(CHAT[:4])
    assert not weights[prompt.length - 1]
    assert weights[prompt.length :].sum() == len(renderer.tokenizer.encode("Two dogs.<|im_end|>"))


@pytest.mark.parametrize("train_on", [TrainOn.ALL_TOKENS, TrainOn.ALL_MESSAGES])
def test_images_weigh_nothing_whatever_is_trained_on(renderer, train_on):
    tokens, weights = renderer.build_supervised_example(CHAT[:3], train_on)
    here = image_positions(tokens)
    assert here.sum() == NUM_TOKENS
    assert not weights[here].any()
    said = trained_text(renderer, (tokens, weights))
    if train_on is TrainOn.ALL_TOKENS:
        assert weights[~here].all()
    else:
        between = "<|vision_start|><|vision_end|>" if "<|vision_start|>" in said else ""
        assert said == f"Answer briefly.<|im_end|>What is {between}this?<|im_end|>A cat.<|im_end|>"


def test_datum_keeps_the_images_and_ends_with_the_last_trained_token(renderer):
    datum = conversation_to_datum(CHAT, renderer)
    tokens, weights = renderer.build_supervised_example(CHAT)
    length = int(np.flatnonzero(weights)[-1]) + 1
    assert datum.model_input.length == length - 1
    assert images_in(datum.model_input) == images_in(tokens)
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    np.testing.assert_array_equal(targets, ids_of(tokens)[1:length])
    weight = datum.loss_fn_inputs["weights"].to_numpy()
    assert weight.sum() == pytest.approx(1)
    assert not weight[image_positions(first_positions(tokens, length))[1:]].any()
    early = conversation_to_datum(CHAT, renderer, length - 2, TrainOn.ALL_ASSISTANT_MESSAGES)
    assert early.model_input.length == length - 3


def test_an_image_is_not_cut():
    image = ImageChunk(data=b"", format="png", expected_tokens=4)
    sequence = ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2]), image, EncodedTextChunk(tokens=[3])])
    assert ids_of(sequence).tolist() == [1, 2, 0, 0, 0, 0, 3]
    assert [first_positions(sequence, length).length for length in (0, 1, 2, 6, 7, 9)] == [0, 1, 2, 6, 7, 7]
    with pytest.raises(InvalidInput, match="position 5 is within an image"):
        first_positions(sequence, 5)
    with pytest.raises(InvalidInput, match="6 weights for 7 tokens"):
        datum_from_tokens(sequence, [1] * 6)


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────


def asked(part: dict[str, Any], *more: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [text("See:"), part, *more]}, CHAT[2]]


REFUSED: dict[str, tuple[str | None, Any, list[Any], str]] = {
    "address": (
        QWEN_VL,
        COUNTS,
        asked({"type": "image", "image": "https://a.org/b.png"}),
        "b.png', which is not opened",
    ),
    "path": (QWEN_VL, COUNTS, asked({"type": "image", "image": "cat.png"}), "'cat.png', which is not opened"),
    "linked": (QWEN_VL, None, asked({"type": "image_url", "image_url": {"url": "http://a"}}), "image 0 of message 0"),
    "another type": (QWEN_VL, COUNTS, asked({"type": "image", "image": b"x"}), "of type 'bytes'; accepted are a PIL"),
    "nothing": (QWEN_VL, COUNTS, asked({"type": "image"}), "of type 'NoneType'"),
    "no picture": (QWEN_VL, COUNTS, asked({"type": "image", "image": url(b"GIF89a")}), "is no PNG file"),
    "long": (QWEN_VL, COUNTS, asked({"type": "image", "image": picture(900, 2)}), "900 x 2 pixels"),
    "uncounted": (QWEN_VL, None, asked(shown()), "train with a renderer that has an image processor"),
    "no count": (QWEN_VL, object(), asked(shown()), "'object' cannot tell how many tokens"),
    "text model": (None, COUNTS, asked(shown()), "has no place for images"),
    "parts printed": (LLAMA3, COUNTS, asked(shown()), "has 0 places None for the 1 images"),
    "mark in a text": (QWEN_VL, COUNTS, asked(shown(), text(PAD)), "has 2 places '<|image_pad|>' for the 1 images"),
    "system": (QWEN_VL, COUNTS, [{"role": "system", "content": [shown()]}, *CHAT[1:3]], "has 1 places"),
    "audio": (QWEN_VL, COUNTS, asked({"type": "audio"}), "of type 'audio'; accepted are text, thinking, image"),
}


@pytest.mark.parametrize(("template", "processor", "messages", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(template, processor, messages, reason):
    with pytest.raises(InvalidInput, match=reason):
        TemplateRenderer(tokenizer_with(template), image_processor=processor).build_supervised_example(messages)


def test_plain_text_has_no_images():
    assert text_of(CHAT[1]) == "What is this?"
    with pytest.raises(Unsupported, match="no form for images"):
        TextRenderer(tokenizer_with("")).build_generation_prompt(CHAT[:2])
    with pytest.raises(Unsupported, match="'text' has no form for images"):
        get_renderer("auto", tokenizer_with(""), COUNTS)


# ── with a server ─────────────────────────────────────────────────────────────────────────────────────

SEEING = "cookbook/seeing"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lorimer.ServiceClient]:
    from tests.engine.debug_vision import make_debug_vision_model

    place = tmp_path_factory.mktemp("seeing")
    make_debug_vision_model(place / "model")
    (place / "model" / "chat_template.jinja").write_text(QWEN_VL, "utf-8")
    with (
        running_server(place / "data", [f"{SEEING}={place / 'model'}"]) as running,
        lorimer.ServiceClient(base_url=running.url) as service,
    ):
        yield service


def test_a_model_learns_what_pictures_are(seeing):
    """All that it takes comes from the server; only the pictures tell which answer is right."""
    renderer = get_renderer("auto", get_tokenizer(seeing, SEEING), get_image_processor(seeing, SEEING))
    chats = [
        [{"role": "user", "content": [shown(seed), text("What?")]}, {"role": "assistant", "content": answer}]
        for seed, answer in ((0, "cat"), (4, "dog"))
    ]
    trainer = seeing.create_lora_training_client(SEEING, rank=16, seed=5)
    data = [conversation_to_datum(chat, renderer, reduction="sum") for chat in chats]
    for _ in range(14):
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(lorimer.AdamParams(learning_rate=1e-2)).result()
    sampler = trainer.save_weights_and_get_sampling_client()
    params = lorimer.SamplingParams(max_tokens=6, temperature=0, stop=renderer.get_stop_sequences())
    for chat in chats:
        prompt = renderer.build_generation_prompt(chat[:1])
        (sequence,) = sampler.sample(prompt, 1, params).result().sequences
        assert renderer.parse_response(sequence.tokens) == (chat[1], "stop_sequence")


# ── the tokenizer of a real model ─────────────────────────────────────────────────────────────────────

ASSETS = os.environ.get("LORIMER_ASSETS")


@pytest.mark.skipif(not ASSETS, reason="LORIMER_ASSETS names no directory with tokenizers")
def test_real_tokenizer_token_by_token():
    tokenizer = AutoTokenizer.from_pretrained(Path(ASSETS or "") / "tokenizers" / "qwen3")
    with pytest.raises(Unsupported, match="has no place for images"):
        TemplateRenderer(tokenizer).build_generation_prompt(CHAT[:2])
    tokenizer.chat_template = QWEN_VL
    renderer = TemplateRenderer(tokenizer, image_processor=COUNTS)
    tokens, weights = renderer.build_supervised_example(CHAT)
    assert with_pads(renderer, tokens) == expected(tokenizer, CHAT)
    assert trained_text(renderer, (tokens, weights)) == "Two dogs.<|im_end|>"
