"""Images of requests, before they are taken in: that the model reads any, how many and how large they are.

Pointers become the images they hold, so that nothing behind this knows of any; no location is opened. What is in a file
is the engine's question: it decodes in a process of its own, away from keys and the database.
"""

from dataclasses import replace

from lorimer.errors import Unsupported
from lorimer.server.context import Context
from lorimer.server.routes.limits import check_count
from lorimer.server.settings import Settings
from lorimer.types import ImageAssetPointerChunk, ImageChunk, ModelInput, SampleRequest
from lorimer.types.model_input import embedded_image
from lorimer.types.training import TrainingRequest


async def admit_training_images(context: Context, base_model: str, request: TrainingRequest) -> TrainingRequest:
    """The request with every image as bytes; one without images as it is."""
    if not any(has_images(datum.model_input) for datum in request.data):
        return request
    data = []
    for index, datum in enumerate(request.data):
        found = await _admit(context, base_model, f"data[{index}].model_input", datum.model_input)
        data.append(replace(datum, model_input=found))
    return replace(request, data=data)


async def admit_sample_images(context: Context, base_model: str, request: SampleRequest) -> SampleRequest:
    """As for training."""
    prompt = await _admit(context, base_model, "prompt", request.prompt)
    return request if prompt is request.prompt else request.model_copy(update={"prompt": prompt})


def has_images(model_input: ModelInput) -> bool:
    return any(isinstance(chunk, ImageChunk | ImageAssetPointerChunk) for chunk in model_input.chunks)


async def _admit(context: Context, base_model: str, where: str, model_input: ModelInput) -> ModelInput:
    if not has_images(model_input):
        return model_input
    found = with_bytes(context.settings, where, model_input)
    info = await context.scheduler.model_info(base_model)
    if info.no_images:
        index = next(i for i, chunk in enumerate(found.chunks) if isinstance(chunk, ImageChunk))
        raise Unsupported(
            f"{where}.chunks[{index}] is of type 'image', which {base_model!r} does not read: {info.no_images};"
            " accepted is 'encoded_text'"
        )
    return found


def with_bytes(settings: Settings, where: str, model_input: ModelInput) -> ModelInput:
    """The input with its pointers resolved and its images within the limits."""
    chunks = []
    num_images = 0
    for index, chunk in enumerate(model_input.chunks):
        name = f"{where}.chunks[{index}]"
        if isinstance(chunk, ImageAssetPointerChunk):
            chunk = embedded_image(chunk, name)
        if isinstance(chunk, ImageChunk):
            num_images += 1
            what = f"the size of {name} in bytes"
            check_count(what, len(chunk.data), settings.max_image_bytes, "max_image_bytes")
        chunks.append(chunk)
    what = f"the number of images of {where}"
    check_count(what, num_images, settings.max_images_per_datum, "max_images_per_datum")
    return ModelInput.model_construct(chunks=chunks)
