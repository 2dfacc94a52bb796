"""The flags that several commands share, and the settings they make together with the environment and the file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer.server.setting_sources import Effective

DataOption = Annotated[Path | None, typer.Option("--data", help="Directory of the database and the weights.")]
DatabaseOption = Annotated[str | None, typer.Option("--database", help="URL of a PostgreSQL database.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with settings.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; see docs/configuration.md.")
]


def effective_settings(flags: Mapping[str, object], config: Path | None, pairs: list[str] | None) -> "Effective":
    """Flags that were given, ``--set`` pairs, the environment and the file."""
    from lorimer.server.setting_sources import load_settings

    given = {name: value for name, value in flags.items() if value is not None}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidInput(f"--set {pair!r}: NAME=VALUE is accepted")
        given[name.strip()] = value
    return load_settings(given, os.environ, config)
