"""Image files for tests: pictures that differ everywhere, and files that are none."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def picture(width, height, seed=0):
    """Noise: no two places of it, and no two of these, look alike."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def file_of(image, kind="png", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width, height, seed=0):
    return file_of(picture(width, height, seed))


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width, height):
    """A few bytes that say they are a picture of this size, and would unpack to one."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts)


def broken_files():
    """By what is wrong with each: the bytes, the format they claim, and words of the refusal."""
    whole = png(40, 24)
    photo = file_of(picture(40, 24), "jpeg")
    return {
        "bomb": (bomb(50_000, 50_000), "png", ["pixels", "16777216", "max_image_pixels"]),
        "too large": (bomb(5000, 4000), "png", ["5000 x 4000 pixels", "16777216", "max_image_pixels"]),
        "truncated png": (whole[: len(whole) // 2], "png", ["PNG", "cut off"]),
        "truncated jpeg": (photo[: len(photo) // 2], "jpeg", ["JPEG", "cut off"]),
        "png that says jpeg": (whole, "jpeg", ["no JPEG file"]),
        "jpeg that says png": (photo, "png", ["no PNG file"]),
        "gif": (file_of(picture(9, 9), "gif"), "png", ["no PNG file"]),
        "webp": (file_of(picture(9, 9), "webp"), "jpeg", ["no JPEG file"]),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "png", ["no PNG file"]),
        "nothing": (b"", "png", ["no PNG file"]),
    }
