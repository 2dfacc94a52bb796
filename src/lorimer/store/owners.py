"""Owners: processes that compute replicas of base models, and may write as long as their row exists (PostgreSQL only).

The row is a lease: the owner extends ``until``, and anybody may delete a row that has run out. Every transaction of an
owner locks its own row first (`check`), so it is not deleted during a transaction, and a transaction that begins after
its deletion fails. Times are those of the database.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Connection, delete, func, select, text, update

from lorimer.errors import Fenced, InvalidInput
from lorimer.store.tables import cluster, insert, owners, replicas

# The database ends a transaction that stands still: its process may have been stopped, and nobody could replace it.
_CHECK = text(
    "SELECT set_config('idle_in_transaction_session_timeout', :timeout, true) FROM owners"
    " WHERE owner_id = :owner_id FOR KEY SHARE"
)
_REGISTER = text(
    "INSERT INTO owners (owner_id, node, door, until, started_at)"
    " VALUES (:owner_id, :node, :door, clock_timestamp() + make_interval(secs => :seconds), clock_timestamp())"
)
_RENEW = text(
    "UPDATE owners SET until = clock_timestamp() + make_interval(secs => :seconds) WHERE owner_id = :owner_id"
)
# After a restart of the database every owner gets one lease to come back. A row that is locked by a transaction of its
# owner is left for the next time: whoever waited for it could do nothing else.
_EXPIRE = text(
    "DELETE FROM owners WHERE owner_id IN ("
    "SELECT owner_id FROM owners WHERE until < clock_timestamp()"
    " AND clock_timestamp() > pg_postmaster_start_time() + make_interval(secs => :seconds)"
    " FOR UPDATE SKIP LOCKED) RETURNING owner_id"
)
_LIST = text(
    "SELECT r.name, r.base_model, r.owner_id, r.state, r.info, r.load, r.changed_at, o.node, o.door,"
    " extract(epoch FROM o.until - clock_timestamp()) AS lease_seconds,"
    " extract(epoch FROM clock_timestamp() - r.changed_at) AS changed_seconds"
    " FROM replicas r LEFT JOIN owners o ON o.owner_id = r.owner_id ORDER BY r.name"
)
WANTED = "wanted"
"""The state of a replica without an owner that somebody waits for."""


@dataclass(frozen=True)
class Replica:
    name: str
    base_model: str
    owner_id: str | None
    """None if no process computes it."""
    state: str
    info: dict[str, Any] | None
    """What its engine says of the base model; None until one was ready."""
    load: dict[str, Any]
    changed_at: datetime
    """When it got this owner, or lost one."""
    node: str | None
    door: str | None
    """The address at which its owner takes streams and cancellations."""
    lease_seconds: float | None
    """Until its owner's lease runs out."""
    changed_seconds: float


@dataclass(frozen=True)
class ReplicaState:
    """What an owner reports of a replica."""

    state: str
    info: dict[str, Any] | None
    load: dict[str, Any]


def check(c: Connection, owner_id: str, idle_seconds: float = 10.0) -> None:
    """Raise `Fenced` unless the owner's row exists; keep it until the transaction ends.

    The database ends the transaction if it stands still for ``idle_seconds``.
    """
    timeout = f"{max(1, round(idle_seconds * 1000))}ms"
    if c.execute(_CHECK, {"owner_id": owner_id, "timeout": timeout}).first() is None:
        raise Fenced(f"owner {owner_id} lost its lease; another process has its replicas")


def register(c: Connection, owner_id: str, node: str, door: str, seconds: float) -> None:
    c.execute(_REGISTER, {"owner_id": owner_id, "node": node, "door": door, "seconds": seconds})


def renew(c: Connection, owner_id: str, seconds: float, states: Mapping[str, ReplicaState]) -> None:
    """Extend the lease and report the state of the owner's replicas."""
    c.execute(_RENEW, {"owner_id": owner_id, "seconds": seconds})
    for name, found in states.items():
        own = (replicas.c.name == name) & (replicas.c.owner_id == owner_id)
        c.execute(update(replicas).where(own).values(state=found.state, info=found.info, load=found.load))


