"""Images of conversations on their way into a model's input: out of data URLs, and to where placeholders stand.

Chat templates write one placeholder token for each image. Here it makes room for the image itself; how many tokens that
is, the model says. No address is opened.
"""

from collections.abc import Sequence

from lorimer.errors import Unsupported
from lorimer.types.model_input import (
    DATA_URLS,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    image_in_url,
    shortened,
)


def image_of_url(url: str, where: str) -> ImageChunk:
    """The image that a ``data:`` URL holds; any other URL is refused unopened."""
    image = image_in_url(url, where)
    if image is None:
        raise Unsupported(
            f"{where} is {shortened(url)!r}, which is not opened: nothing is fetched from hosts or disks; accepted are"
            f" URLs that hold the image, {DATA_URLS}"
        )
    return image


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
