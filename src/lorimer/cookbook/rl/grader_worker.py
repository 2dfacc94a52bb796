"""The process in which a grader runs; ``graders.py`` starts, feeds and kills it.

It is run as a script and imports nothing of Lorimer, so that it is there within a moment. What a grader prints goes to
the standard error, and what it reads from the standard input is nothing: the pipes to the program are out of its reach.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import pickle
import runpy
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

GRACE_SECONDS = 2.0
"""After its time and this a grader ends by itself, if nobody is left to end it."""
MAX_DETAIL = 2000

Reply = tuple[str, Any]
"""``ok`` with a value and metrics, or a kind of error with what is known about it."""


class Grader:
    """A grading function, found by name, and called under its limits."""

    def __init__(self, setup: dict[str, Any]) -> None:
        # What the program finds is found here; on another machine its places may not exist, and this one's are.
        sys.path[:] = dict.fromkeys([*setup["path"], *sys.path])
        found = find_function(setup["module"], setup["name"], setup["main_path"])
        made_of = setup.get("made_of")
        # What plays environments (``remote_envs.py``) is made once, and answers with more than a grade.
        self._function: Callable[..., Any] = found if made_of is None else found(**made_of)
        self._convert: Callable[[Any], Any] = as_grade if made_of is None else dict
        if setup["memory_bytes"] is not None:
            limit_memory(setup["memory_bytes"])

    def ready(self) -> bool:
        return True

    def run(self, arguments: tuple[Any, ...], timeout_seconds: float) -> Reply:
        has_timer = hasattr(signal, "setitimer")
        if has_timer:
            signal.setitimer(signal.ITIMER_REAL, timeout_seconds + GRACE_SECONDS)
        try:
            value = self._function(*arguments)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            return "ok", self._convert(value)
        except MemoryError:
            return "memory", "the grader asked for more memory than it may have"
        except BaseException:  # also an exit or an interrupt that the grader raises: it is no end of training
            return "raised", traceback.format_exc()[-MAX_DETAIL:]
        finally:
            if has_timer:
                signal.setitimer(signal.ITIMER_REAL, 0)


def find_function(module: str, name: str, main_path: str | None) -> Callable[..., Any]:
    """A function of a module, or of the script at ``main_path``, which is run without being the main program."""
    if main_path is not None:
        found: Any = runpy.run_path(main_path, run_name="__grader__")[name]
    else:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{module}:{name} is {found!r}; a function is accepted")
    function: Callable[..., Any] = found
    return function


def as_grade(value: Any) -> tuple[float, dict[str, float]]:
    """What a grader returned: a number, or a number and metrics."""
    reward, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the grader returned {value!r}; a finite number, or one and metrics, is accepted")
    return number, {str(name): float(metric) for name, metric in dict(metrics).items()}


def limit_memory(num_bytes: int) -> None:
    """Let this process take so much memory more than it has. Where the system has no such limit, nothing happens."""
    try:
        import resource

        with open("/proc/self/statm", "rb") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, taken + num_bytes))
    except (ImportError, OSError, ValueError):
        return


# ── messages: a length and a pickle from the program, JSON from the grader, which may run what a model wrote ─────────

HEADER = struct.Struct("!Q")
MAX_REPLY = 1 << 20


def encode_request(message: Any) -> bytes:
    body = pickle.dumps(message)
    return HEADER.pack(len(body)) + body


def encode_reply(reply: Reply) -> bytes:
    body = json.dumps(reply).encode()
    return HEADER.pack(len(body)) + body


def decode_reply(body: bytes, is_grade: bool = True) -> Reply:
    """Raises ``ValueError`` for anything that is no reply."""
    kind, detail = json.loads(body)
    return str(kind), as_grade(tuple(detail)) if kind == "ok" and is_grade else detail


def read(stream: BinaryIO) -> Any:
    """The next request, or ``None`` when the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def main() -> None:
    requests, replies = take_pipes()

    def reply(message: Reply) -> None:
        replies.write(encode_reply(message))
        replies.flush()

    setup = read(requests)
    if setup is None:
        return
    try:
        grader = Grader(setup)
    except BaseException:  # whatever a user's module does while it is imported
        reply(("failed", traceback.format_exc()[-MAX_DETAIL:]))
        return
    reply(("ready", None))
    while (request := read(requests)) is not None:
        reply(grader.run(*request))


if __name__ == "__main__":
    main()
