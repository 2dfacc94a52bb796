"""Images between tokens: out of data URLs, and into the places of placeholders."""

import base64

import pytest

from lorimer.errors import InvalidInput, Unsupported
from lorimer.types import EncodedTextChunk, ImageChunk
from lorimer.types.images import image_of_url, places_of, with_images

IMAGES = [ImageChunk(data=bytes([number]), format="png", expected_tokens=5) for number in range(3)]
PAD = 7


@pytest.mark.parametrize(("kind", "expected"), [("png", "png"), ("jpeg", "jpeg"), ("jpg", "jpeg")])
def test_a_url_that_holds_its_image(kind, expected):
    found = image_of_url(f"data:image/{kind};base64,{base64.b64encode(b'some bytes').decode()}", "it")
    assert (found.data, found.format, found.expected_tokens) == (b"some bytes", expected, None)


@pytest.mark.parametrize("url", ["http://a/b.png", "", "/etc/hostname", "DATA:image/png;base64,AAAA", "data:,AAAA"])
def test_any_other_is_not_opened(url):
    with pytest.raises(Unsupported) as refusal:
        image_of_url(url, "it")
    assert f"it is {url!r}, which is not opened" in str(refusal.value)


@pytest.mark.parametrize("data", ["%%%", "AAA", "\u00e9\u00e9\u00e9\u00e9", "AA AA"])
def test_data_that_are_not_base64(data):
    with pytest.raises(InvalidInput, match="it is a data URL whose data are not base64"):
        image_of_url("data:image/png;base64," + data, "it")


def test_a_long_url_is_not_repeated_in_full():
    with pytest.raises(Unsupported) as refusal:
        image_of_url("data:image/webp;base64," + "A" * 10_000, "it")
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, PAD, 2], [[1], 0, [2]]),
        ([PAD, PAD, 2, 3], [0, 1, [2, 3]]),
        ([1, PAD, PAD, PAD], [[1], 0, 1, 2]),
        ([1, 2], [[1, 2]]),
    ],
)
def test_images_take_the_places_of_placeholders(tokens, expected):
    places = places_of(tokens, PAD)
    found = with_images(tokens, places, IMAGES[: len(places)])
    shape = [c.tokens if isinstance(c, EncodedTextChunk) else IMAGES.index(c) for c in found.chunks]
    assert shape == expected
    assert found.length == len(tokens) + 4 * len(places)


def test_without_a_placeholder_there_is_no_place():
    assert places_of([1, PAD], None) == []