def expire(c: Connection, seconds: float) -> list[str]:
    """Delete the owners whose lease has run out, and return them. Their replicas have no owner then."""
    gone = list(c.execute(_EXPIRE, {"seconds": seconds}).scalars())
    if gone:
        free = replicas.c.owner_id.is_(None)
        c.execute(update(replicas).where(free).values(changed_at=func.clock_timestamp(), state="lost"))
    return gone


def resign(c: Connection, owner_id: str) -> None:
    """Give up the lease and all replicas."""
    own = replicas.c.owner_id == owner_id
    c.execute(update(replicas).where(own).values(owner_id=None, state="lost", changed_at=func.clock_timestamp()))
    c.execute(delete(owners).where(owners.c.owner_id == owner_id))


def define(c: Connection, names: Mapping[str, str]) -> None:
    """Add the rows of replicas, given with their base model, that have none yet."""
    for name, base_model in names.items():
        values = {
            "name": name,
            "base_model": base_model,
            "state": "lost",
            "load": {},
            "changed_at": func.clock_timestamp(),
        }
        c.execute(insert(c, replicas).values(values).on_conflict_do_nothing())


def claim(c: Connection, owner_id: str, names: Collection[str]) -> str | None:
    """Take one of these replicas that has no owner, and return its name."""
    free = select(replicas.c.name).where(replicas.c.name.in_(list(names)), replicas.c.owner_id.is_(None))
    name = c.execute(free.order_by(replicas.c.name).limit(1).with_for_update(skip_locked=True)).scalar_one_or_none()
    if name is not None:
        chosen = update(replicas).where(replicas.c.name == name)
        c.execute(chosen.values(owner_id=owner_id, state="idle", load={}, changed_at=func.clock_timestamp()))
    return name


def want(c: Connection, name: str) -> None:
    """Ask for an owner of a replica that has none, for requests that are not journaled."""
    free = (replicas.c.name == name) & replicas.c.owner_id.is_(None)
    c.execute(update(replicas).where(free).values(state=WANTED))


def give_back(c: Connection, owner_id: str, name: str) -> None:
    """Leave one replica to others."""
    own = (replicas.c.name == name) & (replicas.c.owner_id == owner_id)
    c.execute(update(replicas).where(own).values(owner_id=None, state="lost", changed_at=func.clock_timestamp()))


def list_replicas(c: Connection, *, lock: bool = False) -> list[Replica]:
    """Return all replicas with their owners; with ``lock`` none changes its owner until the transaction ends."""
    if lock:
        c.execute(select(replicas.c.name).with_for_update())
    rows = [row._asdict() for row in c.execute(_LIST)]
    for row in rows:
        row["info"] = None if row["info"] is None else orjson.loads(row["info"])
        row["load"] = orjson.loads(row["load"])
        for name in ("lease_seconds", "changed_seconds"):
            row[name] = None if row[name] is None else float(row[name])
    return [Replica(**row) for row in rows]


def remove(c: Connection, names: Collection[str]) -> None:
    """Delete the rows of replicas without an owner."""
    c.execute(delete(replicas).where(replicas.c.name.in_(list(names)), replicas.c.owner_id.is_(None)))


def agree(c: Connection, name: str, value: str, refusal: str) -> None:
    """Record a value that all processes must share. Raise `InvalidInput` if another process has another."""
    c.execute(insert(c, cluster).values(name=name, value=value).on_conflict_do_nothing())
    if c.execute(select(cluster.c.value).where(cluster.c.name == name)).scalar_one() != value:
        raise InvalidInput(refusal)


def clock(c: Connection) -> float:
    """Return the database's time, in seconds since 1970."""
    return float(c.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
