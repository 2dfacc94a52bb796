"""The exit codes of commands. How errors become one of them and a line on stderr is in ``lorimer/terminal.py``."""

from lorimer.errors import NoServer
from lorimer.terminal import (
    FAILED,
    IN_USE,
    NO_SERVER,
    REFUSED,
    USAGE,
    exit_code,
    exit_on_error,
    sentence,
)

__all__ = ["EXIT_CODES", "FAILED", "NoServer", "exit_code", "exit_on_error", "sentence"]

EXIT_CODES = {
    0: "done",
    FAILED: "failed, or not confirmed; or a package is missing",
    USAGE: "wrong usage: an option, a path or a value that is not accepted",
    IN_USE: "another process has the data directory or the database",
    REFUSED: "what was named is not there, or the key may not touch it",
    NO_SERVER: "no server answers",
}
"""What ``docs/cli.md`` says; 130 is Ctrl-C."""
