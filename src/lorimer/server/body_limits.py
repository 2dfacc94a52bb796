"""Size limits for the bodies of each kind of route, checked before anything is built from them."""

from dataclasses import dataclass

from lorimer.server.settings import MIB, Settings
from lorimer.types.encoding import TrainingLimits
from lorimer.types.evaluations import MAX_GRADES, MAX_ITEMS
from lorimer.types.json_bounds import JsonLimits

_VALUES_PER_CONTAINER = 10
"""The average for small bodies: a list costs about as much as this many numbers."""
_LOSS_VALUES = 2**17
_LOSS_CONTAINERS = 2**15
"""More than twice what the engine accepts as a graph."""
_CHUNKS = 4096
"""The maximum number of lists and objects in a prompt or a chat."""
_TARGETS = 2**24
"""The maximum number of cells in ``target_prompt_logprobs``."""
_ROLLOUTS_BYTES = 16 * MIB
_ROLLOUTS_CONTAINERS = 2**17
"""The maximum number of turns, calls and lists of tokens in one report of rollouts."""
_METRIC_BYTES = 256
"""The estimated size of a metric value with its name."""

_EVALUATION_BYTES = 32 * MIB
_EVALUATION_CONTAINERS = 1000


@dataclass(frozen=True)
class BodyLimits:
    """The limits of one kind of route."""

    max_bytes: int
    """The limit after decompression."""
    setting: str
    """The setting that ``max_bytes`` comes from."""
    json: JsonLimits


def small_limits(settings: Settings) -> BodyLimits:
    """Return the limits of routes without training data or prompts; such bodies are quick to parse."""
    values = settings.max_json_values
    json = JsonLimits(settings.max_json_depth, values, values // _VALUES_PER_CONTAINER)
    return _capped_limits(settings, settings.max_small_body_bytes, "max_small_body_bytes", json)


def loss_limits(settings: Settings) -> BodyLimits:
    json = JsonLimits(settings.max_json_depth, _LOSS_VALUES, _LOSS_CONTAINERS, "custom losses")
    return _capped_limits(settings, settings.max_custom_loss_bytes, "max_custom_loss_bytes", json)


def sample_limits(settings: Settings) -> BodyLimits:
    """Return the limits of a prompt as numbers, plus the tokens to score at each of its positions."""
    json = JsonLimits(settings.max_json_depth, settings.max_tokens_per_datum + _TARGETS, _CHUNKS, "samples")
    return BodyLimits(settings.max_decompressed_bytes, "max_decompressed_bytes", json)


def chat_limits(settings: Settings) -> BodyLimits:
    """Return the limits of messages with images, or of prompts as numbers."""
    json = JsonLimits(settings.max_json_depth, 2 * settings.max_tokens_per_datum, _CHUNKS, "max_tokens_per_datum")
    return _capped_limits(settings, settings.max_chat_bytes, "max_chat_bytes", json)


def metrics_limits(settings: Settings) -> BodyLimits:
    max_values = settings.max_metric_values_per_request
    json = JsonLimits(
        settings.max_json_depth, 6 * max_values + 100, 2 * max_values + 100, "max_metric_values_per_request"
    )
    return _capped_limits(settings, max(MIB, _METRIC_BYTES * max_values), "max_metric_values_per_request", json)


def rollout_limits(settings: Settings) -> BodyLimits:
    """Return the limits of turns with their tokens; a number and its comma take two bytes or more."""
    max_bytes = max(_ROLLOUTS_BYTES, settings.max_rollout_bytes)
    json = JsonLimits(settings.max_json_depth, max_bytes // 2, _ROLLOUTS_CONTAINERS, "max_rollout_bytes")
    return _capped_limits(settings, max_bytes, "max_rollout_bytes", json)


def evaluation_limits(settings: Settings) -> BodyLimits:
    """Return the limits of the grades of an evaluation."""
    values = MAX_ITEMS + MAX_GRADES + settings.max_json_values
    json = JsonLimits(settings.max_json_depth, values, _EVALUATION_CONTAINERS, "evaluations")
    return _capped_limits(settings, _EVALUATION_BYTES, "evaluations", json)


def training_data_limits(settings: Settings) -> BodyLimits:
    """Return the limits of rows sent as the text of a file: few JSON values, of which two are large."""
    values = settings.max_json_values
    json = JsonLimits(settings.max_json_depth, values, values // _VALUES_PER_CONTAINER)
    # Quotes and line ends of JSON within JSON take two bytes each.
    return _capped_limits(settings, 2 * settings.max_training_data_bytes + MIB, "max_training_data_bytes", json)


def training_body_limits(settings: Settings) -> BodyLimits:
    return BodyLimits(settings.max_decompressed_bytes, "max_decompressed_bytes", training_limits(settings).json)


def training_limits(settings: Settings) -> TrainingLimits:
    return TrainingLimits(settings.max_datums_per_operation, settings.max_tokens_per_operation, settings.max_json_depth)


def _capped_limits(settings: Settings, max_bytes: int, setting: str, json: JsonLimits) -> BodyLimits:
    if settings.max_decompressed_bytes < max_bytes:
        return BodyLimits(settings.max_decompressed_bytes, "max_decompressed_bytes", json)
    return BodyLimits(max_bytes, setting, json)
