"""Custom losses: an engine validates each once, and every engine is sent a loss when it first needs it."""

from typing import TYPE_CHECKING

from lorimer.engine import messages
from lorimer.errors import EngineError, InvalidInput, LorimerError
from lorimer.scheduler import journal
from lorimer.scheduler.events import Admit, OperationReply, Send
from lorimer.scheduler.payloads import CreateLoss, decode_payload
from lorimer.scheduler.runs import Flight, Operation, Outcome
from lorimer.store.futures import FutureRow

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core


class LossChecks:
    """The uploaded losses that the engine has to validate."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self.waiting: list[Operation] = []
        self._running: list[Operation] = []

    def submit(self, operation: Operation) -> None:
        self._core.commit(journal.AcceptLoss(operation, self._core.limits.max_losses_per_session))

    def accepted(self, operation: Operation, row: FutureRow, is_new: bool) -> None:
        if self._core.adopts(operation, row, is_new):
            self.arrive(operation)
        self._core.emit(Admit(operation, row.request_id))

    def arrive(self, operation: Operation) -> None:
        operation.advance("queued")
        self.waiting.append(operation)

    def send_next(self) -> None:
        if not self._core.is_ready:
            self._core.start_engine()
            return
        waiting, self.waiting = self.waiting, []
        for operation in waiting:
            operation.advance("running")
            operation.flight = Flight(payload=decode_payload(operation.payload))
            self._running.append(operation)
            assert isinstance(operation.flight.payload, CreateLoss)
            command = register_command(operation.request_id, operation.flight.payload)
            self._core.emit(Send(command, OperationReply(operation, operation.flight)))

    def complete(self, operation: Operation, flight: Flight) -> None:
        self._running.remove(operation)
        assert isinstance(flight.payload, CreateLoss)
        if flight.error is None:
            operation.advance("committing")
            self._core.commit(journal.FinishLoss(operation, flight.payload))
        else:
            error = flight.error
            known = error if isinstance(error, LorimerError) else EngineError(f"the check failed: {error}")
            self._core.fail(operation, known)

    def committed(self, operation: Operation, payload: CreateLoss, outcome: Outcome) -> None:
        self._core.resolve(operation, outcome)

    def engine_ended(self, reason: str) -> None:
        running, self._running = self._running, []
        for operation in running:
            operation.deaths += 1
            operation.flight = None
            if operation.deaths >= self._core.limits.max_engine_deaths:
                text = f"the engine ended {operation.deaths} times while it checked this: {reason}"
                self._core.fail(operation, EngineError(text))
            else:
                operation.advance("queued")
                self.waiting.append(operation)


def loss_id(session_id: str, seq_id: int) -> str:
    return f"{session_id}:loss:{seq_id}"


def check_loss_id(session_id: str, found: object) -> None:
    """Refuse a loss that was not uploaded within the session."""
    if not isinstance(found, str) or not found.startswith(loss_id(session_id, 0)[:-1]):
        raise InvalidInput(f"loss_fn_config.loss_id is {found!r}; the id of a loss made in this session is accepted")


def register_command(request_id: str, payload: CreateLoss) -> messages.RegisterLoss:
    return messages.RegisterLoss(
        request_id=request_id, loss_id=payload.loss_id, inputs=payload.inputs, graph=payload.graph
    )
