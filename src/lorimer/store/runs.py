"""Training runs: their parameters, their snapshots, and whether they are usable.

A run has up to two snapshots: a verified one, after which the journal is kept, and the newest, whose loss only makes a
replay longer. Operations are in `futures`, saved weights in `checkpoints`.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import ColumnElement, Connection, bindparam, exists, func, or_, select, update

from lorimer.errors import TooLarge
from lorimer.store.tables import checkpoints, insert, runs
from lorimer.store.values import record, record_or_none, storable, utc_now

Method = Literal["lora", "full"]
"""What a run trains: an adapter, or the weights of the model itself."""
NO_SNAPSHOT = -1
"""The ``snapshot_seq`` of a run without a snapshot: every operation is above it."""
EXPIRED = 2**62
"""The ``snapshot_seq`` of a run that is never replayed: every operation is below it."""


@dataclass(frozen=True)
class Run:
    model_id: str
    session_id: str
    user_id: str
    project_id: str | None
    model_seq_id: int
    base_model: str
    rank: int
    seed: int | None
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer_type: str
    user_metadata: dict[str, str]
    created_at: datetime
    last_request_at: datetime
    snapshot_seq: int
    """The last operation included in the verified snapshot; -1 without a snapshot."""
    snapshot_name: str | None
    """The verified snapshot's directory below ``snapshots/``."""
    newest_seq: int | None
    newest_name: str | None
    """The last operation and directory of a later snapshot that is not verified yet; None if there is none."""
    corrupted: str | None
    """Why the run cannot continue, or None."""
    is_unloaded: bool
    replica: str | None
    """The replica that holds it, or that holds work for it; None if any replica may take it."""
    run_id: str | None = None
    """The run that it is a part of (`tracking`); None if it only holds a copied checkpoint."""
    loaded_from: str | None = None
    """The path of the checkpoint it started with."""
    optim_steps_before: int = 0
    """The optimizer steps of its run that this checkpoint includes; 0 if it starts a run."""
    first_step: int | None = None
    """The first step that its client reports metrics of, in the client's own count; None if it did not say."""
    deleted_at: datetime | None = None
    use_rslora: bool = False
    use_dora: bool = False
    method: Method = "lora"
    train_embed: bool = False
    train_norms: bool = False
    """Full runs only, like ``train_embed``; the ``rank`` of these is 0."""

    @property
    def resume_seq(self) -> int:
        """The last operation that need not be replayed."""
        return self.snapshot_seq if self.newest_seq is None else self.newest_seq

    @property
    def resume_name(self) -> str | None:
        """The snapshot from which the run is restored."""
        return self.newest_name or self.snapshot_name


@dataclass(frozen=True)
class RunValues:
    """The parameters of a run."""

    base_model: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    user_metadata: dict[str, str]
    optimizer_type: str
    use_rslora: bool = False
    use_dora: bool = False
    method: Method = "lora"
    train_embed: bool = False
    train_norms: bool = False


_GET = select(runs).where(runs.c.model_id == bindparam("model_id"))
_TOUCH = update(runs).where(runs.c.model_id == bindparam("id")).values(last_request_at=bindparam("at"))


