"""Sends a ``forward`` to an idle engine while its row is being committed.

A ``forward`` changes nothing, so that one whose row is not accepted costs only its computation. The order of commits
and answers stays: the client gets its ``request_id`` after the row is committed, and the reply is used only from then
on, when the operation's turn comes.
"""

from typing import TYPE_CHECKING

from lorimer.scheduler.events import SendEarly
from lorimer.scheduler.runs import Flight, Operation, RunState

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core


class EarlyForward:
    """The one ``forward`` that the engine may compute before its row is committed."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self._flight: Flight | None = None

    @property
    def is_running(self) -> bool:
        return self._flight is not None

    def begin(self, run: RunState, operation: Operation) -> None:
        """Send an operation that is about to be committed if it is certain to be the next of an idle engine."""
        core = self._core
        is_next = run.is_next(operation) and operation.kind == "forward"
        if is_next and core.is_ready and not (core.turns or core.is_closing or core.is_isolating or self.is_running):
            self._flight = operation.send_early()
            core.emit(SendEarly(operation, self._flight))

    def replied(self, flight: Flight) -> None:
        if flight is self._flight:
            self._flight = None

    def engine_ended(self) -> None:
        self._flight = None
