"""Settings of a training from a YAML or TOML file and from flags, checked against the dataclasses that they fill.

The fields of those dataclasses are the only list of settings: they give names, types, defaults and, by the string under
a field, descriptions. A field whose type cannot be written in a file (a dataset, a function) is not a setting.
"""

import ast
import difflib
import importlib
import inspect
import json
import math
import textwrap
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from lorimer.errors import InvalidInput

Schema = dict[str, Any]
_SIMPLE: dict[Any, Schema] = {
    str: {"type": "string"},
    Path: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number", "minimum": 0},
    type(None): {"type": "null"},
}
_WORDS = {
    "string": "text",
    "boolean": "true or false",
    "integer": "a whole number, 0 or more",
    "number": "a number, 0 or more",
    "null": "null",
    "array": "a list",
    "object": "a table of names and values",
}


@dataclass(frozen=True)
class Setting:
    name: str
    hint: Any
    schema: Schema
    description: str
    default: Any = MISSING

    @property
    def is_needed(self) -> bool:
        return self.default is MISSING


# ── which settings there are ──────────────────────────────────────────────────────────────────────────


def settings_of(*classes: type) -> dict[str, Setting]:
    """Return the settings of dataclasses by name; a name that two of them have is one setting."""
    found: dict[str, Setting] = {}
    for cls in classes:
        hints, descriptions = get_type_hints(cls), field_descriptions(cls)
        for field in fields(cls):
            if (schema := schema_of(hints[field.name])) is not None:
                description = descriptions.get(field.name, "")
                found[field.name] = Setting(field.name, hints[field.name], schema, description, _default(field))
    return found


def _default(field: "Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def field_descriptions(cls: type) -> dict[str, str]:
    """Return the strings under the fields of a dataclass and of those it inherits from, by field."""
    found: dict[str, str] = {}
    for one in reversed([base for base in cls.__mro__ if is_dataclass(base)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).replace("``", "`").split())
    return found


def schema_of(hint: Any) -> Schema | None:
    """Return the JSON schema of a type; none for one whose values cannot be written in a file."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if hint == Mapping[str, Any]:
        return {"type": "object"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"enum": [str(one) for one in hint]}
    if isinstance(hint, type) and is_dataclass(hint):
        return object_schema(settings_of(hint))
    if origin not in (Union, types.UnionType, list, Sequence, dict):
        return None
    parts = [schema_of(one) for one in arguments]
    if None in parts:
        return None
    if origin in (Union, types.UnionType):
        return {"anyOf": parts}
    if origin in (list, Sequence):
        return {"type": "array", "items": parts[0]} if arguments[0] in _SIMPLE else None
    return {"type": "object", "additionalProperties": parts[1]} if arguments[0] is str else None


def object_schema(settings: Mapping[str, Setting], needed: Sequence[str] | None = None) -> Schema:
    """Return the JSON schema of a table of settings; ``needed`` are those without a default unless given."""
    properties = {}
    for setting in settings.values():
        properties[setting.name] = dict(setting.schema)
        if setting.description:
            properties[setting.name]["description"] = setting.description
        if not (setting.is_needed or setting.default is None):
            properties[setting.name]["default"] = msgspec.to_builtins(setting.default, enc_hook=str)
    required = [one.name for one in settings.values() if one.is_needed] if needed is None else list(needed)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────


def read_settings_file(path: Path) -> dict[str, Any]:
    """Return the table in a ``.yaml``, ``.yml`` or ``.toml`` file."""
    readers: dict[str, Callable[[str], Any]] = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": tomllib.loads}
    if path.suffix not in readers:
        raise InvalidInput(f"the settings are in {str(path)!r}; a .yaml, .yml or .toml file is accepted")
    try:
        found = readers[path.suffix](path.expanduser().read_text("utf-8"))
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInput(f"{str(path)!r} is not {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"{str(path)!r} holds {type(found).__name__}; a table of names and values is accepted")
    return found


def _read_yaml(text: str) -> Any:
    """Read YAML as plain values; a name that is given twice, of which the parser would keep the last, is refused."""
    yaml: Any = importlib.import_module("yaml")
    try:
        _refuse_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    return {} if found is None else found


def _refuse_twice(node: Any) -> None:
    if isinstance(getattr(node, "value", None), list):
        pairs = [one for one in node.value if isinstance(one, tuple)]
        names = [key.value for key, _ in pairs]
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise ValueError(f"line {node.start_mark.line + 1}: {twice[0]!r} is given twice")
        for one in [value for _, value in pairs] or node.value:
            _refuse_twice(one)


def read_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Return ``NAME=VALUE`` texts as a table; ``table.name=value`` sets one value of a table."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise InvalidInput(f"--set {pair!r}: NAME=VALUE is accepted")
        *tables, last = name.strip().split(".")
        table = found
        for one in tables:
            table = table.setdefault(one, {})
            if not isinstance(table, dict):
                raise InvalidInput(f"--set {pair!r}: {one!r} is given as a value and as a table; one is accepted")
        table[last] = value
    return found


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return two tables as one, in which values of the second replace those of the first, within tables too."""
    found = dict(first)
    for name, value in second.items():
        before = found.get(name)
        found[name] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return found


# ── checking ──────────────────────────────────────────────────────────────────────────────────────────


def checked(
    values: Mapping[str, Any], settings: Mapping[str, Setting], origin: str, within: str = ""
) -> dict[str, Any]:
    """Return the values in the types of their settings; an unknown name is refused with the nearest one."""
    found = {}
    for name, value in values.items():
        if name not in settings:
            near = difflib.get_close_matches(name, settings, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"accepted are {', '.join(settings)}"
            raise InvalidInput(f"{origin}: there is no setting {within + name!r}; {hint}")
        found[name] = _converted(value, settings[name], origin, within)
    return found


def _converted(value: Any, setting: Setting, origin: str, within: str) -> Any:
    hints = get_args(setting.hint) if get_origin(setting.hint) in (Union, types.UnionType) else (setting.hint,)
    tables: list[Any] = [hint for hint in hints if is_dataclass(hint)]
    name = within + setting.name
    if tables and isinstance(value, Mapping):
        (table,) = tables
        given = checked(value, settings_of(table), origin, f"{name}.")
        if missing := [one.name for one in settings_of(table).values() if one.is_needed and one.name not in given]:
            raise InvalidInput(f"{origin}: {name} has no {' and no '.join(missing)}")
        return table(**given)
    if isinstance(value, str) and type(None) in hints and value == "null":
        return None
    if isinstance(value, str) and str not in hints and any(get_origin(hint) in (list, Sequence) for hint in hints):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if setting.hint == Mapping[str, Any] and isinstance(value, Mapping):
        value = {key: _parsed(one) for key, one in value.items()}
    try:
        found = msgspec.convert(value, setting.hint, strict=False, dec_hook=_path)
    except (msgspec.ValidationError, NotImplementedError):
        found = MISSING
    numbers = found.values() if isinstance(found, dict) else [found]
    if found is MISSING or any(isinstance(one, int | float) and not 0 <= one < math.inf for one in numbers):
        raise InvalidInput(f"{origin}: {name} is {value!r}; {accepted(setting.schema)} is accepted")
    return found


def _parsed(value: Any) -> Any:
    """Return what a text of a flag says as JSON, where it is some: a number, true, a list."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise NotImplementedError


def accepted(schema: Schema) -> str:
    """Return in words which values a schema accepts."""
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(accepted(part) for part in schema["anyOf"])
    if schema["type"] == "array":
        return f"a list of {accepted(schema['items'])}"
    return _WORDS[schema["type"]]
