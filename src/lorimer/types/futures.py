"""Messages of the future protocol: submit, poll and cancel. Results have their own modules."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from lorimer.types.base import Counter, Request, Response
from lorimer.types.checkpoints import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from lorimer.types.optim import OptimStepResponse
from lorimer.types.training import CreateModelResponse, ForwardBackwardOutput, UnloadModelResponse

RequestID = str
QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class UntypedAPIFuture(Response):
    """The response to a submit: the work was accepted under this id."""

    request_id: RequestID
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    """One id for each sequence of a sample, in the order of the result."""


class FutureRetrieveRequest(Request):
    request_id: RequestID
    allow_metadata_only: bool = False
    """Whether the response may be the size of the result instead of the result."""


class CancelFutureRequest(Request):
    request_id: RequestID


class TryAgainResponse(Response):
    """The work is not finished; poll again."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: QueueState
    queue_state_reason: str | None = None


class CompleteMetadataResponse(Response):
    """The work is finished and its result is large; the client retrieves it when it has room."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class RequestErrorCategory(StrEnum):
    """Who caused a failure."""

    Unknown = "unknown"
    Server = "server"
    User = "user"


class RequestFailedResponse(Response):
    error: str
    category: RequestErrorCategory


FutureRetrieveResponse = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)


class SamplingSessionFuturesTarget(Request):
    """Selects the completions of one client of a sampling session; 0 is the original client."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Counter = 0


class FuturesRetrieveRequest(Request):
    target: SamplingSessionFuturesTarget
    prev_cursor: Counter = 0
    timeout: float | None = Field(default=None, ge=0)
    retrieved_request_ids: list[str] = Field(default_factory=list)
    """Results the client has received, which the server may free."""


class FutureFinished(Response):
    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


class FutureFailed(Response):
    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion = Annotated[FutureFinished | FutureFailed, Field(discriminator="state")]


class FuturesRetrieveResponse(Response):
    completions: list[FutureCompletion]
    cursor: int
