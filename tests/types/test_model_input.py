"""Model inputs: chunks of every kind, from objects and from the JSON of any release."""

import base64
import pickle
import socket
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from pydantic import ValidationError
from tinker.types.dmel_chunk import DmelChunk as OfficialDmelChunk

from lorimer.errors import InvalidInput, Unsupported
from lorimer.types import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    SampleRequest,
    Tokens,
    validate,
)
from lorimer.types.model_input import embedded_image

CHUNKS = {
    "text": ({"tokens": [1, 2]}, EncodedTextChunk(tokens=[1, 2])),
    "image": ({"data": "AAE=", "format": "png"}, ImageChunk(data=b"\0\1", format="png")),
    "image with count": (
        {"data": "AAE=", "format": "jpeg", "expected_tokens": 4},
        ImageChunk(data=b"\0\1", format="jpeg", expected_tokens=4),
    ),
    "pointer": ({"location": "s3://a/b", "format": "png"}, ImageAssetPointerChunk(location="s3://a/b", format="png")),
    "dmel": ({"dmel": "AAIDBA=="}, DmelChunk(dmel=b"\0\2\3\4")),
}


@pytest.mark.parametrize("with_type", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize(("values", "chunk"), CHUNKS.values(), ids=CHUNKS)
def test_chunk_is_told_by_type_or_keys(values, chunk, with_type):
    if with_type:
        values = values | {"type": chunk.type}
    assert validate(ModelInput, {"chunks": [values]}).chunks == [chunk]


@pytest.mark.parametrize(("values", "chunk"), CHUNKS.values(), ids=CHUNKS)
def test_chunk_is_written_as_officially(values, chunk):
    official = getattr(tinker.types, type(chunk).__name__).model_validate(values)
    assert chunk.model_dump(mode="json") == official.model_dump(mode="json")
    assert ModelInput(chunks=[chunk]).model_dump_json() == tinker.ModelInput(chunks=[official]).model_dump_json()


WRONG = {
    "an unknown type": ({"type": "video", "tokens": [1]}, "encoded_text, image, image_asset_pointer or dmel"),
    "a number as type": ({"type": 5, "tokens": [1]}, "encoded_text, image, image_asset_pointer or dmel"),
    "no known key": ({"text": "hello"}, "encoded_text, image, image_asset_pointer or dmel"),
    "no object": ("hello", "encoded_text, image, image_asset_pointer or dmel"),
    "another key": ({"tokens": [1], "weight": 2}, r"chunks\[0\]\.encoded_text\.weight"),
    "tokens as text": ({"tokens": "12"}, r"chunks\[0\]\.encoded_text\.tokens"),
    "a token of 33 bits": ({"tokens": [1, 2**32]}, r"tokens\[1\].*2147483648"),
    "a fraction as token": ({"tokens": [1.5]}, r"tokens\[0\]"),
    "no base64": ({"data": "~~", "format": "png"}, "not base64"),
    "another format": ({"data": "AAE=", "format": "gif"}, "'png' or 'jpeg'"),
    "a negative count": ({"data": "AAE=", "format": "png", "expected_tokens": -1}, "expected_tokens"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG)
def test_wrong_chunk_is_refused(values, message):
    with pytest.raises(InvalidInput, match=message):
        validate(ModelInput, {"chunks": [values]})


def test_pointer_is_never_fetched(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    chunk = {"location": "http://127.0.0.1:9/a.png", "format": "png"}
    request = validate(SampleRequest, {"prompt": {"chunks": [chunk]}, "sampling_params": {}})
    assert request.prompt.chunks[0].location == "http://127.0.0.1:9/a.png"


def test_lengths():
    image = ImageChunk(data=b"", format="png", expected_tokens=5)
    pointer = ImageAssetPointerChunk(location="a", format="png", expected_tokens=7)
    assert ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2]), image, pointer]).length == 14
    assert ModelInput.empty().length == 0
    with pytest.raises(ValueError, match="expected_tokens"):
        _ = ImageChunk(data=b"", format="png").length


CONTAINERS = {
    "plain": (b"\0\2\x05\x03rest", 5),
    "constant": (b"\xfe\x01\x01\x09", 9),
    "two byte size": (b"\7\1\x80\x02", 256),
}


@pytest.mark.parametrize(("data", "length"), CONTAINERS.values(), ids=CONTAINERS)
def test_length_of_dmel_is_as_officially(data, length):
    assert DmelChunk(dmel=data).length == OfficialDmelChunk(dmel=data).length == length


WRONG_CONTAINERS = {
    "empty": (b"", "ends before its dtype"),
    "marker alone": (b"\xfe", "ends before its dtype"),
    "dtype": (b"\x08\1\1", "dtype 8"),
    "cut off": (b"\0\2\1", "ends within its header"),
    "no dimensions": (b"\0\0", "no length"),
    "endless size": (b"\0\1" + b"\xff" * 20, "64 bits"),
    "very many dimensions": (b"\0\xff\xff\xff\xff\x0f", "dimensions"),
}


@pytest.mark.parametrize(("data", "message"), WRONG_CONTAINERS.values(), ids=WRONG_CONTAINERS)
def test_wrong_dmel_has_no_length(data, message):
    with pytest.raises(ValueError, match=message):
        _ = DmelChunk(dmel=data).length


