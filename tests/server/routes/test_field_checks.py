"""Limits of one request: what just fits passes, one more is refused with both numbers."""

import numpy as np
import pytest

from lorimer import types
from lorimer.errors import InvalidInput, TooLarge, Unsupported
from lorimer.server import data_checks
from lorimer.server.routes import field_checks
from lorimer.server.settings import Settings
from lorimer.types import optim as optim_types
from lorimer.types import training as training_types

SETTINGS = Settings(
    max_string_chars=64,
    max_metadata_bytes=64,
    max_datums_per_operation=3,
    max_tokens_per_datum=5,
    max_tokens_per_operation=12,
    max_samples_per_request=4,
    max_sample_tokens=10,
    max_stop_sequences=2,
    max_stop_chars=6,
)


def training(*lengths):
    data = [types.Datum(model_input=types.ModelInput.from_ints([1] * length), loss_fn_inputs={}) for length in lengths]
    return types.TrainingRequest("m", 1, data, "cross_entropy")


@pytest.mark.parametrize("lengths", [(5,), (4, 4, 4), (1, 1, 1)], ids=str)
def test_training_within_limits_passes(lengths):
    data_checks.check_training(SETTINGS, training(*lengths))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ((1, 1, 1, 1), ["datums is 4", "at most 3", "max_datums_per_operation"]),
        ((5, 6), ["data[1] is 6", "at most 5", "max_tokens_per_datum"]),
        ((5, 5, 3), ["tokens is 13", "at most 12", "max_tokens_per_operation"]),
    ],
    ids=["datums", "tokens of a datum", "tokens"],
)
def test_training_beyond_limits_is_refused(lengths, words):
    with pytest.raises(TooLarge) as refused:
        data_checks.check_training(SETTINGS, training(*lengths))
    assert all(word in str(refused.value) for word in words)


def sample(prompt=(1, 2), num_samples=1, **params):
    return types.SampleRequest(
        prompt=types.ModelInput.from_ints(list(prompt)),
        num_samples=num_samples,
        sampling_params=types.SamplingParams(**params),
    )


def test_sample_within_limits_passes():
    data_checks.check_sample(SETTINGS, sample([1] * 5, 4, max_tokens=10, stop=["x" * 6, "y"]))
    data_checks.check_sample(SETTINGS, sample(stop=[3, 4]))
    data_checks.check_sample(SETTINGS, sample(stop=[]))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (sample([1] * 6), ["prompt is 6", "at most 5"]),
        (sample(num_samples=5), ["num_samples is 5", "at most 4"]),
        (sample(max_tokens=11), ["max_tokens is 11", "at most 10"]),
        (sample(stop=["a", "b", "c"]), ["is 3", "at most 2"]),
        (sample(stop="x" * 7), ["is 7", "at most 6"]),
    ],
    ids=["prompt", "samples", "max_tokens", "stops", "long stop"],
)
def test_sample_beyond_limits_is_refused(request_, words):
    with pytest.raises(TooLarge) as refused:
        data_checks.check_sample(SETTINGS, request_)
    assert all(word in str(refused.value) for word in words)


def test_texts_and_metadata_have_limits():
    field_checks.check_text(SETTINGS, name="x" * 64, other=None)
    with pytest.raises(TooLarge, match="length of name is 65; at most 64"):
        field_checks.check_text(SETTINGS, name="x" * 65)
    with pytest.raises(InvalidInput, match="name holds a NUL"):
        field_checks.check_text(SETTINGS, name="a\0b")
    field_checks.check_metadata(SETTINGS, {"k": "x" * 50})
    with pytest.raises(TooLarge, match="user_metadata in bytes is 68; at most 64"):
        field_checks.check_metadata(SETTINGS, {"k": "x" * 60})


def test_metadata_comes_back_as_text():
    given = {"text": "a", "int": 1, "float": 0.5, "none": None, "yes": True, "list": [1, {"a": "b"}]}
    assert field_checks.text_metadata(given) == {
        "text": "a",
        "int": "1",
        "float": "0.5",
        "none": "null",
        "yes": "true",
        "list": '[1,{"a":"b"}]',
    }
    assert field_checks.text_metadata(None) is None


def test_names_of_losses_and_optimizers_are_those_the_engine_has():
    from lorimer.engine.training.losses import LOSSES
    from lorimer.engine.training.optim import OPTIMIZERS

    assert set(training_types.LOSSES) == {*LOSSES, "custom"}
    assert set(optim_types.OPTIMIZERS) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", [*training_types.LOSSES, "stable_reinforce", "Cross_Entropy", ""])
def test_unknown_losses_are_refused_with_those_there_are(name):
    if name in training_types.LOSSES:
        data_checks.check_loss(name)
        return
    with pytest.raises(Unsupported if name == "stable_reinforce" else InvalidInput, match="cross_entropy"):
        data_checks.check_loss(name)


def test_chunks_that_no_model_reads_are_refused_by_name():
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=3)
    audio = types.DmelChunk(dmel=bytes([0, 1, 2]) + bytes(8))
    pointer = types.ImageAssetPointerChunk(location="https://example.org/a.png", format="png")
    for chunk, name in ((audio, "dmel"), (pointer, "image_asset_pointer")):
        with pytest.raises(Unsupported, match=rf"data\[0\]\.chunks\[1\] is of type '{name}'"):
            data_checks.check_chunks("data[0]", types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), chunk]))
    tokens = types.EncodedTextChunk.from_array(np.arange(7, dtype=np.int32))
    assert (
        data_checks.check_chunks("prompt", types.ModelInput(chunks=[tokens, types.EncodedTextChunk(tokens=[1, 2])]))
        == 9
    )
    assert data_checks.check_chunks("prompt", types.ModelInput(chunks=[tokens, image])) == 10
