"""Messages to create runs and train them with forward and forward-backward, and their results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import SerializerFunctionWrapHandler, model_serializer

from lorimer.types.base import Counter, Integer, Request, Response
from lorimer.types.datum import Datum, LossFnOutput
from lorimer.types.optim import AdamOptimizerConfig, OptimizerConfig
from lorimer.types.runs import RunIdentity

ModelID = str
LossFnType = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"
]
LOSSES = tuple(name for name in get_args(LossFnType) if name != "stable_reinforce")
"""The losses that the service computes: the engine has a formula for each but ``custom``, which is uploaded."""


_OUR_LORA_FIELDS = ("use_rslora", "use_dora", "init_from")


class LoraConfig(Request):
    rank: Integer
    seed: Integer | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    use_rslora: bool = False
    """Scale the adapter by alpha / sqrt(rank) instead of alpha / rank."""
    use_dora: bool = False
    """Train the norm of each row of an adapted weight apart from its direction (DoRA), as PEFT does."""
    init_from: str | None = None
    """A PEFT adapter in the server's ``peft_adapters`` directory, with whose weights the run begins."""

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what official servers do not know, unless it is asked for."""
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if value or name not in _OUR_LORA_FIELDS}


class FullConfig(Request):
    """The parameters that a full run trains, by group; Lorimer's own."""

    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    train_embed: bool = True
    train_norms: bool = True


class CreateModelRequest(Request):
    session_id: str
    model_seq_id: Counter
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    full_config: FullConfig | None = None
    """Given instead of ``lora_config``, it makes a full run; the official SDK never sends it."""
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    run: RunIdentity | None = None
    """Name, configuration and more of the run that this is a part of."""
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Response):
    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Request):
    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class ModelData(Response):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None
    model_id: ModelID | None = None
    """The run id and the adapter rank below are shown in the documentation, but not in the official type."""
    lora_rank: int | None = None


class GetInfoResponse(Response):
    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: ModelID
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None
    method: str | None = None
    """``lora`` or ``full``; Lorimer's own."""


class UnloadModelRequest(Request):
    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Response):
    model_id: ModelID
    type: Literal["unload_model"] | None = None


# ── forward and forward-backward ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ForwardBackwardInput:
    data: list[Datum]
    loss_fn: LossFnType
    loss_fn_config: Mapping[str, float | str] | None = None


@dataclass(frozen=True)
class ForwardBackwardRequest:
    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True)
class ForwardRequest:
    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True)
class TrainingRequest:
    """A forward or forward-backward in the form that is executed, whatever its encoding was."""

    model_id: ModelID
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """``loss_fn_outputs`` holds tensors by name for each datum, including ``logprobs``."""

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = field(default_factory=dict)
    """Each name ends in ``:`` and the reduction that combines the values of a batch's parts."""

    @property
    def loss(self) -> float:
        """The loss summed over all tokens and datums: the metric ``loss:sum``."""
        return self.metrics["loss:sum"]
