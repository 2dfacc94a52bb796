"""Decode untrusted image files.

Only the decoder of the declared format reads the bytes, and the size in the header is compared with the limit before
pixels are allocated. Damaged, truncated, mislabelled and too large files are refused. ``vision.py`` uses the pictures.
"""

import io
import warnings

from PIL import Image

from lorimer.engine.messages import ImageFormat
from lorimer.errors import InvalidInput, TooLarge


def open_picture(data: bytes, file_format: ImageFormat, max_pixels: int, where: str) -> Image.Image:
    """Decode the first picture in ``data`` as RGB.

    The EXIF orientation is ignored: pixels are used as they are stored.
    """
    name = file_format.upper()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            # Reads the header only.
            picture: Image.Image = Image.open(io.BytesIO(data), formats=[name])
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            raise _too_large(where, f"more than {Image.MAX_IMAGE_PIXELS}", max_pixels) from None
        except Exception:  # decoders raise many types of errors, with messages for programmers
            raise InvalidInput(
                f"{where} is no {name} file, which its format {file_format!r} says it is; accepted are whole PNG and"
                " JPEG files under their own formats"
            ) from None
        if picture.width * picture.height > max_pixels:
            raise _too_large(where, f"{picture.width} x {picture.height}", max_pixels)
        try:
            picture.load()
            return picture.convert("RGB")
        except Exception:
            raise InvalidInput(
                f"{where} is a {name} file that is damaged or cut off; a whole one is accepted"
            ) from None


def _too_large(where: str, size: str, max_pixels: int) -> TooLarge:
    return TooLarge(f"{where} has {size} pixels; at most {max_pixels} in all are accepted (max_image_pixels)")
