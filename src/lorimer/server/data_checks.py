"""Validates training data, prompts and metrics: counts and lengths against the settings, images, and supported losses.

An error names both the value and its limit. Checks that need the model, such as the token range or the context length,
happen behind the scheduler; ``routes/images.py`` checks whether a model reads images. Decoder processes import this
module, so it imports little.
"""

from collections.abc import Iterable

from lorimer.errors import InvalidInput, TooLarge, Unsupported
from lorimer.scheduler.translate import estimated_tokens
from lorimer.server.settings import Settings
from lorimer.types import EncodedTextChunk, ImageAssetPointerChunk, ImageChunk, ModelInput, SampleRequest
from lorimer.types.metrics import MAX_NAME_CHARS, ReportMetricsRequest
from lorimer.types.model_input import embedded_image
from lorimer.types.training import LOSSES, TrainingRequest

_SHOWN_CHARS = 200


def check_count(what: str, number: int, maximum: int, setting: str) -> None:
    if number > maximum:
        raise TooLarge(f"{what} is {number}; at most {maximum} is accepted ({setting})")


def check_chunks(where: str, model_input: ModelInput) -> int:
    """Return the number of tokens, estimated for images. Refuse audio, which no served model reads, and image pointers.

    ``with_bytes`` resolves pointers; ``routes/images.py`` checks whether the model reads images.
    """
    for index, chunk in enumerate(model_input.chunks):
        if not isinstance(chunk, EncodedTextChunk | ImageChunk):
            raise Unsupported(
                f"{where}.chunks[{index}] is of type {chunk.type!r}, which no model of this server reads; "
                "accepted are 'encoded_text' and, of models that read images, 'image'"
            )
    return estimated_tokens(model_input)


def check_training(settings: Settings, request: TrainingRequest) -> None:
    """Refuse an unsupported loss, empty data, or more data than one operation may bring.

    Provenance spans only say where tokens come from. No supported loss reads them, so they are accepted and ignored;
    `stable_reinforce`, which does, is refused.
    """
    check_loss(request.loss_fn)
    if not request.data:
        raise InvalidInput("data is empty; at least one datum is accepted")
    check_count(
        "the number of datums", len(request.data), settings.max_datums_per_operation, "max_datums_per_operation"
    )
    total = 0
    for index, datum in enumerate(request.data):
        tokens = check_chunks(f"data[{index}].model_input", datum.model_input)
        what = f"the number of tokens of data[{index}]"
        check_count(what, tokens, settings.max_tokens_per_datum, "max_tokens_per_datum")
        total += tokens
    check_count("the number of tokens", total, settings.max_tokens_per_operation, "max_tokens_per_operation")


def check_loss(loss_fn: str) -> None:
    accepted = ", ".join(LOSSES)
    if loss_fn == "stable_reinforce":
        raise Unsupported(
            "loss_fn 'stable_reinforce' is not available: its formula is not published and it needs data recorded "
            f"while sampling; accepted are {accepted}"
        )
    if loss_fn not in LOSSES:
        raise InvalidInput(f"loss_fn {loss_fn[:_SHOWN_CHARS]!r} is not known; accepted are {accepted}")


def check_sample(settings: Settings, request: SampleRequest) -> None:
    """Refuse a sample request that exceeds the settings or uses an unsupported option."""
    tokens = check_chunks("prompt", request.prompt)
    check_count("the number of tokens of the prompt", tokens, settings.max_tokens_per_datum, "max_tokens_per_datum")
    check_count("num_samples", request.num_samples, settings.max_samples_per_request, "max_samples_per_request")
    if request.num_samples < 1:
        raise InvalidInput(f"num_samples is {request.num_samples!r}; at least 1 is accepted")
    params = request.sampling_params
    check_count("max_tokens", params.max_tokens or 0, settings.max_sample_tokens, "max_sample_tokens")
    if request.record_stability_info:
        raise Unsupported(
            "record_stability_info is not available: it serves the loss 'stable_reinforce', "
            "whose formula is not published"
        )
    check_stops(settings, params.stop)


def check_stops(settings: Settings, stop: str | Iterable[str | int] | None) -> None:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    check_count("the number of stop sequences", len(stops), settings.max_stop_sequences, "max_stop_sequences")
    longest = max((len(item) for item in stops if isinstance(item, str)), default=0)
    check_count("the length of a stop sequence", longest, settings.max_stop_chars, "max_stop_chars")


def has_images(model_input: ModelInput) -> bool:
    return any(isinstance(chunk, ImageChunk | ImageAssetPointerChunk) for chunk in model_input.chunks)


def with_bytes(settings: Settings, where: str, model_input: ModelInput) -> ModelInput:
    """Resolve image pointers to bytes and check the images against the limits."""
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


def check_metrics(settings: Settings, request: ReportMetricsRequest) -> None:
    """Check how much a report has, and the names in it."""
    max_values, setting = settings.max_metric_values_per_request, "max_metric_values_per_request"
    check_count("the number of points", len(request.points), max_values, setting)
    check_count("the number of values", sum(len(point.values) for point in request.points), max_values, setting)
    for name in {name for point in request.points for name in point.values}:
        if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable() or "," in name:
            shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
            raise InvalidInput(
                f"a metric is called {shown!r}; 1 to {MAX_NAME_CHARS} printable characters without a comma are accepted"
            )