def create_run(
    c: Connection,
    *,
    session_id: str,
    user_id: str,
    project_id: str | None,
    model_seq_id: int,
    base_model: str,
    rank: int,
    seed: int | None,
    train_attn: bool,
    train_mlp: bool,
    train_unembed: bool,
    optimizer_type: str,
    user_metadata: dict[str, str],
    use_rslora: bool = False,
    use_dora: bool = False,
    replica: str | None = None,
    method: Method = "lora",
    train_embed: bool = False,
    train_norms: bool = False,
) -> Run:
    """Create the session's run number ``model_seq_id``. A second call returns the first row, whatever its arguments."""
    model_id, now = f"{session_id}:train:{model_seq_id}", utc_now()
    values = {
        "model_id": model_id,
        "session_id": session_id,
        "user_id": user_id,
        "project_id": project_id,
        "model_seq_id": model_seq_id,
        "base_model": base_model,
        "rank": rank,
        "seed": seed,
        "train_attn": train_attn,
        "train_mlp": train_mlp,
        "train_unembed": train_unembed,
        "use_rslora": use_rslora,
        "use_dora": use_dora,
        "optimizer_type": optimizer_type,
        "user_metadata": user_metadata,
        "created_at": now,
        "last_request_at": now,
        "snapshot_seq": NO_SNAPSHOT,
        "is_unloaded": False,
        "replica": replica,
        "method": method,
        "train_embed": train_embed,
        "train_norms": train_norms,
    }
    c.execute(insert(c, runs).values(values).on_conflict_do_nothing())
    return record(Run, c.execute(_GET, {"model_id": model_id}).one())


def check_room(c: Connection, session_id: str, model_seq_id: int, max_runs: int) -> None:
    """Refuse a new run if the session already has ``max_runs``. An existing number is not a new run."""
    members = select(func.count()).select_from(runs).where(runs.c.session_id == session_id)
    number = c.execute(members).scalar_one()
    if number >= max_runs and get_run(c, f"{session_id}:train:{model_seq_id}") is None:
        raise TooLarge(f"the session has {number} training runs; at most {max_runs} is accepted (max_runs_per_session)")


def get_run(c: Connection, model_id: str) -> Run | None:
    return record_or_none(Run, c.execute(_GET, {"model_id": model_id}).one_or_none())


def list_runs(
    c: Connection,
    *,
    user_id: str,
    include_published: bool = False,
    project_id: str | None = None,
    limit: int,
    offset: int,
) -> tuple[list[Run], int]:
    """Return a page of the user's runs, newest first, and their total number.

    With ``include_published``, also include other users' runs with a public checkpoint.
    """
    wanted: ColumnElement[bool] = (runs.c.user_id == user_id) & runs.c.deleted_at.is_(None)
    if include_published:
        alive = or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > utc_now())
        published = select(checkpoints.c.model_id).where(checkpoints.c.public, alive)
        wanted = or_(wanted, runs.c.model_id.in_(published))
    if project_id is not None:
        wanted = wanted & (runs.c.project_id == project_id)
    total = c.execute(select(func.count()).select_from(runs).where(wanted)).scalar_one()
    page = select(runs).where(wanted).order_by(runs.c.created_at.desc(), runs.c.model_id.desc())
    return [record(Run, row) for row in c.execute(page.limit(limit).offset(offset))], total


def count_by_model(c: Connection, user_id: str) -> dict[str, int]:
    """Return the number of the user's runs by base model."""
    wanted = (runs.c.user_id == user_id) & runs.c.deleted_at.is_(None)
    query = select(runs.c.base_model, func.count()).where(wanted).group_by(runs.c.base_model)
    return dict(c.execute(query).all())


def set_snapshot(c: Connection, model_id: str, seq: int, name: str) -> str | None:
    """Make ``name`` the run's newest snapshot, valid after ``seq``.

    Return the name of the snapshot that is now obsolete.

    That is the previous newest one, or ``name`` itself if the run has a later snapshot or does not exist.
    """
    run = get_run(c, model_id)
    if run is None or run.resume_seq > seq:
        return name
    c.execute(update(runs).where(runs.c.model_id == model_id).values(newest_seq=seq, newest_name=name))
    return run.newest_name if run.newest_name != name else None


def confirm_snapshot(c: Connection, model_id: str, name: str) -> str | None:
    """Mark the newest snapshot, if it is ``name``, as verified. Return the previous verified one, now obsolete."""
    newest = (runs.c.model_id == model_id) & (runs.c.newest_name == name)
    run = record_or_none(Run, c.execute(select(runs).where(newest)).one_or_none())
    if run is None:
        return None
    moved = {"snapshot_seq": run.newest_seq, "snapshot_name": name, "newest_seq": None, "newest_name": None}
    c.execute(update(runs).where(newest).values(moved))
    return run.snapshot_name


