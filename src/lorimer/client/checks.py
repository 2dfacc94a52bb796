"""Common mistakes, found before anything is sent, with a message that says how to go on."""

from collections.abc import Sequence

from lorimer.client.errors import RefusedData
from lorimer.types import Datum, ModelInput, SamplingParams, TensorData

PER_TOKEN = ("weights", "advantages", "logprobs", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")


def check_data(data: Sequence[Datum]) -> None:
    if isinstance(data, Datum):
        raise TypeError("data is one Datum; a list of them is accepted: [datum]")
    if not data:
        raise RefusedData("data is empty; at least one Datum is accepted")
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            kind = f"{type(datum).__module__}.{type(datum).__qualname__}"
            raise TypeError(f"data[{index}] is a {kind}; lorimer.types.Datum is accepted")
        _check_datum(datum, f"data[{index}]")


def _check_datum(datum: Datum, where: str) -> None:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        return
    if targets.dtype != "int64":
        raise RefusedData(f"{where}: target_tokens are {targets.dtype}; token ids are integers")
    length = _length(datum.model_input)
    found = _rows(targets)
    if length is not None and found != length:
        raise RefusedData(
            f"{where} has {found} target_tokens for {length} input tokens; each input token takes the token that "
            "follows it as its target: model_input is tokens[:-1] and target_tokens is tokens[1:]"
        )
    for name in PER_TOKEN:
        tensor = datum.loss_fn_inputs.get(name)
        if tensor is not None and _rows(tensor) != found:
            raise RefusedData(f"{where} has {_rows(tensor)} {name} for {found} target_tokens; one for each is accepted")


def _rows(tensor: TensorData) -> int:
    shape = tensor.dense_shape
    return shape[0] if shape else 1


def _length(model_input: ModelInput) -> int | None:
    try:
        return model_input.length
    except ValueError:  # an image whose tokens only the server counts
        return None


def check_sample(prompt: ModelInput, num_samples: int, params: SamplingParams) -> None:
    if not isinstance(prompt, ModelInput):
        raise TypeError(
            f"prompt is a {type(prompt).__name__}; a ModelInput is accepted: ModelInput.from_ints(tokenizer.encode(…))"
        )
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples is {num_samples!r}; integers from 1 are accepted")
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params is a {type(params).__name__}; lorimer.types.SamplingParams is accepted")


def check_prompt_options(
    target_prompt_logprobs: TensorData | None,
    prompt_alt_tokens_k: int,
    prompt_logprobs_last_n: int | None,
    include_prompt_logprobs: bool,
) -> None:
    if target_prompt_logprobs is not None:
        if target_prompt_logprobs.dtype != "int64":
            raise ValueError(f"target_prompt_logprobs is {target_prompt_logprobs.dtype}; token ids are int64")
        if len(target_prompt_logprobs.dense_shape) != 2:
            shape = list(target_prompt_logprobs.dense_shape)
            raise ValueError(f"target_prompt_logprobs has shape {shape}; [len(prompt) - 1, K] is accepted")
    if prompt_alt_tokens_k < 0:
        raise ValueError(f"prompt_alt_tokens_k is {prompt_alt_tokens_k}; 0 or more is accepted")
    if prompt_logprobs_last_n is not None:
        if prompt_logprobs_last_n < 1:
            raise ValueError(f"prompt_logprobs_last_n is {prompt_logprobs_last_n}; 1 or more is accepted")
        if not include_prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n is accepted only with include_prompt_logprobs=True")
