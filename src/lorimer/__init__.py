"""Lorimer: an open training API that you run yourself, speaking the Tinker protocol.

This module holds the public names, those of the official SDK among them: ``import lorimer as tinker`` runs programs
written for it. A name is loaded when it is first used, so that importing the module costs nothing.
"""

import importlib as _importlib
import typing as _typing

from lorimer import errors as errors

if _typing.TYPE_CHECKING:
    from lorimer import types as types
    from lorimer.client import auth as auth
    from lorimer.client.admin import (
        AdminClient as AdminClient,
    )
    from lorimer.client.custom_loss import (
        LossHandle as LossHandle,
    )
    from lorimer.client.custom_loss import (
        PerDatumLossFn as PerDatumLossFn,
    )
    from lorimer.client.errors import (
        APIConnectionError as APIConnectionError,
    )
    from lorimer.client.errors import (
        APIError as APIError,
    )
    from lorimer.client.errors import (
        APIResponseValidationError as APIResponseValidationError,
    )
    from lorimer.client.errors import (
        APIStatusError as APIStatusError,
    )
    from lorimer.client.errors import (
        APITimeoutError as APITimeoutError,
    )
    from lorimer.client.errors import (
        AuthenticationError as AuthenticationError,
    )
    from lorimer.client.errors import (
        BadRequestError as BadRequestError,
    )
    from lorimer.client.errors import (
        BillingError as BillingError,
    )
    from lorimer.client.errors import (
        ConflictError as ConflictError,
    )
    from lorimer.client.errors import (
        ExperimentalWarning as ExperimentalWarning,
    )
    from lorimer.client.errors import (
        InternalServerError as InternalServerError,
    )
    from lorimer.client.errors import (
        NotFoundError as NotFoundError,
    )
    from lorimer.client.errors import (
        PermissionDeniedError as PermissionDeniedError,
    )
    from lorimer.client.errors import (
        RateLimitError as RateLimitError,
    )
    from lorimer.client.errors import (
        RequestFailedError as RequestFailedError,
    )
    from lorimer.client.errors import (
        TinkerError as TinkerError,
    )
    from lorimer.client.errors import (
        UnprocessableEntityError as UnprocessableEntityError,
    )
    from lorimer.client.futures import (
        APIFuture as APIFuture,
    )
    from lorimer.client.futures import (
        AwaitableConcurrentFuture as AwaitableConcurrentFuture,
    )
    from lorimer.client.rest import (
        RestClient as RestClient,
    )
    from lorimer.client.retries import (
        RetryConfig as RetryConfig,
    )
    from lorimer.client.sampling import (
        SamplingClient as SamplingClient,
    )
    from lorimer.client.service import (
        ServiceClient as ServiceClient,
    )
    from lorimer.client.training import (
        TrainingClient as TrainingClient,
    )
    from lorimer.client.transport import (
        RequestOptions as RequestOptions,
    )
    from lorimer.client.transport import (
        Timeout as Timeout,
    )
    from lorimer.types import (
        AdamOptimizerConfig as AdamOptimizerConfig,
    )
    from lorimer.types import (
        AdamParams as AdamParams,
    )
    from lorimer.types import (
        Checkpoint as Checkpoint,
    )
    from lorimer.types import (
        CheckpointType as CheckpointType,
    )
    from lorimer.types import (
        Datum as Datum,
    )
    from lorimer.types import (
        DimuonOptimizerConfig as DimuonOptimizerConfig,
    )
    from lorimer.types import (
        DimuonParams as DimuonParams,
    )
    from lorimer.types import (
        DmelChunk as DmelChunk,
    )
    from lorimer.types import (
        EncodedTextChunk as EncodedTextChunk,
    )
    from lorimer.types import (
        ForwardBackwardOutput as ForwardBackwardOutput,
    )
    from lorimer.types import (
        LoraConfig as LoraConfig,
    )
    from lorimer.types import (
        ModelID as ModelID,
    )
    from lorimer.types import (
        ModelInput as ModelInput,
    )
    from lorimer.types import (
        ModelInputChunk as ModelInputChunk,
    )
    from lorimer.types import (
        OptimParams as OptimParams,
    )
    from lorimer.types import (
        OptimStepRequest as OptimStepRequest,
    )
    from lorimer.types import (
        OptimStepResponse as OptimStepResponse,
    )
    from lorimer.types import (
        ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath,
    )
    from lorimer.types import (
        PromptProvenanceSpan as PromptProvenanceSpan,
    )
    from lorimer.types import (
        SampledProvenanceSpan as SampledProvenanceSpan,
    )
    from lorimer.types import (
        SampledSequence as SampledSequence,
    )
    from lorimer.types import (
        SampleRequest as SampleRequest,
    )
    from lorimer.types import (
        SampleResponse as SampleResponse,
    )
    from lorimer.types import (
        SamplingParams as SamplingParams,
    )
    from lorimer.types import (
        StopReason as StopReason,
    )
    from lorimer.types import (
        TensorData as TensorData,
    )
    from lorimer.types import (
        TensorDtype as TensorDtype,
    )
    from lorimer.types import (
        TrainingRun as TrainingRun,
    )

__version__ = "0.1.0"
__title__ = "lorimer"

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "AwaitableConcurrentFuture",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
    "ConflictError",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "InternalServerError",
    "LoraConfig",
    "LossHandle",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PerDatumLossFn",
    "PermissionDeniedError",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RequestFailedError",
    "RequestOptions",
    "RestClient",
    "RetryConfig",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "Timeout",
    "TinkerError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "__title__",
    "__version__",
    "auth",
    "errors",
    "types",
]

_HOMES = {
    "auth": "lorimer.client.auth",
    "AdminClient": "lorimer.client.admin",
    "APIConnectionError": "lorimer.client.errors",
    "APIError": "lorimer.client.errors",
    "APIResponseValidationError": "lorimer.client.errors",
    "APIStatusError": "lorimer.client.errors",
    "APITimeoutError": "lorimer.client.errors",
    "AuthenticationError": "lorimer.client.errors",
    "BadRequestError": "lorimer.client.errors",
    "BillingError": "lorimer.client.errors",
    "ConflictError": "lorimer.client.errors",
    "ExperimentalWarning": "lorimer.client.errors",
    "InternalServerError": "lorimer.client.errors",
    "NotFoundError": "lorimer.client.errors",
    "PermissionDeniedError": "lorimer.client.errors",
    "RateLimitError": "lorimer.client.errors",
    "RequestFailedError": "lorimer.client.errors",
    "TinkerError": "lorimer.client.errors",
    "UnprocessableEntityError": "lorimer.client.errors",
    "APIFuture": "lorimer.client.futures",
    "AwaitableConcurrentFuture": "lorimer.client.futures",
    "RestClient": "lorimer.client.rest",
    "RetryConfig": "lorimer.client.retries",
    "SamplingClient": "lorimer.client.sampling",
    "ServiceClient": "lorimer.client.service",
    "LossHandle": "lorimer.client.custom_loss",
    "PerDatumLossFn": "lorimer.client.custom_loss",
    "TrainingClient": "lorimer.client.training",
    "RequestOptions": "lorimer.client.transport",
    "Timeout": "lorimer.client.transport",
}
"""Where a name is defined; the others are types."""


def __getattr__(name: str) -> _typing.Any:
    if name not in __all__:
        raise AttributeError(f"module 'lorimer' has no attribute {name!r}")
    module = _importlib.import_module(_HOMES.get(name, "lorimer.types"))
    value = module if name in ("auth", "types") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
