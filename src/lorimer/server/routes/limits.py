"""What a request may hold: counts and lengths against the settings, and the names that we have.

A limit is answered with both numbers. Everything that needs the model, such as the range of tokens or the length of its
context, is checked behind the scheduler.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from lorimer.errors import InvalidInput, TooLarge, Unsupported
from lorimer.scheduler.translate import estimated_tokens
from lorimer.server.routes.ownership import is_id, quote_id
from lorimer.server.settings import Settings
from lorimer.types import EncodedTextChunk, ImageChunk, ModelInput, OptimizerConfig, SampleRequest
from lorimer.types.training import TrainingRequest

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "custom")
OPTIMIZERS = ("adamw",)
LEAST_TTL_SECONDS = 3600
MOST_TTL_SECONDS = 10 * 366 * 86_400
MAX_SEQ_ID = 2**31 - 1
"""Of a training operation; its protobuf form has 32 bits."""


def check_count(what: str, number: int, most: int, setting: str) -> None:
    if number > most:
        raise TooLarge(f"{what} is {number}; at most {most} is accepted ({setting})")


def check_text(settings: Settings, **texts: str | None) -> None:
    """Refuse fields that are longer than a name, an id or a sentence needs to be, or cannot be stored."""
    for field, text in texts.items():
        check_count(f"the length of {field}", len(text or ""), settings.max_string_chars, "max_string_chars")
        if not is_id(text or ""):
            raise InvalidInput(f"{field} holds a NUL character; any other text is accepted")


def check_metadata(settings: Settings, value: object, field: str = "user_metadata") -> None:
    size = len(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    check_count(f"the size of {field} in bytes", size, settings.max_metadata_bytes, "max_metadata_bytes")


def text_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata as it comes back: texts stay, anything else becomes its JSON."""
    if metadata is None:
        return None
    return {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in metadata.items()}


def check_seq_id(seq_id: int | None) -> int:
    if seq_id is None:
        raise InvalidInput("seq_id is missing; operations of a run are numbered 1, 2, 3 in order")
    if not 1 <= seq_id <= MAX_SEQ_ID:
        raise InvalidInput(f"seq_id is {seq_id!r}; 1 to {MAX_SEQ_ID} is accepted")
    return seq_id


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not LEAST_TTL_SECONDS <= ttl_seconds <= MOST_TTL_SECONDS:
        raise InvalidInput(
            f"ttl_seconds is {ttl_seconds!r}; {LEAST_TTL_SECONDS} (an hour) to {MOST_TTL_SECONDS} (ten years) "
            "or null is accepted"
        )
    return ttl_seconds


def check_optimizer(config: OptimizerConfig | None) -> None:
    """Dimuon's update is not published, so that it is refused rather than imitated."""
    if config is not None and config.type not in OPTIMIZERS:
        reason = "its update is not published" if config.type == "dimuon" else "it is not known"
        raise Unsupported(f"optimizer {quote_id(config.type)} is not available: {reason}; accepted is 'adamw'")


def check_chunks(where: str, model_input: ModelInput) -> int:
    """The number of tokens, estimated for images; audio is refused, for no served model hears, and so are pointers.

    Which model reads images is asked in ``images.py``, which turns pointers into what they hold.
    """
    for index, chunk in enumerate(model_input.chunks):
        if not isinstance(chunk, EncodedTextChunk | ImageChunk):
            raise Unsupported(
                f"{where}.chunks[{index}] is of type {chunk.type!r}, which no model of this server reads; "
                "accepted are 'encoded_text' and, of models that read images, 'image'"
            )
    return estimated_tokens(model_input)


def check_training(settings: Settings, request: TrainingRequest) -> None:
    """Refuse a loss that we do not have, or more data than one operation may bring.

    Provenance spans only say where tokens come from. No loss that we have reads them, so they are accepted and unused;
    the one that does, `stable_reinforce`, is refused.
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
        raise InvalidInput(f"loss_fn {quote_id(loss_fn)} is not known; accepted are {accepted}")


def check_sample(settings: Settings, request: SampleRequest) -> None:
    """Refuse a sample that is larger than the settings allow, or asks for what we do not have."""
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
