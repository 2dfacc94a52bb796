"""Directories of saved weights below `weights/`, each shared by any number of checkpoints and samplers."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypedDict

from sqlalchemy import Connection, delete, exists, or_, select

from lorimer.store.runs import Method, Run
from lorimer.store.tables import checkpoints, insert, samplers, weights
from lorimer.store.values import new_id, record, record_or_none, utc_now


class WeightsFile(TypedDict):
    size: int
    sha256: str


class WeightsShape(NamedTuple):
    """What decides which replicas can sample weights."""

    rank: int
    """0 for those of a full run."""
    use_dora: bool = False


@dataclass(frozen=True)
class Weights:
    weights_id: str
    name: str
    """The directory below ``weights/``."""
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer_type: str
    has_optimizer: bool
    size_bytes: int
    files: dict[str, WeightsFile]
    """Keyed by path relative to the directory."""
    created_at: datetime
    use_rslora: bool = False
    use_dora: bool = False
    method: Method = "lora"
    train_embed: bool = False
    train_norms: bool = False

    @property
    def shape(self) -> WeightsShape:
        return WeightsShape(self.rank, self.use_dora)


def add_weights(
    c: Connection,
    *,
    name: str,
    base_model: str,
    rank: int,
    train_attn: bool,
    train_mlp: bool,
    train_unembed: bool,
    optimizer_type: str,
    has_optimizer: bool,
    size_bytes: int,
    files: dict[str, WeightsFile],
    use_rslora: bool = False,
    use_dora: bool = False,
    method: Method = "lora",
    train_embed: bool = False,
    train_norms: bool = False,
) -> Weights:
    """Record a complete directory. A second call for the same directory returns the first row."""
    values = {
        "weights_id": new_id(),
        "name": name,
        "base_model": base_model,
        "rank": rank,
        "train_attn": train_attn,
        "train_mlp": train_mlp,
        "train_unembed": train_unembed,
        "use_rslora": use_rslora,
        "use_dora": use_dora,
        "optimizer_type": optimizer_type,
        "has_optimizer": has_optimizer,
        "size_bytes": size_bytes,
        "files": files,
        "created_at": utc_now(),
        "method": method,
        "train_embed": train_embed,
        "train_norms": train_norms,
    }
    c.execute(insert(c, weights).values(values).on_conflict_do_nothing())
    return record(Weights, c.execute(select(weights).where(weights.c.name == name)).one())


def add_directory(c: Connection, run: Run, name: str, files: dict[str, WeightsFile], *, has_optimizer: bool) -> Weights:
    """Record a complete directory with the weights of a run."""
    return add_weights(
        c,
        name=name,
        base_model=run.base_model,
        rank=run.rank,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
        use_rslora=run.use_rslora,
        use_dora=run.use_dora,
        optimizer_type=run.optimizer_type,
        has_optimizer=has_optimizer,
        size_bytes=sum(file["size"] for file in files.values()),
        files=files,
        method=run.method,
        train_embed=run.train_embed,
        train_norms=run.train_norms,
    )


def get_weights(c: Connection, weights_id: str) -> Weights | None:
    return record_or_none(Weights, c.execute(select(weights).where(weights.c.weights_id == weights_id)).one_or_none())


def unreferenced(c: Connection, *, sampler_idle_before: datetime) -> list[Weights]:
    """Return weights without a checkpoint, without a recently used sampler and without a sampler of a run.

    Weights younger than ``sampler_idle_before`` are excluded, because their checkpoint or sampler may be about to be
    committed.
    """
    named = exists().where(checkpoints.c.weights_id == weights.c.weights_id)
    is_held = or_(samplers.c.last_used_at >= sampler_idle_before, samplers.c.model_id.is_not(None))
    used = exists().where(samplers.c.weights_id == weights.c.weights_id, is_held)
    query = select(weights).where(weights.c.created_at < sampler_idle_before, ~named, ~used)
    return [record(Weights, row) for row in c.execute(query.order_by(weights.c.created_at))]


def delete_weights(c: Connection, ids: Iterable[str]) -> list[Weights]:
    """Delete the rows that no checkpoint refers to and return them. The caller may then delete their directories."""
    named = exists().where(checkpoints.c.weights_id == weights.c.weights_id)
    chosen = delete(weights).where(weights.c.weights_id.in_(list(ids)), ~named)
    return [record(Weights, row) for row in c.execute(chosen.returning(*weights.c))]
