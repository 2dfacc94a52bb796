"""Training requests as JSON (forward and forward_backward), which releases up to 0.24 send."""

import math
from collections.abc import Collection
from typing import Any

import msgspec

from lorimer.errors import InvalidInput, TooLarge
from lorimer.types.base import validate
from lorimer.types.datum import Datum
from lorimer.types.json_bounds import JsonLimits, check_json, count_outside_strings, refuse_doubled_keys
from lorimer.types.model_input import ModelInput
from lorimer.types.tensor_json import tensor_from_json
from lorimer.types.training import TrainingRequest


def parse(body: bytes, limits: JsonLimits | None = None) -> dict[str, Any]:
    """Parse the object; with ``limits``, only after counting what it holds. Refuse duplicate keys."""
    try:
        counts = check_json(body, limits) if limits is not None else count_outside_strings(body)
        values = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise InvalidInput("the body is JSON nested too deeply") from None
    except TooLarge:
        raise
    except InvalidInput as error:
        raise InvalidInput(f"the body is not JSON that is accepted: {error}") from None
    if not isinstance(values, dict):
        raise InvalidInput("the body is JSON, but no object")
    refuse_doubled_keys(body, values, counts)
    return values


def address(values: dict[str, Any]) -> tuple[object, object]:
    return values.get("model_id"), values.get("seq_id")


def read(values: dict[str, Any], forward_only: bool, max_datums: int | None = None) -> TrainingRequest:
    field = "forward_input" if forward_only else "forward_backward_input"
    _check_keys(values, ("model_id", "seq_id", field, "type"), "")
    inputs = _object(values.get(field), field)
    _check_keys(inputs, ("data", "loss_fn", "loss_fn_config"), field)
    data = inputs.get("data")
    if not isinstance(data, list):
        raise InvalidInput("data is missing or no list; a list of datums is accepted")
    if max_datums is not None and len(data) > max_datums:
        raise TooLarge(
            f"the number of datums is {len(data)}; at most {max_datums} is accepted (max_datums_per_operation)"
        )
    loss_fn = inputs.get("loss_fn")
    if not isinstance(loss_fn, str):
        raise InvalidInput("loss_fn is missing or no string; the name of a loss is accepted")
    return TrainingRequest(
        values["model_id"],
        values["seq_id"],
        [_read_datum(datum, f"data[{index}]") for index, datum in enumerate(data)],
        loss_fn,
        _read_config(inputs.get("loss_fn_config")),
        forward_only,
    )


def _read_config(values: object) -> dict[str, float | str]:
    config: dict[str, float | str] = {}
    for key, value in _object({} if values is None else values, "loss_fn_config").items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, str) and not (is_number and _is_finite(value)):
            raise InvalidInput(f"loss_fn_config[{key!r}] is {value!r:.60}; finite numbers and texts are accepted")
        config[key] = value if isinstance(value, str) else float(value)
    return config


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _read_datum(value: object, where: str) -> Datum:
    values = _object(value, where)
    _check_keys(values, ("model_input", "loss_fn_inputs"), where)
    tensors = {}
    for name, tensor in _object(values.get("loss_fn_inputs", {}), f"{where}.loss_fn_inputs").items():
        try:
            tensors[name] = tensor_from_json(tensor)
        except ValueError as error:
            raise InvalidInput(f"{where}.loss_fn_inputs[{name!r}]: {error}") from None
    return Datum(validate(ModelInput, values.get("model_input"), f"{where}.model_input"), tensors)


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} is missing or no object")
    return value


def _check_keys(values: dict[str, Any], accepted: Collection[str], where: str) -> None:
    for key in values:
        if key not in accepted:
            place = f"{where}.{key}" if where else key
            raise InvalidInput(f"{place[:200]!r} is not known; accepted are {', '.join(accepted)}")
