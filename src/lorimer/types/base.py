"""Base classes of the JSON models, and the formatting of their validation errors.

Requests refuse unknown fields, non-finite numbers, and null where a field has no such value: the official SDK sends NaN
and infinity as null, and a default in their place would train with numbers that nobody gave. Optional fields accept
``None``, which releases up to 0.16 send as null. Responses ignore unknown fields, so that an old client can talk to a
new server.
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
"""An integer that fits into a database column and an array."""
Counter = Annotated[int, Field(ge=0, lt=2**63)]
"""A sequence id, or another number that counts up from 0."""


MAX_ERRORS = 5
"""How many errors of one body are shown.

Validation of a list or object stops at its first error, so few more are built.
"""
_CONTAINERS = frozenset({"list", "set", "frozenset", "tuple", "dict"})


def stop_at_first_error(schema: CoreSchema) -> CoreSchema:
    """Make every list and object of the schema fail fast, so that a million wrong values give one error."""
    left: list[Any] = [schema]
    seen: set[int] = set()
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            kind = item.get("type")
            if isinstance(kind, str) and kind in _CONTAINERS:  # else a dict of fields, one named "type"
                item["fail_fast"] = True
            left += [child for child in item.values() if isinstance(child, dict | list)]
        else:
            left += [child for child in item if isinstance(child, dict | list | tuple)]
    return schema


def with_one_unknown(model: type[BaseModel], values: Any) -> Any:
    """Drop all unknown fields but the first, so that a model that forbids them reports only one."""
    if not isinstance(values, dict) or model.model_config.get("extra") != "forbid":
        return values
    known = _field_names(model)
    if len(values) <= len(known) or values.keys() <= known:
        return values
    unknown = next(name for name in values if name not in known)
    return {name: values[name] for name in known if name in values} | {unknown: values[unknown]}


@lru_cache(maxsize=1000)
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names by which fields are read."""
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
    """A message from the server; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    def __str__(self) -> str:
        return repr(self)


class Request(BaseModel):
    """A message from the client; unknown fields are refused."""

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
    """Validate decoded JSON as ``model``. Raise ``InvalidInput`` with the paths of the wrong fields below ``where``."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(explain(error, where)) from None


def explain(error: ValidationError, where: str = "") -> str:
    """Format the error as one line: the path of each wrong field and what is accepted, at most five."""
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
    """Format a wrong value for an error message."""
    if value is None:
        return "null, as which NaN and infinity arrive too; a field that is left out has its default"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
