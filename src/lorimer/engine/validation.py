"""Validate training operations and sample requests before their values reach a tensor.

An operation becomes arrays of known type, shape and range, or an error that names the datum, the field and what is
accepted. Errors come before any work, and nothing is allocated by a declared size alone. Uses NumPy only; the table in
``training/losses.py`` says which inputs a loss accepts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lorimer.engine.messages import CsrArray, Datum, ForwardBackward, SampleRequest, SamplingParams
from lorimer.engine.training.losses import Loss, find_loss
from lorimer.errors import InvalidInput, NotFound

MAX_SPARSE_CELLS = 2**26
"""Maximum cells, in dense form, of all sparse arrays of one operation."""
MAX_SAMPLES = 4096
MAX_TOPK = 1024
MAX_TEMPERATURE = float(np.finfo(np.float32).max)
MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 4096
MAX_ALL_STOP_CHARACTERS = 65_536
"""Limit of all stop strings of a request together."""

Array = NDArray[Any]
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_LARGEST = float(np.finfo(np.float32).max)


class CustomLossSignature(Protocol):
    """The signature of an uploaded loss."""

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """Names and ranks of its parameters; ``logprobs``, ranked as the targets, comes first."""


@dataclass(frozen=True)
class CheckedDatum:
    """One example of N tokens. The arrays are writable copies, contiguous and aligned."""

    tokens: NDArray[np.int64]
    """``(N,)``"""
    targets: NDArray[np.int64]
    """``(N,)`` or ``(N, K)``"""
    inputs: Mapping[str, Array]
    """Inputs of the loss besides the logprobs. Built-in losses: float32, shaped as the targets, with the same names in
    every datum of an operation. Custom losses: float32, or int64 where integers were sent."""


@dataclass(frozen=True)
class CheckedOperation:
    request_id: str
    model_id: str
    loss_fn: str
    loss_id: str | None
    """Which registered loss, if ``loss_fn`` is ``custom``."""
    config: Mapping[str, float]
    """Every key the loss has, defaults filled in."""
    forward_only: bool
    data: list[CheckedDatum]


# ── training ──────────────────────────────────────────────────────────────────────────────────────────


def check_operation(
    operation: ForwardBackward,
    *,
    vocab_size: int,
    max_context: int,
    custom_losses: Mapping[str, CustomLossSignature],
) -> CheckedOperation:
    """Return the operation as validated arrays. ``custom_losses`` are the registered ones, by ``loss_id``.

    ``cross_entropy`` without ``weights`` weighs every target 1. A custom loss gets the inputs it names; other inputs
    of its datums are ignored, because the official client sends datums of custom losses unchanged.
    """
    if not operation.data:
        raise InvalidInput("data is empty; at least one datum is accepted")
    _check_sparse_cells(operation.data)
    loss_id: str | None = None
    config: dict[str, float] = {}
    if operation.loss_fn == "custom":
        loss_id = _check_loss_id(operation.loss_fn_config, custom_losses)
    else:
        loss = find_loss(operation.loss_fn)
        config = _check_config(loss, operation.loss_fn_config)
        names = _input_names(loss, operation.data)
    data = []
    for index, datum in enumerate(operation.data):
        where = f"data[{index}]"
        tokens = _check_tokens(datum.tokens, f"{where}.model_input.tokens", vocab_size, max_context)
        targets = _check_targets(datum, where, vocab_size)
        if loss_id is None:
            inputs = _check_inputs(datum, where, loss, config, names, targets)
        else:
            inputs = _check_custom_inputs(datum, where, loss_id, custom_losses[loss_id], targets)
        data.append(CheckedDatum(tokens, targets, inputs))
    return CheckedOperation(
        operation.request_id, operation.model_id, operation.loss_fn, loss_id, config, operation.forward_only, data
    )


def _check_loss_id(config: Mapping[str, float | str], custom_losses: Mapping[str, CustomLossSignature]) -> str:
    _refuse_others(config, ["loss_id"], "loss_fn_config of loss_fn 'custom'")
    loss_id = config.get("loss_id")
    if not isinstance(loss_id, str):
        raise InvalidInput(f"loss_fn_config['loss_id'] is {loss_id!r}; loss_fn 'custom' takes the id of a created loss")
    if loss_id not in custom_losses:
        raise NotFound(f"loss_fn_config['loss_id'] {loss_id!r} names no loss that was created in this session")
    return loss_id


def _check_config(loss: Loss, config: Mapping[str, float | str]) -> dict[str, float]:
    _refuse_others(config, loss.config, f"loss_fn_config of loss_fn {loss.name!r}")
    merged = dict(loss.config)
    for key, value in config.items():
        if isinstance(value, bool | str) or not abs(value) <= _LARGEST:
            raise InvalidInput(f"loss_fn_config[{key!r}] is {value!r}; finite numbers are accepted")
        merged[key] = float(value)
    if merged.get("beta", 0.0) < 0:
        raise InvalidInput(f"loss_fn_config['beta'] is {merged['beta']!r}; numbers from 0 are accepted")
    if _CLIPS[0] in merged and merged[_CLIPS[0]] > merged[_CLIPS[1]]:
        raise InvalidInput(
            f"loss_fn_config has {_CLIPS[0]} {merged[_CLIPS[0]]!r} above {_CLIPS[1]} {merged[_CLIPS[1]]!r}; "
            f"bounds of the ratio with low <= high are accepted"
        )
    return merged


def _input_names(loss: Loss, data: Sequence[Datum]) -> list[str]:
    """Return the inputs that every datum gets: clip bounds by position for all datums if one has them."""
    sent = {name for datum in data for name in (*datum.loss_fn_inputs, *datum.sparse_inputs)}
    return [*loss.inputs, *(name for name in loss.optional_inputs if name not in loss.config or name in sent)]


def _check_tokens(tokens: Array, field: str, vocab_size: int, max_context: int) -> NDArray[np.int64]:
    if tokens.ndim != 1 or len(tokens) == 0:
        raise InvalidInput(f"{field} has shape {tokens.shape}; one dimension with at least one token is accepted")
    if len(tokens) > max_context:
        raise InvalidInput(f"{field} has {len(tokens)} tokens; at most {max_context}, the context length, are accepted")
    return _check_ids(tokens, field, vocab_size)


def _check_targets(datum: Datum, where: str, vocab_size: int) -> NDArray[np.int64]:
    field = _field(where, "target_tokens")
    num_tokens = len(datum.tokens)
    targets = _read(datum, where, "target_tokens", num_tokens, vocab_size)
    if targets is None:
        raise InvalidInput(f"{field} is missing; every loss takes one target for each of the {num_tokens} tokens")
    if targets.ndim not in (1, 2) or targets.shape[0] != num_tokens or 0 in targets.shape:
        raise InvalidInput(
            f"{field} has shape {targets.shape}; ({num_tokens},) or ({num_tokens}, K), a row per token, is accepted"
        )
    return _check_ids(
        targets, field, vocab_size, "; to ignore a position give it weight or advantage 0 and any accepted id"
    )


def _check_inputs(
    datum: Datum,
    where: str,
    loss: Loss,
    config: Mapping[str, float],
    names: Sequence[str],
    targets: NDArray[np.int64],
) -> dict[str, Array]:
    accepted = ["target_tokens", *loss.inputs, *loss.optional_inputs]
    sent = [*datum.loss_fn_inputs, *datum.sparse_inputs]
    _refuse_others(sent, accepted, f"{where}.loss_fn_inputs of loss_fn {loss.name!r}")
    if targets.ndim == 2 and loss.name != "cross_entropy":
        raise InvalidInput(
            f"{_field(where, 'target_tokens')} has shape {targets.shape}; loss_fn {loss.name!r} takes one target for "
            f"each token, several are for cross_entropy and custom losses that declare logprobs of rank 2"
        )
    inputs: dict[str, Array] = {}
    for name in names:
        field = _field(where, name)
        array = _read(datum, where, name, targets.shape[0], targets.size // targets.shape[0])
        if array is not None:
            if array.shape != targets.shape:
                raise InvalidInput(
                    f"{field} has shape {array.shape}; {targets.shape}, that of the targets, is accepted"
                )
            inputs[name] = _check_numbers(array, field)
        elif name in loss.inputs:
            raise InvalidInput(f"{field} is missing; loss_fn {loss.name!r} takes {', '.join(accepted)}")
        else:
            inputs[name] = np.full(targets.shape, config.get(name, 1.0), np.float32)
    _check_values(where, inputs, config)
    return inputs


def _check_values(where: str, inputs: Mapping[str, Array], config: Mapping[str, float]) -> None:
    if "sequence_ratio_mask" in inputs:
        mask = inputs["sequence_ratio_mask"]
        _refuse_where((mask != 0) & (mask != 1), mask, _field(where, "sequence_ratio_mask"), "0 and 1 are accepted")
    for name in _CLIPS:
        if name in inputs:
            low, high = (inputs.get(clip, np.float32(config[clip])) for clip in _CLIPS)
            rule = f"bounds of the ratio with {_CLIPS[0]} <= {_CLIPS[1]} are accepted"
            _refuse_where(low > high, inputs[name], _field(where, name), rule)


def _check_custom_inputs(
    datum: Datum, where: str, loss_id: str, loss: CustomLossSignature, targets: NDArray[np.int64]
) -> dict[str, Array]:
    (_, targets_rank), *parameters = loss.inputs
    if targets.ndim != targets_rank:
        raise InvalidInput(
            f"{_field(where, 'target_tokens')} has shape {targets.shape}; "
            f"custom loss {loss_id!r} takes rank {targets_rank}"
        )
    inputs: dict[str, Array] = {}
    for name, rank in parameters:
        field = _field(where, name)
        array = targets if name == "target_tokens" else _read(datum, where, name, None, MAX_SPARSE_CELLS)
        if array is None:
            names = ", ".join(dict.fromkeys(["target_tokens", *(parameter for parameter, _ in parameters)]))
            raise InvalidInput(f"{field} is missing; custom loss {loss_id!r} takes {names}")
        if array.size == 1 and array.ndim < 2 and rank < 2:
            array = array.reshape((1,) * rank)  # the wire cannot tell a scalar from one value in a row
        if array.ndim != rank:
            raise InvalidInput(f"{field} has shape {array.shape}; custom loss {loss_id!r} takes rank {rank}")
        is_integer = array.dtype.kind in "iu"
        inputs[name] = np.array(array, np.int64, order="C") if is_integer else _check_numbers(array, field)
    return inputs


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────


def check_sample(request: SampleRequest, *, vocab_size: int, max_context: int) -> None:
    """Raise unless a model of that vocabulary and context can answer the request."""
    length = request.prompt.size
    _check_tokens(request.prompt, "prompt", vocab_size, max_context)
    room = max_context - length
    max_tokens = request.params.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise InvalidInput(f"max_tokens is {max_tokens!r}; numbers from 1 are accepted")
    if (max_tokens or 1) > room:
        asked = "and at least 1 new token" if max_tokens is None else f"and max_tokens {max_tokens}"
        raise InvalidInput(f"the prompt of {length} tokens {asked} exceed the context length {max_context}")
    _check_range("num_samples", request.num_samples, 1, MAX_SAMPLES)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        _check_range(name, getattr(request, name), 0, min(vocab_size, MAX_TOPK))
    if request.prompt_logprobs_last_n is not None:
        if not request.prompt_logprobs:
            raise InvalidInput("prompt_logprobs_last_n is accepted only with prompt_logprobs")
        _check_range("prompt_logprobs_last_n", request.prompt_logprobs_last_n, 1, length - 1)
    if (targets := request.target_prompt_logprobs) is not None:
        if targets.ndim != 2 or targets.shape[0] != length - 1 or targets.shape[1] < 1:
            raise InvalidInput(
                f"target_prompt_logprobs has shape {targets.shape}; ({length - 1}, K) is accepted, "
                f"a row for each token of the prompt but the first"
            )
        _check_ids(targets, "target_prompt_logprobs", vocab_size, ", and -1 to skip a cell", lowest=-1)
    _check_params(request.params)
    _check_stop(request.params.stop, vocab_size)


def _check_params(params: SamplingParams) -> None:
    if not 0 <= params.temperature <= MAX_TEMPERATURE:
        raise InvalidInput(f"temperature is {params.temperature!r}; 0 (greedy) and numbers up to 3.4e38 are accepted")
    if params.top_k < -1:
        raise InvalidInput(f"top_k is {params.top_k!r}; -1 or 0 (off) and numbers from 1 are accepted")
    if not 0 < params.top_p <= 1:
        raise InvalidInput(f"top_p is {params.top_p!r}; numbers above 0 up to 1 are accepted")
    if params.seed is not None:
        _check_range("seed", params.seed, -(2**63), 2**64 - 1)


def _check_stop(stop: str | list[str | int] | None, vocab_size: int) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    strings = [item for item in stops if isinstance(item, str)]
    ids = [item for item in stops if isinstance(item, int) and not isinstance(item, bool)]
    if len(stops) not in (len(strings), len(ids)):
        raise InvalidInput("stop mixes strings and token ids; a list of one kind is accepted")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidInput(f"stop holds {len(strings)} strings; at most {MAX_STOP_STRINGS} are accepted")
    if (total := sum(map(len, strings))) > MAX_ALL_STOP_CHARACTERS:
        raise InvalidInput(f"stop holds {total} characters; at most {MAX_ALL_STOP_CHARACTERS} are accepted")
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise InvalidInput(
                f"stop[{index}] has {len(string)} characters; 1 to {MAX_STOP_CHARACTERS} characters are accepted"
            )
    for index, token in enumerate(ids):
        _check_range(f"stop[{index}]", token, 0, vocab_size - 1)


# ── arrays ────────────────────────────────────────────────────────────────────────────────────────────


def _field(where: str, name: str) -> str:
    return f"{where}.loss_fn_inputs[{name!r}]"


def _refuse_others(given: Iterable[str], accepted: Iterable[str], where: str) -> None:
    others = sorted(set(given) - set(accepted))
    if others:
        hint = "; multiply the mask into the weights or advantages" if "mask" in others else ""
        names = ", ".join(map(repr, others))
        raise InvalidInput(f"{where} has {names}; accepted: {', '.join(accepted) or 'none'}{hint}")


def _check_range(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise InvalidInput(f"{name} is {value!r}; {lowest} to {highest} is accepted")


def _refuse_where(is_bad: Array, array: Array, field: str, accepted: str) -> None:
    if is_bad.any():
        index = np.unravel_index(int(np.argmax(is_bad)), is_bad.shape)
        position = ", ".join(str(i) for i in index)
        raise InvalidInput(f"{field}{f'[{position}]' if index else ''} is {array[index]}; {accepted}")


def _check_ids(array: Array, field: str, vocab_size: int, hint: str = "", *, lowest: int = 0) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu":
        raise InvalidInput(f"{field} holds {array.dtype} values; token ids are integers")
    accepted = f"token ids 0 to {vocab_size - 1}, the vocabulary, are accepted{hint}"
    _refuse_where((array < lowest) | (array >= vocab_size), array, field, accepted)
    return np.array(array, np.int64, order="C")


def _check_numbers(array: Array, field: str) -> NDArray[np.float32]:
    if array.dtype.kind not in "fiub":
        raise InvalidInput(f"{field} holds {array.dtype} values; numbers are accepted")
    with np.errstate(over="ignore"):
        numbers = np.array(array, np.float32, order="C")
    _refuse_where(~np.isfinite(numbers), array, field, "finite numbers are accepted, within the range of float32")
    return numbers


def _read(datum: Datum, where: str, name: str, num_rows: int | None, max_columns: int) -> Array | None:
    """Return the input of that name in dense form, with ``num_rows`` rows and at most ``max_columns`` columns."""
    if name not in datum.sparse_inputs:
        return datum.loss_fn_inputs.get(name)
    field = _field(where, name)
    if name in datum.loss_fn_inputs:
        raise InvalidInput(f"{field} is given both dense and sparse; one of the two is accepted")
    sparse = datum.sparse_inputs[name]
    if num_rows not in (None, sparse.shape[0]) or sparse.shape[1] > max_columns:
        rows = "any number of" if num_rows is None else num_rows
        raise InvalidInput(f"{field} has shape {sparse.shape}; {rows} rows of at most {max_columns} cells are accepted")
    return _densify(sparse, field)


def _check_sparse_cells(data: Sequence[Datum]) -> None:
    num_cells = 0
    for index, datum in enumerate(data):
        for name, sparse in datum.sparse_inputs.items():
            if min(sparse.shape) < 0:
                raise InvalidInput(
                    f"{_field(f'data[{index}]', name)} has shape {sparse.shape}; sizes from 0 are accepted"
                )
            num_cells += sparse.shape[0] * sparse.shape[1]
            if num_cells > MAX_SPARSE_CELLS:
                raise InvalidInput(
                    f"{_field(f'data[{index}]', name)} has shape {sparse.shape}, which brings the sparse arrays of the "
                    f"operation to {num_cells} cells; at most {MAX_SPARSE_CELLS} are accepted"
                )


def _densify(sparse: CsrArray, field: str) -> Array:
    num_rows, num_columns = sparse.shape
    starts, columns, values = sparse.crow_indices, sparse.col_indices, sparse.values
    for part, array in (("crow_indices", starts), ("col_indices", columns)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidInput(f"{field}.{part} is {array.dtype} of shape {array.shape}; a row of integers is accepted")
    if values.shape != columns.shape:
        raise InvalidInput(f"{field} has {values.shape} values for {columns.shape} col_indices; as many are accepted")
    has_ends = starts.shape == (num_rows + 1,) and starts[0] == 0 and starts[-1] == len(columns)
    if not has_ends or (starts[1:] < starts[:-1]).any():
        raise InvalidInput(
            f"{field}.crow_indices do not describe {num_rows} rows of {len(columns)} values in all; "
            f"{num_rows + 1} numbers that rise from 0 to {len(columns)} are accepted"
        )
    accepted = f"columns 0 to {num_columns - 1} are accepted"
    _refuse_where((columns < 0) | (columns >= num_columns), columns, f"{field}.col_indices", accepted)
    starts = starts.astype(np.int64)
    rows = np.repeat(np.arange(num_rows), starts[1:] - starts[:-1])
    cells = rows * num_columns + columns.astype(np.int64)
    if len(np.unique(cells)) < len(cells):
        raise InvalidInput(f"{field}.col_indices name a cell twice; every cell at most once is accepted")
    dense = np.zeros(num_rows * num_columns, values.dtype)
    dense[cells] = values
    return dense.reshape(num_rows, num_columns)
