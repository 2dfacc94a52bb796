"""Sampling sessions: the weights or base model that a sampling client samples from, and when it was last used."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, bindparam, delete, func, select, update

from lorimer.errors import NotFound
from lorimer.store.tables import insert, samplers
from lorimer.store.values import record, record_or_none, utc_now


@dataclass(frozen=True)
class SamplingSession:
    sampling_session_id: str
    session_id: str
    user_id: str
    seq: int
    base_model: str
    model_path: str | None
    """The ``tinker://`` path it was created from; None for the base model and for unnamed weights."""
    model_id: str | None
    """The run whose unnamed weights it holds."""
    weights_id: str | None
    """None for the base model. The weights may have been deleted since."""
    created_at: datetime
    last_used_at: datetime
    client_counter: int


_GET = select(samplers).where(samplers.c.sampling_session_id == bindparam("id"))
_TOUCH = update(samplers).where(samplers.c.sampling_session_id == bindparam("id")).values(last_used_at=bindparam("at"))


def create_sampler(
    c: Connection,
    *,
    session_id: str,
    user_id: str,
    seq: int,
    base_model: str,
    model_path: str | None,
    weights_id: str | None,
    model_id: str | None = None,
) -> SamplingSession:
    """Create the session's sampler number ``seq``. A second call returns the first row, whatever its arguments."""
    sampling_session_id, now = f"{session_id}:sample:{seq}", utc_now()
    values = {
        "sampling_session_id": sampling_session_id,
        "session_id": session_id,
        "user_id": user_id,
        "seq": seq,
        "base_model": base_model,
        "model_path": model_path,
        "model_id": model_id,
        "weights_id": weights_id,
        "created_at": now,
        "last_used_at": now,
        "client_counter": 0,
    }
    c.execute(insert(c, samplers).values(values).on_conflict_do_nothing())
    return record(SamplingSession, c.execute(_GET, {"id": sampling_session_id}).one())


def get_sampler(c: Connection, sampling_session_id: str) -> SamplingSession | None:
    return record_or_none(SamplingSession, c.execute(_GET, {"id": sampling_session_id}).one_or_none())


def touch_samplers(c: Connection, used: dict[str, datetime]) -> None:
    """Persist when samplers were last used, buffered by the caller and written in bulk."""
    if used:
        c.execute(_TOUCH, [{"id": sampling_session_id, "at": at} for sampling_session_id, at in used.items()])


def join(c: Connection, sampling_session_id: str) -> int:
    """Allocate the number of another client of the sampler, starting at 1."""
    chosen = update(samplers).where(samplers.c.sampling_session_id == sampling_session_id)
    counted = chosen.values(client_counter=samplers.c.client_counter + 1).returning(samplers.c.client_counter)
    counter = c.execute(counted).scalar_one_or_none()
    if counter is None:
        raise NotFound(f"there is no sampling session {sampling_session_id!r}")
    return int(counter)


def list_samplers(c: Connection, session_id: str) -> list[SamplingSession]:
    """Return the session's samplers, ordered by number."""
    query = select(samplers).where(samplers.c.session_id == session_id).order_by(samplers.c.seq)
    return [record(SamplingSession, row) for row in c.execute(query)]


def idle_ephemeral(c: Connection, *, keep_per_run: int, unused_before: datetime) -> list[SamplingSession]:
    """Return the samplers of unnamed weights that may be evicted: idle, and not among their run's newest."""
    newest_first = (samplers.c.created_at.desc(), samplers.c.seq.desc())
    age = func.row_number().over(partition_by=samplers.c.model_id, order_by=newest_first).label("age")
    ranked = (
        select(samplers, age).where(samplers.c.model_id.is_not(None), samplers.c.weights_id.is_not(None)).subquery()
    )
    columns = [ranked.c[column.name] for column in samplers.c]
    query = select(*columns).where(ranked.c.age > keep_per_run, ranked.c.last_used_at < unused_before)
    return [record(SamplingSession, row) for row in c.execute(query.order_by(ranked.c.created_at))]


def delete_samplers(c: Connection, ids: Iterable[str]) -> int:
    """Delete samplers and return how many there were. Their weights are deleted once nothing refers to them."""
    return c.execute(delete(samplers).where(samplers.c.sampling_session_id.in_(list(ids)))).rowcount
