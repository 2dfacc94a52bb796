"""Configures the server's log: one line per record, JSON or plain text, with secrets masked.

Fields given as ``extra`` become keys. Anything that looks like a key or a token is masked in the formatted line, so
that no message or traceback can leak one.
"""

import logging
import re
import sys
from datetime import UTC, datetime
from typing import TextIO

import orjson

from lorimer.server.settings import LogFormat, LogLevel

SECRETS = re.compile(r"tml-[A-Za-z0-9]{8,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*|(?<=://)[^\s:/@]*:[^\s@]*(?=@)|signature=\w+")
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logs(log_format: LogFormat, level: LogLevel, stream: TextIO | None = None) -> logging.Handler:
    """Send the log records of ``lorimer`` to ``stream`` (default stderr). Return the handler, for ``remove_logs``."""
    stream = stream or sys.stderr
    is_json = log_format == "json" or (log_format == "auto" and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if is_json else PlainLines())
    logger = logging.getLogger("lorimer")
    logger.setLevel(level.upper())
    logger.addHandler(handler)
    logger.propagate = False
    return handler


def remove_logs(handler: logging.Handler) -> None:
    logger = logging.getLogger("lorimer")
    logger.removeHandler(handler)
    logger.propagate = True


def masked(text: str) -> str:
    return SECRETS.sub("***", text)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD and value not in (None, "")}


class JsonLines(logging.Formatter):
    """Formats a record as ``{"time", "level", "logger", "message", ...fields}``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return masked(orjson.dumps(line, default=str).decode())


class PlainLines(logging.Formatter):
    """Formats a record as ``12:30:01 info message key=value``.

    Escapes control characters, so that no text forges a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        extra = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        text = f"{time} {record.levelname.lower():7} {record.getMessage()}{extra}"
        text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return masked(text)
