"""How commands print: tables for people, JSON for programs."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer


class Format(StrEnum):
    table = "table"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How to print.")]


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Text is shown as it is: neither markup nor control codes in it have an effect."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    Console().print(table)


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
