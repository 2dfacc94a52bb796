"""Uploaded losses: an engine checks each once, and every engine is told of one when it first needs it."""

from lorimer.engine import messages
from lorimer.errors import InvalidInput
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.payloads import CreateLoss, decode_payload
from lorimer.scheduler.recorder import Recorder
from lorimer.store import losses


class LossRegistry:
    """The losses of all sessions at work, and which of them the engine of one base model knows."""

    def __init__(self, recorder: Recorder, known: dict[str, CreateLoss]) -> None:
        """``known`` is shared by the registries of all base models."""
        self._recorder, self._known = recorder, known
        self._registered: set[str] = set()

    async def recall(self, session_id: str) -> None:
        """Have the losses of a session at hand; called before its runs come into the engine."""
        for loss in await self._recorder.read(losses.losses_of_session, session_id):
            payload = decode_payload(loss.payload)
            assert isinstance(payload, CreateLoss)
            self._known[loss.loss_id] = payload

    def ensure(self, slot: EngineSlot, loss_id: str) -> None:
        """Tell the engine of a loss before the operation that uses it; one nobody knows the engine refuses itself."""
        if loss_id in self._known and loss_id not in self._registered:
            slot.submit(register_command(f"loss:{loss_id}", self._known[loss_id]))
            self._registered.add(loss_id)

    def add(self, payload: CreateLoss) -> None:
        """A loss that this engine has checked and keeps."""
        self._known[payload.loss_id] = payload
        self._registered.add(payload.loss_id)

    def engine_ended(self) -> None:
        self._registered.clear()


def loss_id(session_id: str, seq_id: int) -> str:
    return f"{session_id}:loss:{seq_id}"


def check_loss_id(session_id: str, found: object) -> None:
    """Losses are used within the session that uploaded them."""
    if not isinstance(found, str) or not found.startswith(loss_id(session_id, 0)[:-1]):
        raise InvalidInput(f"loss_fn_config.loss_id is {found!r}; the id of a loss made in this session is accepted")


def register_command(request_id: str, payload: CreateLoss) -> messages.RegisterLoss:
    return messages.RegisterLoss(
        request_id=request_id, loss_id=payload.loss_id, inputs=payload.inputs, graph=payload.graph
    )
