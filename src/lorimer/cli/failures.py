"""Errors become a sentence on stderr and an exit code; a traceback would be a fault of ours."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

FAILED, USAGE, IN_USE = 1, 2, 3


@contextmanager
def exit_on_error() -> Iterator[None]:
    from lorimer.errors import LorimerError

    try:
        yield
    except LorimerError as error:
        print(f"lorimer: {error}", file=sys.stderr)
        raise typer.Exit(exit_code(error)) from error


def exit_code(error: Exception) -> int:
    from lorimer.errors import InvalidInput
    from lorimer.server.app import InUse

    if isinstance(error, InUse):
        return IN_USE
    return USAGE if isinstance(error, InvalidInput) else FAILED
