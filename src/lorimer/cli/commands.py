"""The options that commands share, and the decorator of every command.

A command takes a group of options as one parameter: ``*, options: ServerOptions``. ``cli_command`` expands it, so that
Typer sees each field as an option of the command, and turns errors into one line on stderr and an exit code.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, get_type_hints

from lorimer.cli.connection import DirectoryOption, KeyOption, UrlOption, rest_client
from lorimer.cli.failures import exit_on_error
from lorimer.cli.output import Format, FormatOption
from lorimer.cli.settings import ConfigOption, DatabaseOption, DataOption, effective_settings

if TYPE_CHECKING:
    from lorimer.client.rest import RestClient
    from lorimer.server.settings import Settings


@dataclass(frozen=True)
class ServerOptions:
    """How to print, and which server to ask."""

    output: FormatOption = Format.table
    base_url: UrlOption = None
    api_key: KeyOption = None
    data: DirectoryOption = None

    @property
    def is_json(self) -> bool:
        return self.output is Format.json

    def rest_client(self) -> "RestClient":
        return rest_client(self.base_url, self.api_key, self.data)


@dataclass(frozen=True)
class DataOptions:
    """Which data directory and database to work on, and how to print."""

    data: DataOption = None
    database: DatabaseOption = None
    config: ConfigOption = None
    output: FormatOption = Format.table

    @property
    def is_json(self) -> bool:
        return self.output is Format.json

    def settings(self) -> "Settings":
        return effective_settings({"data": self.data, "database": self.database}, self.config, None).settings


def cli_command(function: Callable[..., None], *, extra: str = "server") -> Callable[..., None]:
    """Make a function a command: expand its groups of options, and exit with a code when it raises.

    ``extra`` names what to install where a package is missing.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if isinstance(hint, type) and is_dataclass(hint):
            groups[parameter.name] = hint
            options = inspect.signature(hint).parameters.values()
            parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
        else:
            parameters.append(parameter.replace(annotation=hint))

    @wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        with exit_on_error(extra):
            function(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
