"""Images of conversations on their way into a model's input: out of data URLs, and to where placeholders stand.

Chat templates write one placeholder token for each image. Here it makes room for the image itself; how many tokens that
is, the model says. No address is opened.
"""

import base64
import re
from collections.abc import Sequence

from lorimer.errors import InvalidInput, Unsupported
from lorimer.types.model_input import EncodedTextChunk, ImageChunk, ModelInput, ModelInputChunk

_DATA_URL = re.compile(r"data:image/(png|jpeg|jpg);base64,")
_SHOWN_CHARS = 80


def image_of_url(url: str, where: str) -> ImageChunk:
    """The image that a ``data:`` URL holds; any other URL is refused unopened."""
    header = _DATA_URL.match(url)
    if header is None:
        shown = url if len(url) <= _SHOWN_CHARS else url[:_SHOWN_CHARS] + "..."
        raise Unsupported(
            f"{where} is {shown!r}, which is not opened: nothing is fetched from hosts or disks; accepted are URLs that"
            " hold the image, 'data:image/png;base64,...' or 'data:image/jpeg;base64,...'"
        )
    try:
        data = base64.b64decode(url[header.end() :], validate=True)
    except ValueError:  # binascii.Error, or a character beyond ASCII
        raise InvalidInput(f"{where} is a data URL whose data are not base64") from None
    return ImageChunk(data=data, format="png" if header[1] == "png" else "jpeg")


def places_of(tokens: Sequence[int], placeholder: int | None) -> list[int]:
    """Where images belong among the tokens that a template wrote."""
    return [] if placeholder is None else [place for place, token in enumerate(tokens) if token == placeholder]


def with_images(tokens: Sequence[int], places: Sequence[int], images: Sequence[ImageChunk]) -> ModelInput:
    """The tokens with an image instead of the placeholder at each of the places."""
    chunks: list[ModelInputChunk] = []
    done = 0
    for place, image in zip(places, images, strict=True):
        if place > done:
            chunks.append(EncodedTextChunk(tokens=tokens[done:place]))
        chunks.append(image)
        done = place + 1
    if done < len(tokens):
        chunks.append(EncodedTextChunk(tokens=tokens[done:]))
    return ModelInput(chunks=chunks)
