"""Graders that do what graders should not, for the tests of the pool."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def length(reply: str, answer: str) -> float:
    return float(len(reply) == len(answer))


def with_metrics(reply: str) -> tuple[float, dict[str, float]]:
    return 0.5, {"words": len(reply.split())}


async def slowly(reply: str) -> float:
    return float(len(reply))


def die_for_odd(reply: str, answer: str) -> float:
    if int(answer) % 2:
        os._exit(1)
    return float(reply.strip() == answer)


def eat() -> float:
    eaten = []
    while True:
        eaten.append(bytearray(2**24))


def raise_error() -> float:
    raise ValueError("no such answer")


def write_noise() -> float:
    sys.stdout.write("noise\n" * 3)
    sys.stdout.flush()
    return 1.0


def start_child(path: str) -> None:
    Path(path).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
    time.sleep(3600)


class Written:
    """Unpickled, it writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.mkdir, (self.path,)


def forge(path: str) -> float:
    """Send the program a message of one's own, by whatever pipe it is that leads there."""
    body = pickle.dumps(("ok", Written(path)))
    for descriptor in range(3, 32):
        try:
            os.write(descriptor, len(body).to_bytes(8, "big") + body)
        except OSError:
            continue
    return 1.0


WAYS: dict[str, Callable[..., object]] = {
    "fine": lambda: 1.0,
    "sleep": lambda: time.sleep(3600),
    "memory": lambda: len(bytearray(2**40)),
    "eat": eat,
    "raise": raise_error,
    "exit": lambda: sys.exit(3),
    "end": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "nan": lambda: float("nan"),
    "text": lambda: "not a number",
    "print": write_noise,
    "read": lambda: float(len(sys.stdin.read())),
    "child": start_child,
    "forge": forge,
    "pid": lambda: float(os.getpid()),
}


def misbehave(how: str, *arguments: str) -> object:
    return WAYS[how](*arguments)


not_a_function = 3
