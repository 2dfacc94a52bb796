"""Optimizers: the one a run uses, and the parameters of a step.

Each family has its own fields, all of which may change from step to step; their defaults are those of the
implementation that they are named after. Fields of families that are not known are kept, and the server refuses them.
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

from lorimer.types.base import Counter, Request, Response, validate


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


def _config_family(value: object) -> str:
    """Return which of the classes below reads a value; without a type it is Adam."""
    kind = _type_of(value)
    return {None: "adamw", "adamw": "adamw", "dimuon": "dimuon"}.get(kind, "other")


def _type_of(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


OptimizerConfig = Annotated[
    Annotated[AdamOptimizerConfig, Tag("adamw")]
    | Annotated[DimuonOptimizerConfig, Tag("dimuon")]
    | Annotated[SerializeAsAny[OptimizerConfigBase], Tag("other")],
    Discriminator(_config_family),
]


def optimizer_config(name: str) -> OptimizerConfig:
    """Return the configuration of an optimizer that has no other fields than its name."""
    return AdamOptimizerConfig() if name == "adamw" else OptimizerConfigBase(type=name)


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


class _StepParams(OptimParamsBase):
    """Fields that every family below has."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: float
    grad_clip_norm: float = 0.0
    """The maximum global norm of the gradient; 0 disables clipping."""
    lr_multipliers: dict[str, float] = Field(default_factory=dict)
    """Factors of the learning rate by group of weights; a weight of several groups gets their product.

    The groups are ``attn``, ``mlp``, ``unembed``, ``embed``, ``norms``, and ``lora_A`` and ``lora_B`` for the factors
    of an adapter: ``{"lora_B": 16}`` is LoRA+ with that ratio.
    """


class AdamWParams(_StepParams):
    """The fields of `AdamParams`, and multipliers."""

    type: Literal["adamw"] = "adamw"
    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0


class AdamL2Params(_StepParams):
    """Adam, whose weight decay is a part of the gradient (L2)."""

    type: Literal["adam"] = "adam"
    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


class SgdParams(_StepParams):
    """Stochastic gradient descent; its weight decay is a part of the gradient (L2)."""

    type: Literal["sgd"] = "sgd"
    learning_rate: float = 0.001
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    """Needs momentum, and no dampening."""


class LionParams(_StepParams):
    type: Literal["lion"] = "lion"
    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    """Decoupled from the gradient."""


class AdafactorParams(_StepParams):
    """Adafactor with the names that `torch.optim.Adafactor` gives its fields."""

    type: Literal["adafactor"] = "adafactor"
    learning_rate: float = 0.01
    """The maximum of the relative step size, which falls with the square root of the steps."""
    beta2_decay: float = -0.8
    eps1: float = 1.1920928955078125e-07
    eps2: float = 0.001
    d: float = 1.0
    """The root mean square above which an update is scaled down."""
    weight_decay: float = 0.0
    """Decoupled from the gradient."""


class MuonParams(_StepParams):
    """Muon for matrices of hidden layers, AdamW for vectors, the embedding and the output head."""

    type: Literal["muon"] = "muon"
    learning_rate: float = 0.001
    weight_decay: float = 0.1
    """Decoupled from the gradient."""
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    adamw_learning_rate: float = 0.0001
    adamw_beta1: float = 0.9
    adamw_beta2: float = 0.95
    adamw_eps: float = 1e-12
    adamw_weight_decay: float = 0.0


class AdamW8bitParams(_StepParams):
    """AdamW whose moments are kept in 8 bits, quantised in blocks of 256 numbers."""

    type: Literal["adamw8bit"] = "adamw8bit"
    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    """Decoupled from the gradient."""


class ScheduleFreeAdamWParams(_StepParams):
    """AdamW that averages its weights instead of lowering the learning rate; samplers get the average."""

    type: Literal["schedule_free_adamw"] = "schedule_free_adamw"
    learning_rate: float = 0.0025
    beta1: float = 0.9
    """How much of the average is in the weights at which gradients are taken."""
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    r: float = 0.0
    """The power of the step in the weight of a step in the average."""
    weight_lr_power: float = 2.0
    """The power of the largest learning rate so far in the weight of a step in the average."""


OPTIMIZERS: dict[str, type[_StepParams]] = {
    "adamw": AdamWParams,
    "adam": AdamL2Params,
    "sgd": SgdParams,
    "lion": LionParams,
    "adafactor": AdafactorParams,
    "muon": MuonParams,
    "adamw8bit": AdamW8bitParams,
    "schedule_free_adamw": ScheduleFreeAdamWParams,
}
"""The families that the service has, with the fields of a step; the engine has an update for each."""


def _params_family(value: object) -> str:
    """Return which class reads the parameters of a step; AdamW has two, the older of which has no multipliers."""
    kind = _type_of(value)
    if kind is None or (kind == "adamw" and isinstance(value, dict) and "lr_multipliers" not in value):
        return "adam_params"
    return kind if kind in OPTIMIZERS or kind == "dimuon" else "other"


OptimParams = Annotated[
    Annotated[AdamParams, Tag("adam_params")]
    | Annotated[AdamWParams, Tag("adamw")]
    | Annotated[AdamL2Params, Tag("adam")]
    | Annotated[SgdParams, Tag("sgd")]
    | Annotated[LionParams, Tag("lion")]
    | Annotated[AdafactorParams, Tag("adafactor")]
    | Annotated[MuonParams, Tag("muon")]
    | Annotated[AdamW8bitParams, Tag("adamw8bit")]
    | Annotated[ScheduleFreeAdamWParams, Tag("schedule_free_adamw")]
    | Annotated[DimuonParams, Tag("dimuon")]
    | Annotated[SerializeAsAny[OptimParamsBase], Tag("other")],
    Discriminator(_params_family),
]


def make_params(optimizer: str, **fields: Any) -> OptimParams:
    """Return the parameters of a step of an optimizer, in the form of the official SDK where that has one."""
    if optimizer == "adamw" and not fields.get("lr_multipliers"):
        return validate(AdamParams, fields, "adamw")
    return validate(OPTIMIZERS[optimizer], fields, optimizer)


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
            if isinstance(params, dict) and params.get("type") == "adamw" and "lr_multipliers" not in params:
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
