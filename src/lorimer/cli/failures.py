"""Errors become a sentence on stderr and an exit code; a traceback would be a fault of ours."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from lorimer.errors import Forbidden, Gone, InvalidInput, LorimerError, ModelNotFound, NotFound, Unauthorized

FAILED, USAGE, IN_USE, REFUSED, NO_SERVER = 1, 2, 3, 4, 5

EXIT_CODES = {
    0: "done",
    FAILED: "failed, or not confirmed",
    USAGE: "wrong usage: an option, a path or a value that is not accepted",
    IN_USE: "another process has the data directory or the database",
    REFUSED: "what was named is not there, or the key may not touch it",
    NO_SERVER: "no server answers",
}
"""What ``docs/cli.md`` says; 130 is Ctrl-C."""

REFUSALS = {401, 403, 404, 410}
WRONG_INPUT = {400, 413, 422}


class NoServer(LorimerError):
    """There is no server to ask."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except (LorimerError, OSError) as error:
        print(f"lorimer: {sentence(error)}", file=sys.stderr)
        raise typer.Exit(exit_code(error)) from error


def sentence(error: BaseException) -> str:
    """What went wrong; of a server's refusal only what the server says, and what to do about it."""
    body = getattr(error, "body", None)
    detail = body.get("detail") if isinstance(body, dict) else None
    text = detail if isinstance(detail, str) else str(error)
    if status_of(error) == 401:
        text += "; give a key with --api-key or LORIMER_API_KEY (`lorimer key create NAME` makes one)"
    return text


def exit_code(error: BaseException) -> int:
    if is_in_use(error) or is_in_use(error.__cause__):
        return IN_USE
    if isinstance(error, NoServer) or is_unreachable(error):
        return NO_SERVER
    refusals = (NotFound, Unauthorized, Forbidden, Gone, ModelNotFound)
    if isinstance(error, refusals) or status_of(error) in REFUSALS:
        return REFUSED
    return USAGE if isinstance(error, InvalidInput) or status_of(error) in WRONG_INPUT else FAILED


def status_of(error: BaseException) -> int | None:
    """The status with which a server refused."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def is_in_use(error: BaseException | None) -> bool:
    # By name: the class belongs to the server, which is not installed with every client.
    return type(error).__name__ == "InUse"


def is_unreachable(error: BaseException) -> bool:
    if "lorimer.client.errors" not in sys.modules:
        return False
    from lorimer.client.errors import APIConnectionError

    return isinstance(error, APIConnectionError)
