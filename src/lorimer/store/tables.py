"""The database tables and their column types, the same on SQLite and PostgreSQL.

A change here needs a new file in `migrations/versions`; a test compares the two. The module named like a table
documents its rows and is the only one that accesses it.
"""

from datetime import UTC, datetime
from typing import Any

import orjson
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

SCHEMA_VERSION = "0013"
"""The newest revision in `migrations/versions`."""


class UtcDateTime(TypeDecorator[datetime]):
    """A timestamp: stored in UTC with microseconds, returned as an aware datetime."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        assert value.tzinfo is not None, "a time without a zone is not a moment"
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


class Json(TypeDecorator[Any]):
    """A value stored as JSON text: the same bytes on both databases, which never interpret them."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else orjson.loads(value)


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


# SQLite autoincrements only a column declared INTEGER, which has 64 bits there.
_NUMBER = BigInteger().with_variant(Integer, "sqlite")


def _id(name: str) -> Column[str]:
    return Column(name, Text, primary_key=True)


def _text(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, Text, nullable=null)


def _time(name: str, *, null: bool = False) -> Column[datetime]:
    return Column(name, UtcDateTime, nullable=null)


def _part(name: str, *columns: str, where: str) -> Index:
    """Create a partial index. Queries must repeat ``where`` without parameters to use it.

    A bare name is a boolean column, which SQLAlchemy compares with 1 on SQLite.
    """
    on_sqlite = f"{where} = 1" if where.isidentifier() else where
    return Index(name, *columns, sqlite_where=text(on_sqlite), postgresql_where=text(where))


users = Table(
    "users",
    metadata,
    _id("user_id"),
    Column("name", Text, nullable=False, unique=True),
    _text("email"),
    _time("created_at"),
    Column("max_stored_bytes", BigInteger),
    Column("requests_per_second", Double),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", _NUMBER, primary_key=True, autoincrement=True),
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False, index=True),
    _text("name"),
    _text("note"),
    Column("prefix", Text, nullable=False, index=True),
    _text("secret_sha256"),
    _time("created_at"),
    _time("last_used_at", null=True),
    _time("revoked_at", null=True),
    sqlite_autoincrement=True,  # the id of a removed key is never reused
)

sessions = Table(
    "sessions",
    metadata,
    _id("session_id"),
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False),
    _text("project_id", null=True),
    _text("display_name", null=True),
    _text("display_name_folded", null=True),
    Column("tags", Json, nullable=False),
    Column("user_metadata", Json, nullable=False),
    _text("sdk_version", null=True),
    _time("created_at"),
    _time("last_seen_at"),
    _text("status"),
    _text("finish_reason", null=True),
    _text("finish_detail", null=True),
    Index(None, "user_id", "created_at", "session_id"),
    Index(None, "created_at", "session_id"),
)

runs = Table(
    "runs",
    metadata,
    _id("model_id"),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False),
    _text("user_id"),
    _text("project_id", null=True),
    Column("model_seq_id", BigInteger, nullable=False),
    _text("base_model"),
    Column("rank", Integer, nullable=False),
    Column("seed", BigInteger, nullable=True),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    Column("use_rslora", Boolean, nullable=False, server_default=false()),
    _text("optimizer_type"),
    Column("user_metadata", Json, nullable=False),
    _time("created_at"),
    _time("last_request_at"),
    Column("snapshot_seq", BigInteger, nullable=False),
    _text("snapshot_name", null=True),
    Column("newest_seq", BigInteger, nullable=True),
    _text("newest_name", null=True),
    _text("corrupted", null=True),
    Column("is_unloaded", Boolean, nullable=False),
    _text("replica", null=True),
    _text("run_id", null=True),
    _text("loaded_from", null=True),
    Column("optim_steps_before", BigInteger, nullable=False, server_default=text("0")),
    Column("first_step", BigInteger, nullable=True),
    _time("deleted_at", null=True),
    Column("method", Text, nullable=False, server_default=text("'lora'")),
    Column("train_embed", Boolean, nullable=False, server_default=false()),
    Column("train_norms", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("session_id", "model_seq_id"),
    Index(None, "run_id", "created_at"),
    Index(None, "user_id", "created_at", "model_id"),
    Index(None, "created_at", "model_id"),
    _part("ix_runs_replica", "replica", where="replica IS NOT NULL"),
)

