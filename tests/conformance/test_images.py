"""Images end to end: chunks of bytes and pointers, trained on and sampled from, and everything that is refused."""

import base64
from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.samples import MODEL, RANK, SEEING, current_logprobs, eventually, logprobs, step, tokens_of
from tests.engine.debug_vision import VISION_END, VISION_START
from tests.engine.pictures import broken_files, file_of, picture, png

NUM_TOKENS = 15
"""Of a picture of 24 x 40 pixels."""
REFUSED = (tinker.BadRequestError, tinker.RequestFailedError)


@pytest.fixture(scope="module")
def seeing(seeing_server):
    """A client of the server that reads images."""
    with tinker.ServiceClient(base_url=seeing_server.url, api_key="tml-any") as client:
        yield client


@pytest.fixture(scope="module")
def run(seeing):
    return seeing.create_lora_training_client(SEEING, rank=RANK, seed=3)


def image(seed=0, expected_tokens=NUM_TOKENS, **fields):
    fields = {"data": png(24, 40, seed), "format": "png", **fields}
    return types.ImageChunk(expected_tokens=expected_tokens, **fields)


def text(length, seed):
    return types.EncodedTextChunk(tokens=tokens_of(length, seed))


def prompt_of(*images, end=4):
    """Text, an image within its marks, more text, and so on."""
    chunks = [text(5, 1)]
    for number, chunk in enumerate(images):
        marks = [types.EncodedTextChunk(tokens=[mark]) for mark in (VISION_START, VISION_END)]
        chunks += [marks[0], chunk, marks[1], text(end, 2 + number)]
    return types.ModelInput(chunks=chunks)


def datum_of(prompt, answer, length=None):
    """Learn to say ``answer`` after the prompt; an image's own positions weigh nothing."""
    model_input = prompt
    for token in answer[:-1]:
        model_input = model_input.append_int(token)
    num_before = (length or prompt.length) - 1
    inputs = {
        "target_tokens": np.array([0] * num_before + answer, np.int64),
        "weights": np.array([0.0] * num_before + [1.0] * len(answer), np.float32),
    }
    return types.Datum(model_input=model_input, loss_fn_inputs=inputs)


def sample(sampler, prompt, **params):
    params = types.SamplingParams(**{"max_tokens": 6, "seed": 1, "stop": [], **params})
    return sampler.sample(prompt, 2, params).result().sequences


def test_a_model_learns_what_a_picture_means(seeing):
    """The same text with another picture has another answer, so that only the picture tells."""
    trainer = seeing.create_lora_training_client(SEEING, rank=16, seed=5)
    prompts = [prompt_of(image(seed)) for seed in (0, 4)]
    data = [datum_of(prompt, tokens_of(3, 40 + i)) for i, prompt in enumerate(prompts)]
    losses = [step(trainer, data, learning_rate=1e-2).metrics["loss:sum"] for _ in range(12)]
    assert losses[-1] < 0.1 * losses[0]
    sampler = trainer.save_weights_and_get_sampling_client()
    for i, prompt in enumerate(prompts):
        for sequence in sample(sampler, prompt, max_tokens=3, temperature=0.0):
            assert list(sequence.tokens) == tokens_of(3, 40 + i)


def test_logprobs_of_the_sampler_are_the_trainers(run):
    step(run, [datum_of(prompt_of(image()), tokens_of(6, 9))])
    sampler = run.save_weights_and_get_sampling_client()
    prompt = prompt_of(image(1), image(3, 30, data=png(50, 40, 3)))
    assert prompt.length == 5 + 2 * (2 + 4) + NUM_TOKENS + 30
    for sequence in sample(sampler, prompt):
        expected = current_logprobs(run, [datum_of(prompt, list(sequence.tokens))])[-6:]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_prompt_logprobs_skip_the_image_and_are_the_trainers(run):
    sampler = run.save_weights_and_get_sampling_client()
    prompt = prompt_of(image())
    found = sampler.compute_logprobs(prompt).result()
    assert len(found) == prompt.length
    first = 5 + 1
    assert [i for i, value in enumerate(found) if value is None] == [0, *range(first, first + NUM_TOKENS)]
    rest = [VISION_END, *tokens_of(4, 2)]
    begin = types.ModelInput(chunks=prompt.chunks[:3])
    expected = current_logprobs(run, [datum_of(begin, rest)])[-len(rest) :]
    np.testing.assert_allclose(found[-len(rest) :], expected, atol=1e-4)


