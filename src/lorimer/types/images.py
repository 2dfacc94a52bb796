"""Puts the images of a conversation into a model input: decodes data URLs and replaces placeholder tokens.

Chat templates write one placeholder token per image, which is replaced by the image itself; the model determines how
many tokens that takes. No URL is fetched.
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
    """Decode the image of a ``data:`` URL. Refuse any other URL without opening it."""
    image = image_in_url(url, where)
    if image is None:
        raise Unsupported(
            f"{where} is {shortened(url)!r}, which is not opened: nothing is fetched from hosts or disks; accepted are"
            f" URLs that hold the image, {DATA_URLS}"
        )
    return image


def places_of(tokens: Sequence[int], placeholder: int | None) -> list[int]:
    """Return the positions of the placeholder among the tokens."""
    return [] if placeholder is None else [place for place, token in enumerate(tokens) if token == placeholder]


def with_images(tokens: Sequence[int], places: Sequence[int], images: Sequence[ImageChunk]) -> ModelInput:
    """Replace the placeholder at each place by an image."""
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