tracked_runs = Table(
    "tracked_runs",
    metadata,
    _id("run_id"),
    _text("user_id"),
    _text("project_id", null=True),
    Column("number", BigInteger, nullable=False),
    _text("run_key", null=True),
    _text("name"),
    _text("notes"),
    Column("tags", Json, nullable=False),
    Column("config", Json, nullable=False),
    _text("search"),
    _text("base_model"),
    _text("session_id"),
    _text("model_id"),
    Column("num_parts", Integer, nullable=False),
    _text("parent_path", null=True),
    _text("parent_run_id", null=True),
    Column("num_steps", BigInteger, nullable=True),
    Column("steps_reported", BigInteger, nullable=True),
    Column("optim_steps", BigInteger, nullable=True),
    Column("past_seconds", Double, nullable=False),
    _text("ended", null=True),
    _text("error", null=True),
    _time("ended_at", null=True),
    Column("is_archived", Boolean, nullable=False),
    _time("created_at"),
    # Both databases treat NULL keys as distinct.
    UniqueConstraint("user_id", "run_key"),
    Index(None, "user_id", "is_archived", "created_at", "run_id"),
    Index(None, "user_id", "number"),
    _part("ix_tracked_runs_parent_run_id", "parent_run_id", where="parent_run_id IS NOT NULL"),
)


def _of_tracked_run() -> Column[str]:
    return Column("run_id", Text, ForeignKey("tracked_runs.run_id", ondelete="CASCADE"), primary_key=True)


run_tags = Table("run_tags", metadata, _of_tracked_run(), _id("tag"))

run_fields = Table(
    "run_fields",
    metadata,
    _of_tracked_run(),
    _id("field"),
    Column("number", Double, nullable=True),
    _text("text"),
)

run_metrics = Table(
    "run_metrics",
    metadata,
    _of_tracked_run(),
    _id("name"),
    *(Column(name, Double, nullable=True) for name in ("last", "min", "max")),
    *(Column(f"{name}_step", BigInteger, nullable=True) for name in ("last", "min", "max")),
)

