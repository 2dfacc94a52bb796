"""Training examples: a model input, the inputs of the loss, and the provenance of the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from lorimer.types.model_input import ModelInput
from lorimer.types.tensors import DTYPES, TensorData, TensorDtype, is_torch_tensor

LossFnInputs = dict[str, TensorData]
LossFnOutput = dict[str, TensorData]

_DTYPE_OF_LIST: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""The dtypes of inputs given as lists, which do not say whether they hold integers or floats."""
_MAY_BE_SPARSE = {"target_tokens", "weights"}


@dataclass(frozen=True, kw_only=True)
class _ProvenanceSpan:
    sequence_id: str
    """The id of a sampled sequence."""
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not self.sequence_id:
            raise ValueError(f"{kind}.sequence_id is empty")
        if self.offset < 0:
            raise ValueError(f"{kind}.offset is {self.offset}; 0 or more is accepted")
        if self.length < 0:
            raise ValueError(f"{kind}.length is {self.length}; 0 or more is accepted")


class PromptProvenanceSpan(_ProvenanceSpan):
    """Positions copied from the prompt of a sampled sequence, starting at ``offset``."""


class SampledProvenanceSpan(_ProvenanceSpan):
    """Positions copied from the tokens of a sampled sequence, starting at ``offset``."""


ProvenanceSpans = list[PromptProvenanceSpan | SampledProvenanceSpan]
"""Consecutive spans that together cover a field."""


@dataclass(frozen=True)
class Datum:
    """One training example. Loss inputs may be tensors of any kind or lists; they are converted to ``TensorData``.

    Two-dimensional torch tensors of targets and weights become sparse if that is smaller.
    """

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = field(default_factory=dict)
    model_input_spans: ProvenanceSpans | None = None
    """Spans that cover ``model_input``; given together with the other spans or not at all."""
    loss_fn_input_spans: ProvenanceSpans | None = None
    """Spans that cover ``loss_fn_inputs["target_tokens"]``."""

    def __post_init__(self) -> None:
        inputs = {name: _as_tensor_data(name, value) for name, value in self.loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", inputs)
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise ValueError("model_input_spans and loss_fn_input_spans are given together or not at all")
        for spans in (self.model_input_spans, self.loss_fn_input_spans):
            for span in spans or ():
                if not isinstance(span, _ProvenanceSpan):
                    raise TypeError(f"{span!r} is no PromptProvenanceSpan or SampledProvenanceSpan")

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Self:
        """Return a copy with the spans of both fields, which must cover them exactly."""
        _check_cover("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and len(targets.dense_shape) == 1:
            _check_cover("loss_fn_inputs", loss_fn_inputs, targets.dense_shape[0])
        return replace(self, model_input_spans=model_input, loss_fn_input_spans=loss_fn_inputs)


def _check_cover(name: str, spans: Sequence[_ProvenanceSpan], length: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise ValueError(f"the spans of {name} cover {covered} positions; it has {length}")


def _as_tensor_data(name: str, value: object) -> TensorData:
    if isinstance(value, TensorData):
        return value
    if isinstance(value, ModelInput):
        return TensorData.from_numpy(value.to_array())
    if is_torch_tensor(value):
        make = TensorData.from_torch_sparse if name in _MAY_BE_SPARSE else TensorData.from_torch
        return make(value)
    if isinstance(value, np.ndarray):
        return TensorData.from_numpy(value)
    if isinstance(value, list | tuple):
        return _from_list(name, value)
    raise TypeError(
        f"loss_fn_inputs[{name!r}] is a {type(value).__name__};"
        " accepted are TensorData, torch tensors, NumPy arrays and lists of numbers"
    )


def _from_list(name: str, value: Sequence[object]) -> TensorData:
    dtype = _DTYPE_OF_LIST.get(name)
    if dtype is None:
        raise ValueError(
            f"loss_fn_inputs[{name!r}] is a list, which does not tell int64 from float32;"
            " accepted for this name are TensorData, torch tensors and NumPy arrays"
        )
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"loss_fn_inputs[{name!r}] is not a rectangular list of numbers")
    if dtype == "int64" and array.size and array.dtype.kind != "i":
        raise ValueError(f"loss_fn_inputs[{name!r}] holds {array.dtype}; integers are accepted")
    return TensorData.from_numpy(array.astype(DTYPES[dtype]))
