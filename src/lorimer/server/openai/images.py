"""Images in messages: read out of their URLs within the limits, and put where the chat template wants them.

What is in a file is the engine's question, as it is with images of the Tinker protocol.
"""

from collections.abc import Sequence

from lorimer.chat.templates import ChatTemplate
from lorimer.server.data_checks import check_count
from lorimer.server.openai.parameters import BadParameter
from lorimer.server.openai.schemas import ImagePart, Message
from lorimer.server.openai.text import TextModel
from lorimer.server.settings import Settings
from lorimer.types import ImageChunk, ModelInput
from lorimer.types.images import image_of_url, places_of, with_images


def images_of(
    messages: Sequence[Message], text: TextModel, template: ChatTemplate, settings: Settings
) -> list[ImageChunk]:
    """All images of a conversation in order; refused where the model reads none."""
    found = {
        f"messages[{index}].content[{number}]": part.image_url.url
        for index, message in enumerate(messages)
        for number, part in enumerate(message.parts)
        if isinstance(part, ImagePart)
    }
    reason = text.no_images or ("" if template.takes_parts else "its chat template has no place for images")
    if found and reason:
        detail = f"{next(iter(found))} is an image, which {text.name!r} does not read: {reason}; accepted are texts"
        raise BadParameter("messages", detail, "unsupported_parameter")
    most, what = settings.max_images_per_datum, "the number of images of messages"
    check_count(what, len(found), most, "max_images_per_datum")
    images = []
    for where, url in found.items():
        images.append(image_of_url(url, f"{where}.image_url.url"))
        what = f"the size of {where} in bytes"
        check_count(what, len(images[-1].data), settings.max_image_bytes, "max_image_bytes")
    return images


def prompt_with(images: Sequence[ImageChunk], tokens: list[int], text: TextModel) -> ModelInput:
    """What the model reads: the rendered tokens, with the images where their placeholders are."""
    places = places_of(tokens, text.image_token)
    if len(places) != len(images):
        placeholder = None if text.image_token is None else text.tokenizer.id_to_token(text.image_token)
        raise BadParameter(
            "messages",
            f"the chat template of {text.name!r} has {len(places)} places {placeholder!r} for the {len(images)} images"
            " of these messages; accepted are images where it has one for each, and texts that do not hold this mark",
            "unsupported_parameter",
        )
    return with_images(tokens, places, images)
