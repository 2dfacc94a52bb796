"""Images of conversations: a part of a message becomes a chunk, and sequences with chunks of images become numbers.

A part holds a picture of Pillow or a ``data:`` URL, as those of the official cookbook and of OpenAI's API do; no
address is opened. How many tokens an image is, an image processor of ``transformers`` tells; where they stand in a
conversation, the chat template (``template_renderer.py``).
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
"""What Qwen's and Llava's templates write for an image, unless the tokenizer has a name for it."""


def parts_of(message: Message) -> list[dict[str, Any]]:
    """The texts and images of a message, without what it thinks."""
    content = message["content"] or []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [dict(part) for part in content if part["type"] != "thinking"]


def has_images(message: Message) -> bool:
    return any(part["type"] in IMAGE_TYPES for part in parts_of(message))


def marked_parts(message: Message, mark: str) -> tuple[list[Any], list[Any]]:
    """Contents with the mark where the message's own begins, and where it ends: as a part, and within a text."""
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
    """The token that stands for an image in rendered text; ``written`` is what a template makes of one."""
    added: dict[str, int] = tokenizer.get_added_vocab()
    named = getattr(tokenizer, "image_token", None)
    known = [added[mark] for mark in ([str(named)] if named else PLACEHOLDERS) if mark in added]
    return next((token for token in known if token in written), None)


# ── from parts to chunks ──────────────────────────────────────────────────────────────────────────────


def images_of(messages: Sequence[Message], processor: Any) -> list[tuple[int, ImageChunk]]:
    """All images in order, each with the number of its message; their tokens are counted where there is a processor."""
    return [
        (index, image_chunk(part, f"image {number} of message {index}", processor))
        for index, message in enumerate(messages)
        for number, part in enumerate(part for part in parts_of(message) if part["type"] in IMAGE_TYPES)
    ]


def image_chunk(part: dict[str, Any], where: str, processor: Any) -> ImageChunk:
    """A picture of Pillow is sent as PNG, which loses nothing; what a URL holds, as it is."""
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
    """How many tokens a picture is, by an image processor that counts patches or by a model's whole processor."""
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
    """One value for each token as one for each position: images have 0 at all of theirs."""
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
    """An id for each position; 0 at those of images, which nothing predicts."""
    arrays = [
        np.zeros(chunk.length, np.int64) if isinstance(chunk, ImageChunk) else ModelInput(chunks=[chunk]).to_array()
        for chunk in model_input.chunks
    ]
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def first_positions(model_input: ModelInput, length: int) -> ModelInput:
    """The beginning of an input; an image is not cut."""
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
