"""Messages for sampling sessions and samples, and the results of samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, GetCoreSchemaHandler, PlainSerializer, PlainValidator, Strict, field_validator
from pydantic_core import CoreSchema

from lorimer.types.base import Counter, Integer, Request, Response, stop_at_first_error
from lorimer.types.model_input import ModelInput
from lorimer.types.tensor_json import tensor_from_json, tensor_to_json
from lorimer.types.tensors import Array, TensorData, TopkLogprobs

StopReason = Literal["length", "stop"]


class CreateSamplingSessionRequest(Request):
    session_id: str
    sampling_session_seq_id: Counter
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Response):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(Request):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Response):
    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int
    """1 or more; 0 is the original client."""


class GetSamplerResponse(Response):
    sampler_id: str
    base_model: str
    model_path: str | None = None
    model_id: str | None = None
    """Ours: the run whose unnamed weights are sampled; ``None`` for a saved checkpoint and for the base model."""


class SamplingParams(Response):
    """Ignores unknown parameters, as the official class does; the JSON of a ``SampleRequest`` refuses them."""

    model_config = ConfigDict(allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return stop_at_first_error(handler(source))

    max_tokens: Integer | None = None
    seed: Integer | None = None
    stop: str | Sequence[Annotated[str, Strict()]] | Sequence[Annotated[Integer, Strict()]] | None = None
    """``None`` stops at the end-of-sequence tokens; an empty list never stops early."""
    temperature: float = 1
    top_k: Integer = -1
    top_p: float = 1


def _known_parameters(value: object) -> object:
    if not isinstance(value, dict):
        return value
    unknown = value.keys() - SamplingParams.model_fields.keys()
    if unknown:
        raise ValueError(
            f"unknown sampling parameter {min(unknown)!r}; accepted are {', '.join(SamplingParams.model_fields)}"
        )
    return value


WireTensor = Annotated[TensorData, PlainValidator(tensor_from_json), PlainSerializer(tensor_to_json)]
"""A tensor, or its JSON form."""


class SampleRequest(Request):
    num_samples: Integer = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Counter | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Integer = 0
    topk_sample_logprobs: Integer = 0
    target_prompt_logprobs: WireTensor | None = None
    """``int64[len(prompt) - 1, K]`` token ids to score; row i belongs to prompt position i + 1, and -1 is skipped."""
    prompt_alt_tokens_k: Integer = 0
    prompt_logprobs_last_n: Integer | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"

    @field_validator("sampling_params", mode="before")
    @classmethod
    def _refuse_unknown_parameters(cls, value: object) -> object:
        return _known_parameters(value)


# ── results ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PromptAltTokens:
    """Tokens drawn at every prompt position after the first, at the temperature of the request."""

    tokens: TensorData
    """``int64[len(prompt) - 1, k]``"""
    logprobs: TensorData
    """``float32[len(prompt) - 1, k]``"""


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """Arrays have names ending in ``_np``; the properties without it are lists, created on first use."""

    stop_reason: StopReason
    sequence_id: str
    tokens_np: Array | None = field(default=None, repr=False)
    """``int32[n]``"""
    logprobs_np: Array | None = field(default=None, repr=False)
    """``float32[n]``"""
    topk_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)

    @cached_property
    def tokens(self) -> list[int]:
        return [] if self.tokens_np is None else self.tokens_np.tolist()

    @cached_property
    def logprobs(self) -> list[float] | None:
        return None if self.logprobs_np is None else self.logprobs_np.tolist()

    @cached_property
    def topk_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.to_lists()


@dataclass(frozen=True, eq=False)
class SampleResponse:
    """The sampled sequences, and what was requested about the prompt."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs_np: Array | None = field(default=None, repr=False)
    """``float32[len(prompt)]``, NaN where not computed; always at position 0."""
    topk_prompt_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)
    target_prompt_logprobs: TensorData | None = None
    """Has the shape of the requested ids; 0 where the id was -1."""
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        """The log-probabilities of the prompt; ``None`` where not computed."""
        if self.prompt_logprobs_np is None:
            return None
        logprobs: list[Any] = self.prompt_logprobs_np.tolist()
        for position in np.flatnonzero(np.isnan(self.prompt_logprobs_np)):
            logprobs[position] = None
        return logprobs

    @cached_property
    def topk_prompt_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        return None if self.topk_prompt_logprobs_np is None else self.topk_prompt_logprobs_np.to_lists()
