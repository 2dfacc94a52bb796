"""Images of conversations: convert parts of messages to chunks, and sequences with image chunks to arrays.

A part holds a Pillow image or a ``data:`` URL, as in the official cookbook and in OpenAI's API; nothing is downloaded.
An image processor of ``transformers`` counts the tokens of an image; the chat template decides where they are
(``template_renderer.py``).
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lorimer.chat.conversation import Message
from lorimer.errors import InvalidInput
from lorimer.types import EncodedTextChunk, ImageChunk, ModelInput
from lorimer.types.images import image_of_url

IMAGE_TYPES = ("image", "image_url")
PLACEHOLDERS = ("<|image_pad|>", "<image>")
"""Image placeholders of Qwen's and Llava's templates, unless the tokenizer names its own."""


def parts_of(message: Message) -> list[dict[str, Any]]:
    """Return the texts and images of a message, without its thinking."""
    content = message["content"] or []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [dict(part) for part in content if part["type"] != "thinking"]


def has_images(message: Message) -> bool:
    return any(part["type"] in IMAGE_TYPES for part in parts_of(message))


def marked_parts(message: Message, mark: str) -> tuple[list[Any], list[Any]]:
    """Return contents with the mark at the beginning and at the end: as a part of its own, and within a text."""
    parts = parts_of(message)
    added = {"type": "text", "text": mark}
    begins, ends = [[added, *parts]], [[*parts, added]]
    texts = [number for number, part in enumerate(parts) if part["type"] == "text"]
    if texts:
        first, last = texts[0], texts[-1]
        begins.append([*parts[:first], added | {"text": mark + parts[first]["text"]}, *parts[first + 1 :]])
        ends.append([*parts[:last], added | {"text": parts[last]["text"] + mark}, *parts[last + 1 :]])
    return begins, ends


def placeholder_of(tokenizer: Any, written: Sequence[int]) -> int | None:
    """Return the placeholder token of an image; ``written`` are the tokens of a rendered image."""
    added: dict[str, int] = tokenizer.get_added_vocab()
    named = getattr(tokenizer, "image_token", None)
    known = [added[mark] for mark in ([str(named)] if named else PLACEHOLDERS) if mark in added]
    return next((token for token in known if token in written), None)


# ── from parts to chunks ──────────────────────────────────────────────────────────────────────────────


def images_of(messages: Sequence[Message], processor: Any) -> list[tuple[int, ImageChunk]]:
    """Return all images in order, each with the index of its message; a processor counts their tokens."""
    return [
        (index, image_chunk(part, f"image {number} of message {index}", processor))
        for index, message in enumerate(messages)
        for number, part in enumerate(part for part in parts_of(message) if part["type"] in IMAGE_TYPES)
    ]


def image_chunk(part: dict[str, Any], where: str, processor: Any) -> ImageChunk:
    """Convert a part to a chunk: encode a Pillow image as PNG, which is lossless; keep the bytes of a URL."""
    given = part.get("image") if part["type"] == "image" else (part.get("image_url") or {}).get("url")
    if isinstance(given, str):
        chunk = image_of_url(given, where)
        if processor is None:
            return chunk
        picture = _opened(chunk, where)
    else:
        picture = _picture(given, where)
        file = io.BytesIO()
        picture.save(file, "png")
        chunk = ImageChunk(data=file.getvalue(), format="png")
    if processor is None:
        return chunk
    return chunk.model_copy(update={"expected_tokens": num_tokens(picture, processor, where)})


def _opened(chunk: ImageChunk, where: str) -> Any:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(chunk.data), formats=[chunk.format.upper()])  # reads the header only
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"{where} is no {chunk.format.upper()} file, which its URL says it is: {error}") from None


def _picture(given: object, where: str) -> Any:
    from PIL import Image

    if not isinstance(given, Image.Image):
        raise InvalidInput(
            f"{where} is an image of type {type(given).__name__!r}; accepted are a PIL.Image.Image and a URL that"
            " holds one, 'data:image/png;base64,...' or 'data:image/jpeg;base64,...'"
        )
    return given.convert("RGB")


def num_tokens(picture: Any, processor: Any, where: str) -> int:
    """Count the tokens of a picture with an image processor that counts patches, or with a model's processor."""
    counts = getattr(processor, "image_processor", processor)
    if hasattr(counts, "get_number_of_image_patches"):
        try:
            return int(counts.get_number_of_image_patches(picture.height, picture.width, {}) // counts.merge_size**2)
        except ValueError as error:
            raise InvalidInput(f"{where} has {picture.width} x {picture.height} pixels: {error}") from None
    if not hasattr(processor, "image_token_id"):
        raise InvalidInput(
            f"{type(processor).__name__!r} cannot tell how many tokens an image is; accepted are image processors with"
            " get_number_of_image_patches, and processors of transformers with an image_token_id (AutoProcessor)"
        )
    written = processor(images=[picture.convert("RGB")], text=[processor.image_token])["input_ids"][0]
    return list(written).count(processor.image_token_id)


# ── sequences with images ─────────────────────────────────────────────────────────────────────────────


def spread(values: NDArray[np.float32], places: Sequence[int], images: Sequence[ImageChunk]) -> NDArray[np.float32]:
    """Expand values of tokens to values of positions; positions of images get 0."""
    lengths = np.ones(len(values), np.int64)
    spread_out = values.copy()
    for place, image in zip(places, images, strict=True):
        if image.expected_tokens is None:
            raise InvalidInput(
                "it is not known how many tokens an image is, so that its positions cannot be given weights; train with"
                " a renderer that has an image processor: get_renderer(name, tokenizer, image_processor)"
            )
        lengths[place], spread_out[place] = image.expected_tokens, 0
    return np.repeat(spread_out, lengths)


def ids_of(model_input: ModelInput) -> NDArray[np.int64]:
    """Return the token id of each position; 0 for positions of images, which are never predicted."""
    arrays = [
        np.zeros(chunk.length, np.int64) if isinstance(chunk, ImageChunk) else ModelInput(chunks=[chunk]).to_array()
        for chunk in model_input.chunks
    ]
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def first_positions(model_input: ModelInput, length: int) -> ModelInput:
    """Return the first ``length`` positions of an input; refuse to cut an image."""
    chunks: list[Any] = []
    for chunk in model_input.chunks:
        room = length - sum(one.length for one in chunks)
        if room <= 0:
            break
        if isinstance(chunk, EncodedTextChunk):
            chunk = EncodedTextChunk(tokens=chunk.tokens[:room])
        elif chunk.length > room:
            raise InvalidInput(f"position {length} is within an image, which cannot be cut; one outside is accepted")
        chunks.append(chunk)
    return ModelInput(chunks=chunks)
