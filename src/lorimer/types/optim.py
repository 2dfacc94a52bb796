"""Optimizers: the one a run uses, and the parameters of a step.

Families other than Adam have their own fields; unknown fields are kept, and the server decides which families it
supports.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    ConfigDict,
    Discriminator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from lorimer.types.base import Counter, Request, Response

OPTIMIZERS = ("adamw",)
"""The families that the service has; the engine has an update for each."""


class OptimizerConfigBase(Request):
    """The optimizer chosen when a run is created; its other fields depend on the family."""

    model_config = ConfigDict(extra="allow")

    type: str


class AdamOptimizerConfig(OptimizerConfigBase):
    model_config = ConfigDict(extra="forbid")

    type: Literal["adamw"] = "adamw"


class DimuonOptimizerConfig(OptimizerConfigBase):
    model_config = ConfigDict(extra="forbid")

    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


def _family(value: object) -> str:
    """Return which of the classes below reads a value; without a type it is Adam."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {None: "adamw", "adamw": "adamw", "dimuon": "dimuon"}.get(kind if isinstance(kind, str) else None, "other")


OptimizerConfig = Annotated[
    Annotated[AdamOptimizerConfig, Tag("adamw")]
    | Annotated[DimuonOptimizerConfig, Tag("dimuon")]
    | Annotated[SerializeAsAny[OptimizerConfigBase], Tag("other")],
    Discriminator(_family),
]


class AdamParams(Request):
    """The parameters of one AdamW step."""

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Decoupled from the gradient."""
    grad_clip_norm: float = 0.0
    """The maximum global norm of the gradient; 0 disables clipping."""


class OptimParamsBase(Request):
    """The parameters of one step of a family other than Adam."""

    model_config = ConfigDict(extra="allow")

    type: str


class DimuonParams(OptimParamsBase):
    model_config = ConfigDict(extra="forbid")

    type: Literal["dimuon"] = "dimuon"
    learning_rate: float = Field(ge=0)
    grad_clip_norm: float = 0.0
    beta1: float = Field(default=0.9, ge=0, lt=1)


OptimParams = Annotated[
    Annotated[AdamParams, Tag("adamw")]
    | Annotated[DimuonParams, Tag("dimuon")]
    | Annotated[SerializeAsAny[OptimParamsBase], Tag("other")],
    Discriminator(_family),
]
_PARAMS_NAMES = ("optim_params", "adam_params", "optimizer_params")


class OptimStepRequest(Request):
    """Written as ``adam_params`` or, for other families, ``optimizer_params``; read from any of three names."""

    optim_params: OptimParams = Field(validation_alias=AliasChoices(*_PARAMS_NAMES))
    model_id: str
    seq_id: Counter | None = None
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="before")
    @classmethod
    def _read_params(cls, values: Any) -> Any:
        """Ignore names that are null, and the type ``adamw``, which is the default."""
        if not isinstance(values, dict):
            return values
        values = {key: value for key, value in values.items() if value is not None or key not in _PARAMS_NAMES}
        for name in _PARAMS_NAMES:
            params = values.get(name)
            if isinstance(params, dict) and params.get("type") == "adamw":
                values[name] = {key: value for key, value in params.items() if key != "type"}
        return values

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        if "optim_params" in values:
            name = "adam_params" if isinstance(self.optim_params, AdamParams) else "optimizer_params"
            values[name] = values.pop("optim_params")
        return values


class OptimStepResponse(Response):
    metrics: dict[str, float] | None = None
