"""Image files become pictures, or are refused in our own words before they take memory."""

import resource
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from lorimer.engine.model.images import open_picture
from lorimer.errors import InvalidInput, TooLarge
from tests.engine.pictures import bomb, broken_files, file_of, picture, png, png_chunk

MOST = 2**24
BROKEN = broken_files()


def opened(data, kind="png", most=MOST):
    return open_picture(data, kind, most, "prompt.chunks[1]")


def test_pixels_come_out_as_they_were():
    image = picture(17, 5)
    assert np.array_equal(opened(file_of(image)), image)
    photo = file_of(image, "jpeg", quality=95)
    assert opened(photo, "jpeg").size == (17, 5)
    assert np.array_equal(opened(photo, "jpeg"), opened(photo, "jpeg"))


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "I;16"])
def test_every_mode_of_png_becomes_rgb(mode):
    image = Image.new("I;16", (6, 4), 4096) if mode == "I;16" else picture(6, 4).convert(mode)
    found = opened(file_of(image))
    assert (found.mode, found.size) == ("RGB", (6, 4))


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_every_mode_of_jpeg_becomes_rgb(mode):
    assert opened(file_of(picture(6, 4).convert(mode), "jpeg"), "jpeg").mode == "RGB"


def test_the_first_of_several_pictures_is_taken():
    first, second = picture(8, 8, 1), picture(8, 8, 2)
    assert np.array_equal(opened(file_of(first, save_all=True, append_images=[second])), first)


def test_a_note_on_how_to_turn_a_picture_is_not_followed():
    image = picture(12, 6)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert opened(file_of(image, "jpeg", exif=exif), "jpeg").size == (12, 6)


@pytest.mark.parametrize(("data", "kind", "words"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_whole_picture_is_refused(data, kind, words):
    with pytest.raises(InvalidInput) as refusal:
        opened(data, kind)
    text = str(refusal.value)
    assert text.startswith("prompt.chunks[1] ")
    assert all(word in text for word in words), text
    assert "PIL" not in text and "BytesIO" not in text


def test_a_bomb_takes_neither_memory_nor_time():
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for width, height in ((4097, 4096), (9000, 9000), (50_000, 50_000), (2**31 - 1, 1)):
        with pytest.raises(TooLarge, match="max_image_pixels"):
            opened(bomb(width, height))
    assert time.perf_counter() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KiB; the smallest would take 48 MiB


def test_a_picture_of_just_the_limit_is_accepted():
    assert opened(png(8, 8), most=64).size == (8, 8)
    with pytest.raises(TooLarge, match=r"8 x 8 pixels; at most 63 in all are accepted \(max_image_pixels\)"):
        opened(png(8, 8), most=63)


def test_text_that_unpacks_to_gigabytes_is_refused():
    whole = png(8, 8)
    text = png_chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(64 << 20)))
    with pytest.raises(InvalidInput, match="PNG"):
        opened(whole[:33] + text + whole[33:])


def test_a_file_with_another_behind_it_is_its_first():
    """Nothing but the decoder of the declared format looks at it."""
    image = picture(9, 7)
    assert np.array_equal(opened(file_of(image) + b"PK\x03\x04<script>"), image)
