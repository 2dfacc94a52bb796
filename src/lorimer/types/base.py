"""The two kinds of JSON model, and how their errors read.

Requests refuse unknown fields, numbers that are not finite, and null where a field has no such value: that is how NaN
and infinity arrive from the official SDK, and a default in their place would train with numbers that nobody gave.
Fields that may be absent have ``None`` as a value, which releases up to 0.16 send as null. Responses ignore what they
do not know, so that an old client can talk to a new server.
"""

from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from lorimer.errors import InvalidInput

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that a database and an array can hold."""
Counter = Annotated[int, Field(ge=0, lt=2**63)]
"""A sequence id, or another number that counts up from 0."""


MAX_ERRORS = 5
"""Shown of one body. Its lists and objects stop at the first error in them, so that few more are ever built."""
_CONTAINERS = frozenset({"list", "set", "frozenset", "tuple", "dict"})


def stop_at_first_error(schema: CoreSchema) -> CoreSchema:
    """The schema, changed so that a list or object of a million wrong values gives one error."""
    left: list[Any] = [schema]
    seen: set[int] = set()
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            kind = item.get("type")
            if isinstance(kind, str) and kind in _CONTAINERS:  # else these are fields, one of them called type
                item["fail_fast"] = True
            left += [child for child in item.values() if isinstance(child, dict | list)]
        else:
            left += [child for child in item if isinstance(child, dict | list | tuple)]
    return schema


def with_one_unknown(model: type[BaseModel], values: Any) -> Any:
    """The values without all but the first of the fields that the model does not know, which it refuses."""
    if not isinstance(values, dict) or model.model_config.get("extra") != "forbid":
        return values
    known = _field_names(model)
    if len(values) <= len(known) or values.keys() <= known:
        return values
    unknown = next(name for name in values if name not in known)
    return {name: values[name] for name in known if name in values} | {unknown: values[unknown]}


@lru_cache(maxsize=1000)
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    """The names by which fields are read."""
    names: set[str] = set()
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        if alias is None:
            names.add(name)
        elif isinstance(alias, AliasChoices):
            names |= {choice for choice in alias.choices if isinstance(choice, str)}
        elif isinstance(alias, str):
            names.add(alias)
    return frozenset(names)


class Response(BaseModel):
    """What a server answers; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    def __str__(self) -> str:
        return repr(self)


class Request(BaseModel):
    """What a client sends; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def __str__(self) -> str:
        return repr(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return stop_at_first_error(handler(source))

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, values: Any) -> Any:
        return with_one_unknown(cls, values)


M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], values: object, where: str = "") -> M:
    """An instance of ``model`` from decoded JSON, or ``InvalidInput`` with paths of wrong fields below ``where``."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(explain(error, where)) from None


def explain(error: ValidationError, where: str = "") -> str:
    """The error as one line: for each wrong field its path and what is accepted, five at most."""
    found = error.errors(include_url=False, include_context=False, include_input=True)
    lines = []
    for item in found[:MAX_ERRORS]:
        path = _path(where, item["loc"])
        value = "" if item["type"] == "missing" else f" (got {shown_input(item['input'])})"
        message = item["msg"][:1].lower() + item["msg"][1:]
        lines.append(f"{path}: {message}{value}" if path else f"{message}{value}")
    rest = len(found) - len(lines)
    return "; ".join(lines) + (f"; and {rest} more" if rest else "")


def _path(path: str, location: tuple[int | str, ...]) -> str:
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def shown_input(value: object) -> str:
    """A wrong value as errors quote it."""
    if value is None:
        return "null, as which NaN and infinity arrive too; a field that is left out has its default"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