def test_other_pictures_give_other_logprobs_and_equal_ones_the_same(run):
    sampler = run.save_weights_and_get_sampling_client()
    prompts = [prompt_of(image(0)), prompt_of(image(4)), prompt_of(image(0))]
    first, other, same = (sampler.compute_logprobs(prompt).result()[-4:] for prompt in prompts)
    np.testing.assert_allclose(first, same, atol=1e-5)
    assert np.abs(np.subtract(first, other)).max() > 1e-3


def test_a_batch_of_text_and_images_equals_each_alone(run):
    data = [
        datum_of(prompt_of(image(0), image(4)), tokens_of(3, 50)),
        datum_of(types.ModelInput.from_ints(tokens_of(12, 51)), tokens_of(3, 52)),
        datum_of(prompt_of(image(1)), tokens_of(3, 53)),
    ]
    together = logprobs(run.forward(data, "cross_entropy").result())
    for one, found in zip(data, together, strict=True):
        np.testing.assert_allclose(current_logprobs(run, [one]), found, atol=2e-5)


def test_jpeg_and_no_expected_tokens(run, seeing):
    sampler = seeing.create_sampling_client(base_model=SEEING)
    photo = image(data=file_of(picture(24, 40), "jpeg"), format="jpeg")
    uncounted = image(data=photo.data, format="jpeg", expected_tokens=None)
    counted, guessed = (sampler.compute_logprobs(prompt_of(chunk)).result() for chunk in (photo, uncounted))
    assert len(counted) == len(guessed) == prompt_of(photo).length
    np.testing.assert_allclose(counted[-4:], guessed[-4:], atol=1e-5)
    length = prompt_of(photo).length
    found = current_logprobs(run, [datum_of(prompt_of(uncounted), tokens_of(2, 8), length)])
    np.testing.assert_allclose(found, current_logprobs(run, [datum_of(prompt_of(photo), tokens_of(2, 8))]), atol=1e-5)


def test_usage_counts_images_as_the_model_does(seeing_server):
    """Although the sender did not count them."""
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = (start, start + timedelta(hours=2))
    prompt, length = prompt_of(image(5, None)), prompt_of(image(5)).length
    with tinker.ServiceClient(base_url=seeing_server.url, api_key="tml-any") as service:
        identifier = service.holder.get_session_id()
        trainer = service.create_lora_training_client(SEEING, rank=RANK)
        trainer.forward([datum_of(prompt, [5], length)], "cross_entropy").result()
        sample(service.create_sampling_client(base_model=SEEING), prompt)
    admin = tinker.AdminClient(base_url=seeing_server.url, api_key="tml-any")

    def counts():
        found = Counter()
        for event in admin.get_billing_usage(*hours).result().data:
            if event.session_id == identifier:
                found[event.event_info.type] += event.event_info.token_count
        return found

    eventually(lambda: counts().keys() >= {"training", "sampling_sample"})
    # What was found in the cache counts as a prompt, too.
    assert counts() == {"training": length, "sampling_prefill": length, "sampling_sample": 12}


# ── pointers ──────────────────────────────────────────────────────────────────────────────────────────


def pointer(location, **fields):
    return types.ImageAssetPointerChunk(**{"location": location, "format": "png", **fields})


def test_a_pointer_that_holds_its_image_is_read(seeing):
    sampler = seeing.create_sampling_client(base_model=SEEING)
    location = "data:image/png;base64," + base64.b64encode(png(24, 40)).decode()
    by_pointer = sampler.compute_logprobs(prompt_of(pointer(location, expected_tokens=NUM_TOKENS))).result()
    by_bytes = sampler.compute_logprobs(prompt_of(image())).result()
    np.testing.assert_allclose(by_pointer[-4:], by_bytes[-4:], atol=1e-5)


NOT_OPENED = {
    "http": "http://127.0.0.1:1/a.png",
    "https": "https://example.org/a.png",
    "metadata": "http://169.254.169.254/latest/meta-data/",
    "file": "file:///etc/passwd",
    "path": "/etc/hostname",
    "relative": "../a.png",
    "bucket": "s3://bucket/a.png",
    "tinker": "tinker://run/weights/a",
    "other data": "data:text/html;base64,AAAA",
    "bare data": "data:image/png,AAAA",
    "empty": "",
}


