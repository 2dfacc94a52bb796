"""Where settings come from: flags before the environment before a TOML file before the defaults.

Names that do not exist are refused with the nearest that does, if one is near. The effective settings can be printed
as TOML, each with where it came from.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from lorimer.errors import InvalidInput
from lorimer.server.settings import TYPES, ModelSettings, Settings, redacted_url

PREFIX = "LORIMER_"
_COMMA = re.compile(r",(?!\s*quantize\s*=)")
"""Separates the parts of a list; of a base model, ``,quantize=FORMAT`` is a part."""
OTHER_VARIABLES = {
    "LORIMER_CONFIG",
    "LORIMER_CACHE",
    "LORIMER_BASE_URL",
    "LORIMER_API_KEY",
    "LORIMER_DEBUG",
    "LORIMER_BENCH_ENGINE",
    "LORIMER_ENGINE_FORK_SERVER",
}
"""Of the command line, the engine, the SDK and benchmarks."""


@dataclass(frozen=True)
class Effective:
    """Settings, and for each name where its value came from."""

    settings: Settings
    origins: dict[str, str]


def load_settings(
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Effective:
    """Merge the sources; ``config`` is a TOML file, or the one ``LORIMER_CONFIG`` names."""
    environment = environment or {}
    if config is None and environment.get("LORIMER_CONFIG"):
        config = Path(environment["LORIMER_CONFIG"])
    values: dict[str, Any] = {}
    origins = dict.fromkeys(TYPES, "default")
    for origin, found in (
        (str(config), read_file(config) if config else {}),
        ("environment", read_environment(environment)),
        ("flag", dict(flags or {})),
    ):
        for name, value in found.items():
            check_name(name, origin)
            values[name] = convert(name, value, origin)
            origins[name] = f"environment {PREFIX}{name.upper()}" if origin == "environment" else origin
    try:
        return Effective(Settings(**values), origins)
    except ValueError as error:
        raise InvalidInput(str(error)) from error


def read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.expanduser().read_text("utf-8"))
    except OSError as error:
        raise InvalidInput(f"the configuration {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the configuration {str(path)!r} is not TOML: {error}") from error


def read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in ours.items()
        if name not in OTHER_VARIABLES and value != ""
    }


def check_name(name: str, origin: str) -> None:
    if name not in TYPES:
        near = difflib.get_close_matches(name, TYPES, n=1)
        shown, *nearest = (f"{PREFIX}{text.upper()}" if origin == "environment" else text for text in (name, *near))
        hint = f"the nearest is {nearest[0]!r}" if nearest else "`lorimer config` prints those there are"
        raise InvalidInput(f"{origin}: there is no setting {shown!r}; {hint}")


def convert(name: str, value: object, origin: str) -> object:
    """A value of a source as the type of the setting; text becomes a number or a list where one is wanted."""
    wanted = TYPES[name]
    is_text = isinstance(value, str)
    if wanted is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    if wanted == tuple[str, ...] and is_text:
        return tuple(part.strip() for part in _COMMA.split(str(value)) if part.strip())
    try:
        return msgspec.convert(value, wanted, strict=not is_text)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{origin}: {name} is {value!r}: {str(error).lower()}") from None


def plain(settings: Settings) -> dict[str, Any]:
    """Every value as JSON has it; passwords are masked."""
    found: dict[str, Any] = {}
    for name in TYPES:
        value = getattr(settings, name)
        found[name] = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    found["model"] = {name: _own_values(table) for name, table in settings.model.items()}
    found["database"] = redacted_url(settings.database)
    return found


def _own_values(table: ModelSettings) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(table).items() if value not in (None, "")}


def as_toml(effective: Effective) -> str:
    """The settings as a TOML file, with a comment on where each came from."""
    values = plain(effective.settings)
    tables = values.pop("model")
    # A JSON string, number or list of strings is also TOML.
    lines = {name: f"{name} = {_toml(value)}" for name, value in values.items()}
    width = max(len(line) for line in lines.values() if len(line) < 50)
    text = "".join(f"{line:{width}}  # {effective.origins[name]}\n" for name, line in lines.items())
    for name, table in tables.items():
        text += f"\n[model.{_toml(name)}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
    return text


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    return orjson.dumps(value).decode()
