"""Custom losses registered by clients, with their compiled form as bytes."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, func, select

from lorimer.store import blobs
from lorimer.store.tables import insert, losses
from lorimer.store.values import storable, utc_now


@dataclass(frozen=True)
class Loss:
    loss_id: str
    session_id: str
    user_id: str
    name: str
    created_at: datetime
    payload: bytes


def add_loss(c: Connection, *, loss_id: str, session_id: str, user_id: str, name: str, payload: bytes) -> Loss:
    """Store a loss. A second call with the same id returns the first loss."""
    row = insert(c, losses).values(loss_id=loss_id, session_id=session_id, user_id=user_id)
    row = row.values(name=storable(name), created_at=utc_now())
    added = c.execute(row.on_conflict_do_nothing().execution_options(preserve_rowcount=True)).rowcount
    if added == 1:
        blobs.put(c, loss_id, "payload", payload)
    loss = get_loss(c, loss_id)
    assert loss is not None, "it was there or has been added"
    return loss


def get_loss(c: Connection, loss_id: str) -> Loss | None:
    row = c.execute(select(losses).where(losses.c.loss_id == loss_id)).one_or_none()
    if row is None:
        return None
    payload = blobs.get(c, loss_id, "payload") or b""
    return Loss(loss_id, row.session_id, row.user_id, row.name, row.created_at, payload)


def count_losses(c: Connection, session_id: str) -> int:
    return int(
        c.execute(select(func.count()).select_from(losses).where(losses.c.session_id == session_id)).scalar_one()
    )


def losses_of_session(c: Connection, session_id: str) -> list[Loss]:
    """Return all losses that a session has registered."""
    ids = c.execute(select(losses.c.loss_id).where(losses.c.session_id == session_id).order_by(losses.c.created_at))
    return [loss for loss_id in ids.scalars().all() if (loss := get_loss(c, loss_id)) is not None]