@pytest.mark.parametrize("location", NOT_OPENED.values(), ids=NOT_OPENED)
def test_no_location_is_opened(seeing, location):
    sampler = seeing.create_sampling_client(base_model=SEEING)
    with pytest.raises(REFUSED) as refusal:
        sampler.compute_logprobs(prompt_of(pointer(location, expected_tokens=NUM_TOKENS))).result()
    assert "'image_asset_pointer'" in str(refusal.value)
    assert repr(location) in str(refusal.value)
    assert "not opened" in str(refusal.value)


def test_a_pointer_with_broken_data_is_refused(seeing):
    sampler = seeing.create_sampling_client(base_model=SEEING)
    for location, fields, words in (
        ("data:image/png;base64,%%%", {}, "not base64"),
        ("data:image/jpeg;base64,AAAA", {}, "'jpeg'"),
    ):
        with pytest.raises(REFUSED, match=words):
            sampler.compute_logprobs(prompt_of(pointer(location, expected_tokens=4, **fields))).result()


def test_pointers_are_not_trained_on(seeing):
    """The SDK refuses them itself, and has then used a number of the run that the server waits for."""
    trainer = seeing.create_lora_training_client(SEEING, rank=RANK)
    chunk = pointer("https://example.org/a.png", expected_tokens=NUM_TOKENS)
    with pytest.raises(Exception, match=r"(?i)asset_?pointer"):
        trainer.forward([datum_of(prompt_of(chunk), [5])], "cross_entropy").result()


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────


def assert_goes_on(run):
    assert np.isfinite(current_logprobs(run, [datum_of(prompt_of(image()), [5])])).all()


def test_a_wrong_number_of_expected_tokens_is_refused_with_both(run, seeing):
    wrong = prompt_of(image(expected_tokens=NUM_TOKENS + 2))
    words = rf"chunks\[2\] has expected_tokens {NUM_TOKENS + 2}.* {NUM_TOKENS} tokens"
    with pytest.raises(REFUSED, match=words):
        run.forward_backward([datum_of(wrong, [5])], "cross_entropy").result()
    with pytest.raises(REFUSED, match=words):
        seeing.create_sampling_client(base_model=SEEING).compute_logprobs(wrong).result()
    assert_goes_on(run)


BROKEN = broken_files()


@pytest.mark.parametrize(("data", "kind", "words"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_picture_is_refused_and_the_server_goes_on(run, seeing, data, kind, words):
    prompt = prompt_of(image(data=data, format=kind))
    with pytest.raises(REFUSED) as refusal:
        run.forward_backward([datum_of(prompt, [5])], "cross_entropy").result()
    assert all(word in str(refusal.value) for word in ["chunks[2]", *words]), str(refusal.value)
    with pytest.raises(REFUSED) as refusal:
        seeing.create_sampling_client(base_model=SEEING).sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
    assert all(word in str(refusal.value) for word in ["prompt.chunks[2]", *words]), str(refusal.value)
    assert_goes_on(run)


def test_too_many_bytes_and_too_many_images_are_refused(run):
    with pytest.raises(tinker.APIStatusError, match=r"chunks\[2\] in bytes is \d{6}; at most 100000 .*max_image_bytes"):
        run.forward([datum_of(prompt_of(image(data=bytes(100_001))), [5])], "cross_entropy").result()
    many = prompt_of(*[image(2, 4, data=png(16, 16))] * 65)
    with pytest.raises(tinker.APIStatusError, match=r"is 65; at most 64 is accepted \(max_images_per_datum\)"):
        run.forward([datum_of(many, [5])], "cross_entropy").result()
    assert_goes_on(run)


def test_a_model_that_reads_text_refuses_images_by_name(service, trainer):
    words = rf"chunks\[2\] is of type 'image', which '{MODEL}' does not read: it reads text only"
    with pytest.raises(tinker.BadRequestError, match=words):
        trainer.forward_backward([datum_of(prompt_of(image()), [5])], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match=words):
        service.create_sampling_client(base_model=MODEL).compute_logprobs(prompt_of(image())).result()
    plain = datum_of(types.ModelInput.from_ints(tokens_of(9, 1)), [5])
    assert np.isfinite(step(trainer, [plain]).metrics["loss:sum"])