metric_states = Table(
    "metric_states",
    metadata,
    Column("model_id", Text, ForeignKey("runs.model_id", ondelete="CASCADE"), primary_key=True),
    Column("entry_id", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

futures = Table(
    "futures",
    metadata,
    _id("request_id"),
    _text("user_id"),
    _text("session_id", null=True),
    _text("kind"),
    _text("lane"),
    Column("seq_id", BigInteger, nullable=True),
    _text("state"),
    _text("error", null=True),
    _text("category", null=True),
    _time("received_at"),
    _time("started_at", null=True),
    _time("finished_at", null=True),
    _time("fetched_at", null=True),
    Column("tokens", BigInteger, nullable=False),
    _text("result_format", null=True),
    Column("result_size", BigInteger, nullable=False),
    _text("payload_sha256"),
    Column("holds_bytes", Boolean, nullable=False),
    _text("place", null=True),
    Column("finished_no", BigInteger, nullable=True),
    Column("deaths", Integer, nullable=False, server_default=text("0")),
    # Both databases treat NULL numbers as distinct, so each request without a number gets its own row.
    UniqueConstraint("lane", "seq_id"),
    Index(None, "session_id", "received_at"),
    Index(None, "finished_at"),
    _part("ix_futures_queued", "lane", "seq_id", where="state = 'queued'"),
    _part("ix_futures_lane_holds_bytes", "lane", "seq_id", where="holds_bytes"),
    _part("ix_futures_finished_holds_bytes", "finished_at", where="holds_bytes"),
    _part("ix_futures_fetched_holds_bytes", "fetched_at", where="holds_bytes"),
    _part("ix_futures_errors", "user_id", "finished_at", where="error IS NOT NULL"),
    _part("ix_futures_place", "place", where="state = 'queued'"),
)

owners = Table(
    "owners",
    metadata,
    _id("owner_id"),
    _text("node"),
    _text("door"),
    _time("until"),
    _time("started_at"),
)

replicas = Table(
    "replicas",
    metadata,
    _id("name"),
    _text("base_model"),
    Column("owner_id", Text, ForeignKey("owners.owner_id", ondelete="SET NULL"), nullable=True),
    _text("state"),
    Column("info", Json, nullable=True),
    Column("load", Json, nullable=False),
    _time("changed_at"),
    Index(None, "owner_id"),
)

cluster = Table(
    "cluster",
    metadata,
    _id("name"),
    _text("value"),
)

blobs = Table(
    "blobs",
    metadata,
    _id("owner"),
    _id("part"),
    Column("data", LargeBinary, nullable=True),
    Column("file", Text, nullable=True),
    _part("ix_blobs_file", "file", where="file IS NOT NULL"),
)

weights = Table(
    "weights",
    metadata,
    _id("weights_id"),
    Column("name", Text, nullable=False, unique=True),
    _text("base_model"),
    Column("rank", Integer, nullable=False),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    Column("use_rslora", Boolean, nullable=False, server_default=false()),
    _text("optimizer_type"),
    Column("has_optimizer", Boolean, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("files", Json, nullable=False),
    _time("created_at"),
    Column("method", Text, nullable=False, server_default=text("'lora'")),
    Column("train_embed", Boolean, nullable=False, server_default=false()),
    Column("train_norms", Boolean, nullable=False, server_default=false()),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _id("checkpoint_key"),
    _text("user_id"),
    _text("model_id"),
    _text("project_id", null=True),
    _text("kind"),
    _text("name"),
    Column("weights_id", Text, ForeignKey("weights.weights_id"), nullable=False, index=True),
    Column("step", BigInteger, nullable=True),
    Column("public", Boolean, nullable=False),
    Column("user_metadata", Json, nullable=False),
    _time("created_at"),
    _time("expires_at", null=True),
    UniqueConstraint("model_id", "kind", "name"),
    # The last column makes counting the user's checkpoints an index-only scan.
    Index("ix_checkpoints_user", "user_id", "created_at", "checkpoint_key", "expires_at"),
    Index(None, "model_id", "created_at"),
    _part("ix_checkpoints_expires", "expires_at", where="expires_at IS NOT NULL"),
    _part("ix_checkpoints_public", "model_id", where="public"),
)

evaluations = Table(
    "evaluations",
    metadata,
    _id("evaluation_id"),
    _text("user_id"),
    Column(
        "checkpoint_key",
        Text,
        ForeignKey("checkpoints.checkpoint_key", ondelete="CASCADE"),
        nullable=True,
        index=True,
    ),
    *(_text(name) for name in ("model", "base_model", "task", "metric", "harness")),
    Column("settings", Json, nullable=False),
    _text("variant"),
    Column("num_items", Integer, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("estimates", Json, nullable=False),
    Column("outcomes", LargeBinary, nullable=False),
    _time("created_at"),
    Index(None, "user_id", "created_at", "evaluation_id"),
    Index(None, "user_id", "model"),
)

samplers = Table(
    "samplers",
    metadata,
    _id("sampling_session_id"),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False),
    _text("user_id"),
    Column("seq", BigInteger, nullable=False),
    _text("base_model"),
    _text("model_path", null=True),
    _text("model_id", null=True),
    # Not a foreign key: a sampler outlives its weights and reports that when it is used.
    Column("weights_id", Text, nullable=True, index=True),
    _time("created_at"),
    _time("last_used_at"),
    Column("client_counter", BigInteger, nullable=False),
    UniqueConstraint("session_id", "seq"),
    Index(None, "model_id", "created_at"),
)

losses = Table(
    "losses",
    metadata,
    _id("loss_id"),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False, index=True),
    _text("user_id"),
    _text("name"),
    _time("created_at"),
)

metrics = Table(
    "metrics",
    metadata,
    Column("entry_id", _NUMBER, primary_key=True, autoincrement=True),
    Column("model_id", Text, ForeignKey("runs.model_id", ondelete="CASCADE"), nullable=False),
    _text("source"),
    Column("number", BigInteger, nullable=False),
    Column("is_step", Boolean, nullable=False),
    Column("weight", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("optim_steps", BigInteger, nullable=True),
    Index(None, "model_id", "entry_id"),
    Index("ix_metrics_number", "model_id", "source", "number", "is_step", "weight"),
    _part("ix_metrics_optim_steps", "model_id", "number", where="optim_steps IS NOT NULL"),
    sqlite_autoincrement=True,  # a cursor is an entry id, so ids must never be reused
)

metric_names = Table(
    "metric_names",
    metadata,
    Column("model_id", Text, ForeignKey("runs.model_id", ondelete="CASCADE"), primary_key=True),
    _id("name"),
)

metric_totals = Table(
    "metric_totals",
    metadata,
    Column("model_id", Text, ForeignKey("runs.model_id", ondelete="CASCADE"), primary_key=True),
    Column("num_values", BigInteger, nullable=False),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("rollout_id", _NUMBER, primary_key=True, autoincrement=True),
    Column("run_id", Text, ForeignKey("tracked_runs.run_id", ondelete="CASCADE"), nullable=False),
    _text("model_id"),
    _text("kind"),
    _text("split"),
    Column("step", BigInteger, nullable=False),
    _text("group_name"),
    Column("number", BigInteger, nullable=False),
    Column("reward", Double, nullable=True),
    Column("advantage", Double, nullable=True),
    Column("num_tokens", BigInteger, nullable=True),
    Column("num_turns", BigInteger, nullable=False),
    _text("stop_reason", null=True),
    Column("has_errors", Boolean, nullable=False),
    _text("tags"),
    _text("prompt_key"),
    _text("prompt"),
    _text("answer"),
    Column("content_bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    _time("created_at"),
    UniqueConstraint("run_id", "step", "kind", "split", "group_name", "number"),
    *(Index(None, "run_id", key, "rollout_id") for key in ("reward", "num_tokens")),
    # The last column makes adding up the sizes of a run's steps an index-only scan.
    Index("ix_rollouts_step", "run_id", "step", "rollout_id", "stored_bytes"),
    Index(None, "run_id", "prompt_key", "step"),
    sqlite_autoincrement=True,  # an address of the console names an id, so ids must never be reused
)

rollout_texts = Table(
    "rollout_texts",
    metadata,
    Column(
        "rollout_id",
        _NUMBER,
        ForeignKey("rollouts.rollout_id", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    _text("text"),
)

usage = Table(
    "usage",
    metadata,
    Column("bucket_start", UtcDateTime, primary_key=True),
    # A key column cannot be NULL, so an absent session or project is stored as the empty string.
    *(_id(name) for name in ("user_id", "session_id", "project_id", "base_model", "kind")),
    Column("amount", BigInteger, nullable=False),
    Index(None, "user_id", "bucket_start"),
)

audit = Table(
    "audit",
    metadata,
    Column("entry_id", _NUMBER, primary_key=True, autoincrement=True),
    _time("at"),
    _text("user_id", null=True),
    _text("event"),
    _text("model_id", null=True),
    _text("tinker_path", null=True),
    Column("details", Json, nullable=False),
    _text("purpose", null=True),
    Index(None, "at"),
    Index(None, "user_id", "at"),
)

telemetry = Table(
    "telemetry",
    metadata,
    Column("event_id", _NUMBER, primary_key=True, autoincrement=True),
    _text("session_id"),
    _text("user_id"),
    _time("at"),
    Column("event", Json, nullable=False),
    Index(None, "session_id", "event_id"),
)

idempotency = Table(
    "idempotency",
    metadata,
    _id("user_id"),
    _id("key"),
    Column("value", Json, nullable=False),
    Column("created_at", UtcDateTime, nullable=False, index=True),
)

leases = Table(
    "leases",
    metadata,
    _id("name"),
    _text("holder"),
    Column("until", Double, nullable=False),
)

system_samples = Table(
    "system_samples",
    metadata,
    Column("period", Integer, primary_key=True, autoincrement=False),
    _id("source"),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
    Index(None, "period", "at"),
)

episode_runs = Table(
    "episode_runs",
    metadata,
    _of_tracked_run(),
    _text("sampler", null=True),
    Column("temperature", Double, nullable=True),
    Column("max_tokens", BigInteger, nullable=True),
    _time("updated_at", null=True),
    Column("num_created", BigInteger, nullable=False),
    Column("num_episodes", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
)

episodes = Table(
    "episodes",
    metadata,
    _of_tracked_run(),
    _id("episode_id"),
    Column("number", BigInteger, nullable=False),
    _text("state"),
    _text("sampler", null=True),
    Column("temperature", Double, nullable=True),
    Column("max_tokens", BigInteger, nullable=True),
    Column("seed", BigInteger, nullable=True),
    Column("reward", Double, nullable=True),
    Column("reward_parts", Json, nullable=False),
    Column("user_metadata", Json, nullable=False),
    _text("error", null=True),
    Column("num_begun", BigInteger, nullable=False),
    Column("num_turns", BigInteger, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    _time("created_at"),
    _time("last_used_at"),
    _time("finished_at", null=True),
    UniqueConstraint("run_id", "number"),
    Index(None, "finished_at"),
    _part("ix_episodes_open", "last_used_at", where="state = 'open'"),
)

# The tokens of a turn are a blob, whose owner is the turn_id.
turns = Table(
    "turns",
    metadata,
    _id("turn_id"),
    _text("run_id"),
    _text("episode_id"),
    Column("number", BigInteger, nullable=False),
    Column("choice", BigInteger, nullable=False),
    _text("kind"),
    _text("stop_reason"),
    _text("sampler"),
    Column("temperature", Double, nullable=False),
    Column("top_p", Double, nullable=False),
    Column("top_k", BigInteger, nullable=False),
    Column("seed", BigInteger, nullable=True),
    Column("is_constrained", Boolean, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    _time("started_at"),
    _time("finished_at"),
    UniqueConstraint("run_id", "episode_id", "number", "choice"),
)


def insert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return the dialect's INSERT, which supports ``on_conflict_do_nothing`` and ``on_conflict_do_update``."""
    return insert_for(connection.dialect.name, table)


def insert_for(dialect: str, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return the dialect's INSERT by the dialect's name, for cached statements."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
