"""Every name of the official ``tinker.types`` is here, with the same kind, fields and defaults, except where listed."""

import dataclasses
import enum
import inspect
import typing
from collections.abc import Callable, Iterable

import pydantic
from tinker import types as official

from lorimer import types as ours
from lorimer.types import optim

NAMES = sorted(name for name in vars(official) if name[0].isupper())

OUR_FIELDS = {
    "ModelData": {"model_id", "lora_rank"},  # the documentation shows them
    "CreateModelRequest": {"run", "full_config"},  # name, configuration and more of the run
    "LoadWeightsRequest": {"run"},
    "Checkpoint": {"step", "run_id", "run_name"},
    "SessionSummary": {"tags", "training_runs_count", "last_seen_at"},  # the console shows them
    "GetSessionResponse": {"status", "errors"},
    "TrainingRun": {
        *("created_at", "project_id", "seed", "optimizer_type"),
        *("train_attn", "train_mlp", "train_unembed", "use_rslora", "use_dora", "replica", "run_id", "run_name"),
        *("method", "train_embed", "train_norms", "snapshot_bytes"),
    },  # the console shows how a run was made, and where it is
    "LoraConfig": {"use_rslora", "use_dora", "init_from"},
    "WeightsInfoResponse": {"use_rslora", "use_dora", "method", "train_embed", "train_norms"},
    "GetInfoResponse": {"method"},
    "GetSamplerResponse": {"model_id"},  # the run whose unsaved weights it has
    "CurrentCheckpointStorageUsageResponse": {"quotas"},  # which the official service does not have
    "TryAgainResponse": {"queue_state_reason"},  # the official client reads it from the raw body
}
NOT_OUR_FIELDS = {
    # Made from arrays when asked for.
    "TensorData": {"sparse_crow_indices", "sparse_col_indices"},
}
OUR_DEFAULTS = {
    # Releases that do not send these are served.
    ("CreateSessionRequest", "user_metadata"): None,
    ("TelemetrySendRequest", "process_uuid"): "",
}
OUR_MEMBERS = {
    "ForwardBackwardOutput": {"loss"},
    "ModelInput": {"to_array"},
    "EncodedTextChunk": {"from_array"},
    "ParsedCheckpointTinkerPath": {"name"},
    "TensorData": {"values", "csr", "dense_shape", "from_numpy_sparse", "sparse_crow_indices", "sparse_col_indices"},
    "TopkLogprobs": {"to_lists"},
}


def fields_of(kind: type) -> dict[str, object]:
    """The public fields and their defaults; ``REQUIRED`` where there is none."""
    if issubclass(kind, pydantic.BaseModel):
        return {
            name: REQUIRED if field.is_required() else plain(field.get_default(call_default_factory=True))
            for name, field in kind.model_fields.items()
        }
    found = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        else:
            found[field.name] = REQUIRED
    return {name: default for name, default in found.items() if not name.startswith("_")}


REQUIRED = object()


def plain(value: object) -> object:
    return value.model_dump() if isinstance(value, pydantic.BaseModel) else value


def kind_of(kind: type) -> str:
    if not inspect.isclass(kind):
        return "other"
    if issubclass(kind, pydantic.BaseModel):
        return str(kind.model_config.get("extra"))
    if issubclass(kind, enum.Enum):
        return "enum"
    return "dataclass" if dataclasses.is_dataclass(kind) else "other"


def members_of(kind: type) -> set[str]:
    """Public members that are not those of the base classes every model has."""
    common = set(dir(pydantic.BaseModel)) | set(dir(object))
    hooks = ("_", "validate_", "serialize_")  # private, or pydantic's
    return {name for name in dir(kind) if not name.startswith(hooks) and name not in common} - set(fields_of(kind))


CLASSES = [name for name in NAMES if kind_of(getattr(official, name)) not in ("enum", "other")]
ALIASES = [name for name in NAMES if kind_of(getattr(official, name)) == "other"]


def test_every_name_is_there():
    assert [name for name in NAMES if not hasattr(ours, name)] == []
    assert set(NAMES) <= set(ours.__all__)


def test_public_names_are_sorted_and_importable():
    assert ours.__all__ == sorted(set(ours.__all__))
    assert all(hasattr(ours, name) for name in ours.__all__)


def differences(compare: Callable[[str], object], names: Iterable[str]) -> dict[str, object]:
    """Return what `compare` finds for each name, without the names for which it finds nothing."""
    return {name: found for name in names if (found := compare(name))}


def test_kinds_are_the_same():
    def compare(name: str) -> object:
        found, expected = kind_of(getattr(ours, name)), kind_of(getattr(official, name))
        return () if found == expected else (found, expected)

    assert differences(compare, CLASSES) == {}


def test_fields_and_defaults_are_the_same():
    def compare(name: str) -> object:
        expected = fields_of(getattr(official, name))
        for field in NOT_OUR_FIELDS.get(name, ()):
            del expected[field]
        for (owner, field), default in OUR_DEFAULTS.items():
            if owner == name and field in expected:
                assert expected[field] is REQUIRED, (name, field)
                expected[field] = default
        found = fields_of(getattr(ours, name))
        for field in OUR_FIELDS.get(name, ()):
            assert not found[field], (name, field)  # no official program gives one
            expected[field] = found[field]
        return () if found == expected else (found, expected)

    assert differences(compare, CLASSES) == {}


def test_members_are_the_same():
    def compare(name: str) -> object:
        found, expected = members_of(getattr(ours, name)), members_of(getattr(official, name))
        return found ^ (expected | OUR_MEMBERS.get(name, set()))

    assert differences(compare, CLASSES) == {}


def test_methods_take_the_same_parameters():
    def compare(name: str) -> object:
        mine, theirs = getattr(ours, name), getattr(official, name)
        methods = [member for member in sorted(members_of(theirs)) if callable(getattr(theirs, member))]
        pairs = {
            member: (parameters_of(getattr(mine, member)), parameters_of(getattr(theirs, member))) for member in methods
        }
        return {member: pair for member, pair in pairs.items() if pair[0] != pair[1]}

    assert differences(compare, CLASSES) == {}


def parameters_of(function: object) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_tensor_data_is_made_with_the_same_parameters():
    assert parameters_of(ours.TensorData) == parameters_of(official.TensorData)


def literals(alias: object) -> set[object]:
    """The alternatives of a ``Literal`` or a union, by name."""
    while typing.get_origin(alias) is typing.Annotated:
        alias = typing.get_args(alias)[0]
    if typing.get_origin(alias) is typing.Literal:
        return set(typing.get_args(alias))
    names: set[object] = set()
    for part in typing.get_args(alias):
        names |= literals(part) if typing.get_args(part) else {getattr(part, "__name__", part)}
    return names or {getattr(alias, "__name__", alias)}


OUR_ALTERNATIVES = {
    "OptimizerConfig": {"DimuonOptimizerConfig"},
    "OptimParams": {"DimuonParams", *(params.__name__ for params in optim.OPTIMIZERS.values())},
}


def test_aliases_have_the_same_alternatives():
    def compare(name: str) -> object:
        expected = literals(getattr(official, name)) | OUR_ALTERNATIVES.get(name, set())
        return literals(getattr(ours, name)) ^ expected

    assert differences(compare, ALIASES) == {}


def test_enum_has_the_same_members():
    expected = {member.name: member.value for member in official.RequestErrorCategory}
    assert {member.name: member.value for member in ours.RequestErrorCategory} == expected