def test_inputs_are_built_from_tokens():
    start = ModelInput.from_ints([1, 2])
    longer = start.append_int(3).append(EncodedTextChunk(tokens=[4]))
    assert longer.to_ints() == [1, 2, 3, 4]
    assert longer.to_array().tolist() == [1, 2, 3, 4]
    assert start.to_ints() == [1, 2]
    assert ModelInput.empty().to_array().tolist() == []
    assert ModelInput.from_ints(np.array([5, 6])).to_ints() == [5, 6]
    with pytest.raises(ValueError, match="'image'"):
        start.append(ImageChunk(data=b"", format="png")).to_ints()


def test_arrays_and_tensors_stay_arrays():
    for given in (np.array([3, 1, 2]), torch.tensor([3, 1, 2]), Tokens(np.array([3, 1, 2]))):
        chunk = ModelInput.from_ints(given).chunks[0]
        assert isinstance(chunk.tokens, Tokens)
        assert chunk.tokens.array.dtype == np.int32
        assert chunk == EncodedTextChunk(tokens=[3, 1, 2])
    given = np.array([3, 1, 2], "<i4")
    chunk = EncodedTextChunk(tokens=given)
    given[0] = 5
    assert list(chunk.tokens) == [3, 1, 2]


NOT_TOKENS = {
    "a fraction": ([1, 2.5, 3.5], r"tokens\[1\] is 2.5; token ids are integers"),
    "an array of fractions": (np.array([1.0, 2.0]), "array of float64; integers"),
    "a batch": (np.array([[1, 2]]), r"shape \[1, 2\]; one dimension"),
    "33 bits": (np.array([1, 2**32]), "32 bits"),
    "text": ("Hello", r"the text 'Hello'.*tokenizer\.encode"),
    "a number": (5, "a int; a sequence of integers"),
}


@pytest.mark.parametrize(("tokens", "message"), NOT_TOKENS.values(), ids=NOT_TOKENS)
def test_what_are_no_tokens_is_explained_in_a_sentence(tokens, message):
    with pytest.raises(ValueError, match=message) as refused:
        ModelInput.from_ints(tokens)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", [True, "1", 1.0, np.True_, None])
def test_token_ids_are_integers_and_nothing_like_one(wrong):
    with pytest.raises(ValueError, match=r"tokens\[1\] is"):
        ModelInput.from_ints([5, wrong])


def test_integers_of_numpy_among_others_are_token_ids():
    tokens: list[Any] = [5, np.int64(6), np.uint8(7)]
    assert ModelInput.from_ints(tokens).to_ints() == [5, 6, 7]


def test_inputs_do_not_change():
    with pytest.raises(ValidationError):
        ModelInput.empty().chunks = []


def test_chunk_over_an_array_is_as_one_over_a_list():
    chunk = EncodedTextChunk.from_array(np.array([3, 1, 2], "<i4"))
    assert chunk == EncodedTextChunk(tokens=[3, 1, 2]) == chunk
    assert chunk != EncodedTextChunk(tokens=[3, 1])
    assert chunk.model_dump_json() == '{"tokens":[3,1,2],"type":"encoded_text"}'
    assert chunk.length == 3
    assert (chunk.tokens[0], chunk.tokens[-1], list(chunk.tokens), chunk.tokens[1:]) == (3, 2, [3, 1, 2], [1, 2])
    assert isinstance(chunk.tokens[0], int)
    assert repr(chunk.tokens) == "[3, 1, 2]"
    assert np.asarray(chunk.tokens, np.int64).tolist() == [3, 1, 2]
    assert pickle.loads(pickle.dumps(chunk)) == chunk
    assert ModelInput(chunks=[chunk]).append_int(4).to_ints() == [3, 1, 2, 4]
    assert Tokens(np.array([1])) != "1"


def test_bytes_survive_json():
    chunk = ImageChunk(data=bytes(range(256)), format="jpeg")
    assert base64.b64decode(chunk.model_dump()["data"]) == chunk.data
    assert ImageChunk.model_validate_json(chunk.model_dump_json()) == chunk


def test_a_pointer_may_hold_its_image():
    location = "data:image/jpeg;base64," + base64.b64encode(bytes(range(9))).decode()
    pointer = ImageAssetPointerChunk(location=location, format="jpeg", expected_tokens=3)
    assert embedded_image(pointer, "prompt") == ImageChunk(data=bytes(range(9)), format="jpeg", expected_tokens=3)


@pytest.mark.parametrize(
    ("location", "error", "message"),
    [
        ("https://example.org/a.png", Unsupported, "'https://example.org/a.png', which is not opened"),
        ("file:///a.png", Unsupported, "'file:///a.png', which is not opened"),
        ("/a.png", Unsupported, "accepted are images sent as bytes"),
        ("x" * 500, Unsupported, "'x{80}\\.\\.\\.'"),
        (" data:image/png;base64,AAAA", Unsupported, "not opened"),
        ("data:image/png;base64,A", InvalidInput, "not base64"),
        ("data:image/png;base64,\u00e9", InvalidInput, "not base64"),
        ("data:image/jpeg;base64,AAAA", InvalidInput, "format 'png' and a location of 'jpeg'"),
    ],
    ids=["https", "file", "path", "long", "space", "length", "letter", "format"],
)
def test_no_other_location_is_opened(location, error, message):
    with pytest.raises(error, match=message) as refused:
        embedded_image(ImageAssetPointerChunk(location=location, format="png"), "prompt.chunks[0]")
    assert str(refused.value).startswith("prompt.chunks[0] ")
