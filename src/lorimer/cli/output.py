"""How commands print: tables for people, JSON for programs, and examples below their help.

Text of users and servers is shown as it is: neither markup nor control codes in it have an effect.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 1000
"""Columns of a table that goes into a file or another program: nothing is cut there."""
GAP = 2
MIN_WIDTH = 6


class Format(StrEnum):
    table = "table"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How to print: for people, or for programs.")]


def examples(*commands: str) -> str:
    """What goes below the help of a command, a line each. Brackets and words between colons would be markup there."""
    return "\n".join(["\b", "Examples:", *(f"  $ {command}" for command in commands)])


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


@dataclass(frozen=True)
class Column:
    """``whole`` columns are wrapped where there is no room, to be copied in full; the others are cut."""

    title: str
    whole: bool = False
    justify: Literal["left", "right"] = "left"


def print_table(columns: Sequence[str | Column], rows: Sequence[Sequence[object]]) -> None:
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    given = [column if isinstance(column, Column) else Column(column) for column in columns]
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(cell_len, texts)) for texts in zip([column.title for column in given], *cells, strict=True)]
    fitting = fitted(widths, [column.whole for column in given], console.width - GAP * (len(given) - 1))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for column, width in zip(given, fitting, strict=True):
        overflow: Literal["fold", "ellipsis"] = "fold" if column.whole else "ellipsis"
        table.add_column(column.title, justify=column.justify, overflow=overflow, no_wrap=not column.whole, width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def fitted(widths: list[int], whole: list[bool], room: int) -> list[int]:
    """Widths that fit: whole columns are wrapped to half of the room, the others cut, then the former once more."""
    widths = list(widths)
    half, others = max(room // 2, MIN_WIDTH), [not one for one in whole]
    for is_narrowed, least in ((whole, half), (others, MIN_WIDTH), (whole, MIN_WIDTH)):
        while sum(widths) > room:
            wide = [place for place, width in enumerate(widths) if is_narrowed[place] and width > least]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def print_facts(facts: Mapping[str, object]) -> None:
    """Names and values below each other, lists a line each; those without a value are left out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        lines = value if isinstance(value, list) else [] if value in (None, "") else [value]
        if lines:
            table.add_row(name, Text("\n".join(printable(str(line)) for line in lines)))
    stdout_console().print(table)


def stdout_console() -> "Console":
    from rich.console import Console

    is_narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(emoji=False, highlight=False, width=None if is_narrow else PIPE_WIDTH)


def note(text: str) -> None:
    """Something for the person at the terminal, beside the output."""
    typer.echo(printable(text), err=True)


def size_text(num_bytes: int | None) -> str:
    from rich.filesize import decimal

    return "" if num_bytes is None else decimal(num_bytes)


def metadata_text(metadata: Mapping[str, str] | None) -> str:
    return ", ".join(f"{name}={value}" for name, value in (metadata or {}).items())


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
