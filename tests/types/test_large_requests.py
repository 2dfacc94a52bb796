"""Large training requests become bytes array by array: no Python object is made for each token."""

import numpy as np
import pytest

from lorimer.types import Datum, ModelInput, Tokens, TrainingRequest
from lorimer.types.encoding import decode_training_request, encode_training_request
from lorimer.types.model_input import EncodedTextChunk
from tests.memory import python_peak

NUM_TOKENS = 350_000
IDS = np.arange(NUM_TOKENS + 1) % 30_000 + 1000
"""Small integers exist already in Python; these do not."""


def request_of(model_input: ModelInput, targets: object) -> TrainingRequest:
    weights = np.ones(NUM_TOKENS, np.float32)
    return TrainingRequest("s:train:0", 1, [Datum(model_input, {"target_tokens": targets, "weights": weights})], "x")


@pytest.mark.parametrize("form", ["arrays", "lists"])
def test_body_of_five_megabytes_is_made_of_arrays(form):
    inputs, targets = (IDS[:-1], IDS[1:]) if form == "arrays" else (IDS[:-1].tolist(), IDS[1:].tolist())
    request = request_of(ModelInput.from_ints(inputs), targets)
    body = encode_training_request(request)
    assert len(body) > 5_000_000
    # Integers of Python and a list of them would take 36 bytes for each token, twice the body and more.
    assert python_peak(lambda: encode_training_request(request)) < 2 * len(body)
    read = decode_training_request(body, "application/x-protobuf", False).data[0]
    np.testing.assert_array_equal(read.model_input.to_array(), IDS[:-1])
    np.testing.assert_array_equal(read.loss_fn_inputs["target_tokens"].to_numpy(), IDS[1:])


def test_inputs_from_an_array_hold_an_array():
    model_input = ModelInput.from_ints(IDS[:-1])
    assert isinstance(model_input.chunks[0].tokens, Tokens)
    assert python_peak(lambda: ModelInput.from_ints(IDS[:-1])) < 2 * 4 * NUM_TOKENS


class Unreadable(Tokens):
    """Refuses to be looked at token by token."""

    def __getitem__(self, index):
        raise AssertionError("a token was read")

    def __iter__(self):
        raise AssertionError("the tokens were read one by one")


def test_tokens_are_written_from_their_array():
    chunk = EncodedTextChunk.model_construct(tokens=Unreadable(IDS[:-1].astype("<i4")))
    model_input = ModelInput.model_construct(chunks=[chunk])
    assert len(encode_training_request(request_of(model_input, model_input))) > 5_000_000