def drop_newest(c: Connection, model_id: str, name: str) -> None:
    """Forget the newest snapshot, if it is ``name``, because it cannot be read. The verified one is used instead."""
    newest = (runs.c.model_id == model_id) & (runs.c.newest_name == name)
    c.execute(update(runs).where(newest).values(newest_seq=None, newest_name=None))


def touch_run(c: Connection, model_id: str, at: datetime) -> None:
    touch_runs(c, {model_id: at})


def touch_runs(c: Connection, used: dict[str, datetime]) -> None:
    """Persist when runs were last used, buffered by the caller and written in bulk."""
    if used:
        c.execute(_TOUCH, [{"id": model_id, "at": at} for model_id, at in used.items()])


def mark_corrupted(c: Connection, model_id: str, reason: str) -> None:
    """Mark the run as unable to continue. The first reason wins."""
    first = (runs.c.model_id == model_id) & runs.c.corrupted.is_(None)
    c.execute(update(runs).where(first).values(corrupted=storable(reason)))


def expire_runs(c: Connection, *, unused_before: datetime, reason: str, except_for: Iterable[str] = ()) -> list[Run]:
    """Expire runs that were deleted or not used since ``unused_before``, and forget their snapshots.

    Return them as they were.
    """
    is_unused = or_(runs.c.last_request_at < unused_before, runs.c.deleted_at.is_not(None))
    idle = is_unused & (runs.c.snapshot_seq < EXPIRED)
    found = [record(Run, row) for row in c.execute(select(runs).where(idle).limit(1000))]
    kept = set(except_for)
    found = [run for run in found if run.model_id not in kept]
    for run in found:
        mark_corrupted(c, run.model_id, reason)
    chosen = update(runs).where(runs.c.model_id.in_([run.model_id for run in found]))
    c.execute(chosen.values(snapshot_seq=EXPIRED, snapshot_name=None, newest_seq=None, newest_name=None))
    return found


def lock(c: Connection, model_id: str, *, is_shared: bool = False) -> str | None:
    """Lock the row of a run until the transaction ends, and return its replica. SQLite has one writer and no locks."""
    query = select(runs.c.replica).where(runs.c.model_id == model_id)
    return c.execute(query.with_for_update(read=is_shared)).scalar_one_or_none()


def release(c: Connection, model_id: str, replica: str) -> None:
    """Let any replica take a run that this one held."""
    held = (runs.c.model_id == model_id) & (runs.c.replica == replica)
    c.execute(update(runs).where(held).values(replica=None))


def has_others(c: Connection, replicas: Collection[str]) -> bool:
    """Return whether a run is assigned to none of these replicas, but to another."""
    is_elsewhere = runs.c.replica.is_not(None) & runs.c.replica.not_in(list(replicas))
    return c.execute(select(exists().where(is_elsewhere))).scalar_one()


def held_by(c: Connection, replicas: Collection[str]) -> dict[str, str]:
    """Return the replica of each run that is assigned to one of these."""
    query = select(runs.c.model_id, runs.c.replica).where(runs.c.replica.in_(list(replicas)))
    return {row.model_id: row.replica for row in c.execute(query)}


def release_lost(c: Connection, live: Collection[str], base_models: Collection[str]) -> None:
    """Let any replica take the runs of these base models whose replica is not ``live``."""
    lost = runs.c.replica.is_not(None) & runs.c.replica.not_in(list(live)) & runs.c.base_model.in_(list(base_models))
    c.execute(update(runs).where(lost).values(replica=None))


def mark_unloaded(c: Connection, model_id: str, is_unloaded: bool = True) -> None:
    c.execute(update(runs).where(runs.c.model_id == model_id).values(is_unloaded=is_unloaded))
