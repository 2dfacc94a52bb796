"""What ``lorimer doctor`` finds, and the running of its checks: all concurrently, each with a time limit."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    ok = "ok"
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    text: str
    """What is the case."""
    advice: str = ""
    """What to do about it."""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Status.ok, text)


def warning(check: str, text: str, advice: str) -> Finding:
    return Finding(check, Status.warning, text, advice)


def failed(check: str, text: str, advice: str) -> Finding:
    return Finding(check, Status.failed, text, advice)


@dataclass(frozen=True)
class Check:
    name: str
    look: Callable[[], list[Finding]]
    seconds: float = 10.0
    """It has failed if it takes longer."""


def run_checks(checks: Sequence[Check], report: Callable[[str, float | None], None]) -> list[Finding]:
    """The findings in the order of the checks. A check that hangs is left behind: its thread ends with the program."""
    answers: dict[str, queue.SimpleQueue[list[Finding]]] = {}
    start = time.monotonic()
    for check in checks:
        answers[check.name] = queue.SimpleQueue()
        threading.Thread(target=_look, args=(check, answers[check.name]), daemon=True).start()
    findings: list[Finding] = []
    for number, check in enumerate(checks):
        report(f"checking {check.name}", number / len(checks))
        try:
            left = check.seconds - (time.monotonic() - start)
            findings += answers[check.name].get(timeout=max(0.01, left))
        except queue.Empty:
            text = f"no answer within {check.seconds:g} seconds"
            findings.append(failed(check.name, text, "see what blocks it: a disk, a network, or a machine under load"))
    return findings


def _look(check: Check, answers: "queue.SimpleQueue[list[Finding]]") -> None:
    try:
        answers.put(check.look())
    except Exception as error:  # whatever is wrong with this machine is what the check is for
        answers.put([failed(check.name, f"{type(error).__name__}: {error}", "")])
