"""The database tables, the same on SQLite and PostgreSQL.

A change here needs a new file in `migrations/versions`; a test compares the two. The module named like a table
documents its rows and is the only one that accesses it.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from lorimer.store.columns import NUMBER, Json, UtcDateTime, id_column, partial_index, text_column, time_column

SCHEMA_VERSION = "0015"
"""The newest revision in `migrations/versions`."""


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


users = Table(
    "users",
    metadata,
    id_column("user_id"),
    Column("name", Text, nullable=False, unique=True),
    text_column("email"),
    time_column("created_at"),
    Column("max_stored_bytes", BigInteger),
    Column("requests_per_second", Double),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", NUMBER, primary_key=True, autoincrement=True),
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False, index=True),
    text_column("name"),
    text_column("note"),
    Column("prefix", Text, nullable=False, index=True),
    text_column("secret_sha256"),
    time_column("created_at"),
    time_column("last_used_at", null=True),
    time_column("revoked_at", null=True),
    sqlite_autoincrement=True,  # the id of a removed key is never reused
)

sessions = Table(
    "sessions",
    metadata,
    id_column("session_id"),
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False),
    text_column("project_id", null=True),
    text_column("display_name", null=True),
    text_column("display_name_folded", null=True),
    Column("tags", Json, nullable=False),
    Column("user_metadata", Json, nullable=False),
    text_column("sdk_version", null=True),
    time_column("created_at"),
    time_column("last_seen_at"),
    text_column("status"),
    text_column("finish_reason", null=True),
    text_column("finish_detail", null=True),
    Index(None, "user_id", "created_at", "session_id"),
    Index(None, "created_at", "session_id"),
)

runs = Table(
    "runs",
    metadata,
    id_column("model_id"),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False),
    text_column("user_id"),
    text_column("project_id", null=True),
    Column("model_seq_id", BigInteger, nullable=False),
    text_column("base_model"),
    Column("rank", Integer, nullable=False),
    Column("seed", BigInteger, nullable=True),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    *(Column(name, Boolean, nullable=False, server_default=false()) for name in ("use_rslora", "use_dora")),
    text_column("optimizer_type"),
    Column("user_metadata", Json, nullable=False),
    time_column("created_at"),
    time_column("last_request_at"),
    Column("snapshot_seq", BigInteger, nullable=False),
    text_column("snapshot_name", null=True),
    Column("newest_seq", BigInteger, nullable=True),
    text_column("newest_name", null=True),
    text_column("corrupted", null=True),
    Column("is_unloaded", Boolean, nullable=False),
    text_column("replica", null=True),
    text_column("run_id", null=True),
    text_column("loaded_from", null=True),
    Column("optim_steps_before", BigInteger, nullable=False, server_default=text("0")),
    Column("first_step", BigInteger, nullable=True),
    time_column("deleted_at", null=True),
    Column("method", Text, nullable=False, server_default=text("'lora'")),
    *(Column(name, Boolean, nullable=False, server_default=false()) for name in ("train_embed", "train_norms")),
    UniqueConstraint("session_id", "model_seq_id"),
    Index(None, "run_id", "created_at"),
    Index(None, "user_id", "created_at", "model_id"),
    Index(None, "created_at", "model_id"),
    partial_index("ix_runs_replica", "replica", where="replica IS NOT NULL"),
)

tracked_runs = Table(
    "tracked_runs",
    metadata,
    id_column("run_id"),
    text_column("user_id"),
    text_column("project_id", null=True),
    Column("number", BigInteger, nullable=False),
    text_column("run_key", null=True),
    text_column("name"),
    text_column("notes"),
    Column("tags", Json, nullable=False),
    Column("config", Json, nullable=False),
    text_column("search"),
    text_column("base_model"),
    text_column("session_id"),
    text_column("model_id"),
    Column("num_parts", Integer, nullable=False),
    text_column("parent_path", null=True),
    text_column("parent_run_id", null=True),
    Column("num_steps", BigInteger, nullable=True),
    Column("steps_reported", BigInteger, nullable=True),
    Column("optim_steps", BigInteger, nullable=True),
    Column("past_seconds", Double, nullable=False),
    text_column("ended", null=True),
    text_column("error", null=True),
    time_column("ended_at", null=True),
    Column("is_archived", Boolean, nullable=False),
    time_column("created_at"),
    # Both databases treat NULL keys as distinct.
    UniqueConstraint("user_id", "run_key"),
    Index(None, "user_id", "is_archived", "created_at", "run_id"),
    Index(None, "user_id", "number"),
    partial_index("ix_tracked_runs_parent_run_id", "parent_run_id", where="parent_run_id IS NOT NULL"),
)


def _of_tracked_run() -> Column[str]:
    return Column("run_id", Text, ForeignKey("tracked_runs.run_id", ondelete="CASCADE"), primary_key=True)


run_tags = Table("run_tags", metadata, _of_tracked_run(), id_column("tag"))

run_fields = Table(
    "run_fields",
    metadata,
    _of_tracked_run(),
    id_column("field"),
    Column("number", Double, nullable=True),
    text_column("text"),
)

run_metrics = Table(
    "run_metrics",
    metadata,
    _of_tracked_run(),
    id_column("name"),
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
    id_column("request_id"),
    text_column("user_id"),
    text_column("session_id", null=True),
    text_column("kind"),
    text_column("lane"),
    Column("seq_id", BigInteger, nullable=True),
    text_column("state"),
    text_column("error", null=True),
    text_column("category", null=True),
    time_column("received_at"),
    time_column("started_at", null=True),
    time_column("finished_at", null=True),
    time_column("fetched_at", null=True),
    Column("tokens", BigInteger, nullable=False),
    text_column("result_format", null=True),
    Column("result_size", BigInteger, nullable=False),
    text_column("payload_sha256"),
    Column("holds_bytes", Boolean, nullable=False),
    text_column("place", null=True),
    Column("finished_no", BigInteger, nullable=True),
    Column("deaths", Integer, nullable=False, server_default=text("0")),
    # Both databases treat NULL numbers as distinct, so each request without a number gets its own row.
    UniqueConstraint("lane", "seq_id"),
    Index(None, "session_id", "received_at"),
    Index(None, "finished_at"),
    partial_index("ix_futures_queued", "lane", "seq_id", where="state = 'queued'"),
    partial_index("ix_futures_lane_holds_bytes", "lane", "seq_id", where="holds_bytes"),
    partial_index("ix_futures_finished_holds_bytes", "finished_at", where="holds_bytes"),
    partial_index("ix_futures_fetched_holds_bytes", "fetched_at", where="holds_bytes"),
    partial_index("ix_futures_errors", "user_id", "finished_at", where="error IS NOT NULL"),
    partial_index("ix_futures_place", "place", where="state = 'queued'"),
    partial_index("ix_futures_deaths", "lane", "seq_id", where="deaths > 0"),
)

owners = Table(
    "owners",
    metadata,
    id_column("owner_id"),
    text_column("node"),
    text_column("door"),
    time_column("until"),
    time_column("started_at"),
)

replicas = Table(
    "replicas",
    metadata,
    id_column("name"),
    text_column("base_model"),
    Column("owner_id", Text, ForeignKey("owners.owner_id", ondelete="SET NULL"), nullable=True),
    text_column("state"),
    Column("info", Json, nullable=True),
    Column("load", Json, nullable=False),
    time_column("changed_at"),
    Index(None, "owner_id"),
)

cluster = Table(
    "cluster",
    metadata,
    id_column("name"),
    text_column("value"),
)

blobs = Table(
    "blobs",
    metadata,
    id_column("owner"),
    id_column("part"),
    Column("data", LargeBinary, nullable=True),
    Column("file", Text, nullable=True),
    partial_index("ix_blobs_file", "file", where="file IS NOT NULL"),
)

weights = Table(
    "weights",
    metadata,
    id_column("weights_id"),
    Column("name", Text, nullable=False, unique=True),
    text_column("base_model"),
    Column("rank", Integer, nullable=False),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    *(Column(name, Boolean, nullable=False, server_default=false()) for name in ("use_rslora", "use_dora")),
    text_column("optimizer_type"),
    Column("has_optimizer", Boolean, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("files", Json, nullable=False),
    time_column("created_at"),
    Column("method", Text, nullable=False, server_default=text("'lora'")),
    *(Column(name, Boolean, nullable=False, server_default=false()) for name in ("train_embed", "train_norms")),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    id_column("checkpoint_key"),
    text_column("user_id"),
    text_column("model_id"),
    text_column("project_id", null=True),
    text_column("kind"),
    text_column("name"),
    Column("weights_id", Text, ForeignKey("weights.weights_id"), nullable=False, index=True),
    Column("step", BigInteger, nullable=True),
    Column("public", Boolean, nullable=False),
    Column("user_metadata", Json, nullable=False),
    time_column("created_at"),
    time_column("expires_at", null=True),
    UniqueConstraint("model_id", "kind", "name"),
    # The last column makes counting the user's checkpoints an index-only scan.
    Index("ix_checkpoints_user", "user_id", "created_at", "checkpoint_key", "expires_at"),
    Index(None, "model_id", "created_at"),
    partial_index("ix_checkpoints_expires", "expires_at", where="expires_at IS NOT NULL"),
    partial_index("ix_checkpoints_public", "model_id", where="public"),
)

evaluations = Table(
    "evaluations",
    metadata,
    id_column("evaluation_id"),
    text_column("user_id"),
    Column(
        "checkpoint_key",
        Text,
        ForeignKey("checkpoints.checkpoint_key", ondelete="CASCADE"),
        nullable=True,
        index=True,
    ),
    *(text_column(name) for name in ("model", "base_model", "task", "metric", "harness")),
    Column("settings", Json, nullable=False),
    text_column("variant"),
    Column("num_items", Integer, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("estimates", Json, nullable=False),
    Column("outcomes", LargeBinary, nullable=False),
    time_column("created_at"),
    Index(None, "user_id", "created_at", "evaluation_id"),
    Index(None, "user_id", "model"),
)

samplers = Table(
    "samplers",
    metadata,
    id_column("sampling_session_id"),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False),
    text_column("user_id"),
    Column("seq", BigInteger, nullable=False),
    text_column("base_model"),
    text_column("model_path", null=True),
    text_column("model_id", null=True),
    # Not a foreign key: a sampler outlives its weights and reports that when it is used.
    Column("weights_id", Text, nullable=True, index=True),
    time_column("created_at"),
    time_column("last_used_at"),
    Column("client_counter", BigInteger, nullable=False),
    UniqueConstraint("session_id", "seq"),
    Index(None, "model_id", "created_at"),
)

losses = Table(
    "losses",
    metadata,
    id_column("loss_id"),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False, index=True),
    text_column("user_id"),
    text_column("name"),
    time_column("created_at"),
)

metrics = Table(
    "metrics",
    metadata,
    Column("entry_id", NUMBER, primary_key=True, autoincrement=True),
    Column("model_id", Text, ForeignKey("runs.model_id", ondelete="CASCADE"), nullable=False),
    text_column("source"),
    Column("number", BigInteger, nullable=False),
    Column("is_step", Boolean, nullable=False),
    Column("weight", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("optim_steps", BigInteger, nullable=True),
    Index(None, "model_id", "entry_id"),
    Index("ix_metrics_number", "model_id", "source", "number", "is_step", "weight"),
    partial_index("ix_metrics_optim_steps", "model_id", "number", where="optim_steps IS NOT NULL"),
    sqlite_autoincrement=True,  # a cursor is an entry id, so ids must never be reused
)

metric_names = Table(
    "metric_names",
    metadata,
    Column("model_id", Text, ForeignKey("runs.model_id", ondelete="CASCADE"), primary_key=True),
    id_column("name"),
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
    Column("rollout_id", NUMBER, primary_key=True, autoincrement=True),
    Column("run_id", Text, ForeignKey("tracked_runs.run_id", ondelete="CASCADE"), nullable=False),
    text_column("model_id"),
    text_column("kind"),
    text_column("split"),
    Column("step", BigInteger, nullable=False),
    text_column("group_name"),
    Column("number", BigInteger, nullable=False),
    Column("reward", Double, nullable=True),
    Column("advantage", Double, nullable=True),
    Column("num_tokens", BigInteger, nullable=True),
    Column("num_turns", BigInteger, nullable=False),
    text_column("stop_reason", null=True),
    Column("has_errors", Boolean, nullable=False),
    text_column("tags"),
    text_column("prompt_key"),
    text_column("prompt"),
    text_column("answer"),
    Column("content_bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    time_column("created_at"),
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
        NUMBER,
        ForeignKey("rollouts.rollout_id", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    text_column("text"),
)

usage = Table(
    "usage",
    metadata,
    Column("bucket_start", UtcDateTime, primary_key=True),
    # A key column cannot be NULL, so an absent session or project is stored as the empty string.
    *(id_column(name) for name in ("user_id", "session_id", "project_id", "base_model", "kind")),
    Column("amount", BigInteger, nullable=False),
    Index(None, "user_id", "bucket_start"),
)

audit = Table(
    "audit",
    metadata,
    Column("entry_id", NUMBER, primary_key=True, autoincrement=True),
    time_column("at"),
    text_column("user_id", null=True),
    text_column("event"),
    text_column("model_id", null=True),
    text_column("tinker_path", null=True),
    Column("details", Json, nullable=False),
    text_column("purpose", null=True),
    Index(None, "at"),
    Index(None, "user_id", "at"),
)

telemetry = Table(
    "telemetry",
    metadata,
    Column("event_id", NUMBER, primary_key=True, autoincrement=True),
    text_column("session_id"),
    text_column("user_id"),
    time_column("at"),
    Column("event", Json, nullable=False),
    Index(None, "session_id", "event_id"),
)

idempotency = Table(
    "idempotency",
    metadata,
    id_column("user_id"),
    id_column("key"),
    Column("value", Json, nullable=False),
    Column("created_at", UtcDateTime, nullable=False, index=True),
)

leases = Table(
    "leases",
    metadata,
    id_column("name"),
    text_column("holder"),
    Column("until", Double, nullable=False),
)

system_samples = Table(
    "system_samples",
    metadata,
    Column("period", Integer, primary_key=True, autoincrement=False),
    id_column("source"),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
    Index(None, "period", "at"),
)

episode_runs = Table(
    "episode_runs",
    metadata,
    _of_tracked_run(),
    text_column("sampler", null=True),
    Column("temperature", Double, nullable=True),
    Column("max_tokens", BigInteger, nullable=True),
    time_column("updated_at", null=True),
    Column("num_created", BigInteger, nullable=False),
    Column("num_episodes", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
)

episodes = Table(
    "episodes",
    metadata,
    _of_tracked_run(),
    id_column("episode_id"),
    Column("number", BigInteger, nullable=False),
    text_column("state"),
    text_column("sampler", null=True),
    Column("temperature", Double, nullable=True),
    Column("max_tokens", BigInteger, nullable=True),
    Column("seed", BigInteger, nullable=True),
    Column("reward", Double, nullable=True),
    Column("reward_parts", Json, nullable=False),
    Column("user_metadata", Json, nullable=False),
    text_column("error", null=True),
    Column("num_begun", BigInteger, nullable=False),
    Column("num_turns", BigInteger, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    time_column("created_at"),
    time_column("last_used_at"),
    time_column("finished_at", null=True),
    UniqueConstraint("run_id", "number"),
    Index(None, "finished_at"),
    partial_index("ix_episodes_open", "last_used_at", where="state = 'open'"),
)

# The tokens of a turn are a blob, whose owner is the turn_id.
turns = Table(
    "turns",
    metadata,
    id_column("turn_id"),
    text_column("run_id"),
    text_column("episode_id"),
    Column("number", BigInteger, nullable=False),
    Column("choice", BigInteger, nullable=False),
    text_column("kind"),
    text_column("stop_reason"),
    text_column("sampler"),
    Column("temperature", Double, nullable=False),
    Column("top_p", Double, nullable=False),
    Column("top_k", BigInteger, nullable=False),
    Column("seed", BigInteger, nullable=True),
    Column("is_constrained", Boolean, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    time_column("started_at"),
    time_column("finished_at"),
    UniqueConstraint("run_id", "episode_id", "number", "choice"),
)

trainings = Table(
    "trainings",
    metadata,
    id_column("training_id"),
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False),
    *(text_column(name) for name in ("kind", "base_model")),
    Column("settings", Json, nullable=False),
    Column("is_dry_run", Boolean, nullable=False),
    text_column("state"),
    Column("key_id", BigInteger, nullable=True),
    *(text_column(name, null=True) for name in ("run_id", "error")),
    Column("num_starts", BigInteger, nullable=False),
    Column("result", Json, nullable=True),
    *(time_column(name) for name in ("created_at", "started_at")),
    time_column("finished_at", null=True),
    Index(None, "user_id", "created_at"),
)


def insert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return the dialect's INSERT, which supports ``on_conflict_do_nothing`` and ``on_conflict_do_update``."""
    return insert_for(connection.dialect.name, table)


def insert_for(dialect: str, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return the dialect's INSERT by the dialect's name, for cached statements."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
