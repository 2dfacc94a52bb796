"""The first schema that is released.

Its number continues that of development versions, so that a database of the last of them opens as it is.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = None
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("entry_id", NUMBER, autoincrement=True, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=True),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=True),
        sa.Column("tinker_path", sa.Text(), nullable=True),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_at"), "audit", ["at"], unique=False)
    op.create_index(op.f("ix_audit_user_id_at"), "audit", ["user_id", "at"], unique=False)
    op.create_table(
        "blobs",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=True),
        sa.Column("file", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("owner", "part", name=op.f("pk_blobs")),
    )
    op.create_index(
        "ix_blobs_file",
        "blobs",
        ["file"],
        unique=False,
        sqlite_where=sa.text("file IS NOT NULL"),
        postgresql_where=sa.text("file IS NOT NULL"),
    )
    op.create_table(
        "futures",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("category", sa.Text(), nullable=True),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fetched_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("result_format", sa.Text(), nullable=True),
        sa.Column("result_size", sa.BigInteger(), nullable=False),
        sa.Column("payload_sha256", sa.Text(), nullable=False),
        sa.Column("holds_bytes", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_futures")),
        sa.UniqueConstraint("lane", "seq_id", name=op.f("uq_futures_lane_seq_id")),
    )
    op.create_index(
        "ix_futures_errors",
        "futures",
        ["user_id", "finished_at"],
        unique=False,
        sqlite_where=sa.text("error IS NOT NULL"),
        postgresql_where=sa.text("error IS NOT NULL"),
    )
    op.create_index(
        "ix_futures_fetched_holds_bytes",
        "futures",
        ["fetched_at"],
        unique=False,
        sqlite_where=sa.text("holds_bytes = 1"),
        postgresql_where=sa.text("holds_bytes"),
    )
    op.create_index(op.f("ix_futures_finished_at"), "futures", ["finished_at"], unique=False)
    op.create_index(
        "ix_futures_finished_holds_bytes",
        "futures",
        ["finished_at"],
        unique=False,
        sqlite_where=sa.text("holds_bytes = 1"),
        postgresql_where=sa.text("holds_bytes"),
    )
    op.create_index(
        "ix_futures_lane_holds_bytes",
        "futures",
        ["lane", "seq_id"],
        unique=False,
        sqlite_where=sa.text("holds_bytes = 1"),
        postgresql_where=sa.text("holds_bytes"),
    )
    op.create_index(
        "ix_futures_queued",
        "futures",
        ["lane", "seq_id"],
        unique=False,
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(op.f("ix_futures_session_id_received_at"), "futures", ["session_id", "received_at"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "key", name=op.f("pk_idempotency")),
    )
    op.create_index(op.f("ix_idempotency_created_at"), "idempotency", ["created_at"], unique=False)
    op.create_table(
        "telemetry",
        sa.Column("event_id", NUMBER, autoincrement=True, nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_telemetry")),
    )
    op.create_index(op.f("ix_telemetry_session_id_event_id"), "telemetry", ["session_id", "event_id"], unique=False)
    op.create_table(
        "usage",
        sa.Column("bucket_start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "bucket_start", "user_id", "session_id", "project_id", "base_model", "kind", name=op.f("pk_usage")
        ),
    )
    op.create_index(op.f("ix_usage_user_id_bucket_start"), "usage", ["user_id", "bucket_start"], unique=False)
    op.create_table(
        "users",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("email", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("max_stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("requests_per_second", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("user_id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
    )
    op.create_table(
        "weights",
        sa.Column("weights_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer_type", sa.Text(), nullable=False),
        sa.Column("has_optimizer", sa.Boolean(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("weights_id", name=op.f("pk_weights")),
        sa.UniqueConstraint("name", name=op.f("uq_weights_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", NUMBER, autoincrement=True, nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.user_id"], name=op.f("fk_api_keys_user_id")),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_api_keys_prefix"), "api_keys", ["prefix"], unique=False)
    op.create_index(op.f("ix_api_keys_user_id"), "api_keys", ["user_id"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("checkpoint_key", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("weights_id", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["weights_id"], ["weights.weights_id"], name=op.f("fk_checkpoints_weights_id")),
        sa.PrimaryKeyConstraint("checkpoint_key", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("model_id", "kind", "name", name=op.f("uq_checkpoints_model_id_kind_name")),
    )
    op.create_index(
        "ix_checkpoints_expires",
        "checkpoints",
        ["expires_at"],
        unique=False,
        sqlite_where=sa.text("expires_at IS NOT NULL"),
        postgresql_where=sa.text("expires_at IS NOT NULL"),
    )
    op.create_index(op.f("ix_checkpoints_model_id_created_at"), "checkpoints", ["model_id", "created_at"], unique=False)
    op.create_index(
        "ix_checkpoints_public",
        "checkpoints",
        ["model_id"],
        unique=False,
        sqlite_where=sa.text("public = 1"),
        postgresql_where=sa.text("public"),
    )
    op.create_index(
        "ix_checkpoints_user",
        "checkpoints",
        ["user_id", "created_at", "checkpoint_key", "expires_at"],
        unique=False,
    )
    op.create_index(op.f("ix_checkpoints_weights_id"), "checkpoints", ["weights_id"], unique=False)
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("display_name", sa.Text(), nullable=True),
        sa.Column("display_name_folded", sa.Text(), nullable=True),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("sdk_version", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("finish_detail", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.user_id"], name=op.f("fk_sessions_user_id")),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_created_at_session_id"), "sessions", ["created_at", "session_id"], unique=False)
    op.create_index(
        op.f("ix_sessions_user_id_created_at_session_id"),
        "sessions",
        ["user_id", "created_at", "session_id"],
        unique=False,
    )
    op.create_table(
        "losses",
        sa.Column("loss_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("fk_losses_session_id")),
        sa.PrimaryKeyConstraint("loss_id", name=op.f("pk_losses")),
    )
    op.create_index(op.f("ix_losses_session_id"), "losses", ["session_id"], unique=False)
    op.create_table(
        "runs",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("model_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer_type", sa.Text(), nullable=False),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_request_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("snapshot_seq", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_name", sa.Text(), nullable=True),
        sa.Column("corrupted", sa.Text(), nullable=True),
        sa.Column("is_unloaded", sa.Boolean(), nullable=False),
        sa.Column("newest_seq", sa.BigInteger(), nullable=True),
        sa.Column("newest_name", sa.Text(), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("loaded_from", sa.Text(), nullable=True),
        sa.Column("optim_steps_before", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("fk_runs_session_id")),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_runs")),
        sa.UniqueConstraint("session_id", "model_seq_id", name=op.f("uq_runs_session_id_model_seq_id")),
    )
    op.create_index(op.f("ix_runs_created_at_model_id"), "runs", ["created_at", "model_id"], unique=False)
    op.create_index(
        op.f("ix_runs_user_id_created_at_model_id"), "runs", ["user_id", "created_at", "model_id"], unique=False
    )
    op.create_index(op.f("ix_runs_run_id_created_at"), "runs", ["run_id", "created_at"], unique=False)
    _create_tracked_runs()
    op.create_table(
        "metrics",
        sa.Column("entry_id", NUMBER, autoincrement=True, nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("is_step", sa.Boolean(), nullable=False),
        sa.Column("weight", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["model_id"], ["runs.model_id"], name=op.f("fk_metrics_model_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_metrics")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_metrics_model_id_entry_id"), "metrics", ["model_id", "entry_id"], unique=False)
    op.create_index("ix_metrics_number", "metrics", ["model_id", "source", "number", "is_step", "weight"], unique=False)
    op.create_table(
        "metric_names",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["runs.model_id"], name=op.f("fk_metric_names_model_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("model_id", "name", name=op.f("pk_metric_names")),
    )
    op.create_table(
        "metric_totals",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("num_values", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["runs.model_id"], name=op.f("fk_metric_totals_model_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_metric_totals")),
    )
    op.create_table(
        "samplers",
        sa.Column("sampling_session_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("model_path", sa.Text(), nullable=True),
        sa.Column("model_id", sa.Text(), nullable=True),
        sa.Column("weights_id", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("client_counter", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("fk_samplers_session_id")),
        sa.PrimaryKeyConstraint("sampling_session_id", name=op.f("pk_samplers")),
        sa.UniqueConstraint("session_id", "seq", name=op.f("uq_samplers_session_id_seq")),
    )
    op.create_index(op.f("ix_samplers_model_id_created_at"), "samplers", ["model_id", "created_at"], unique=False)
    op.create_index(op.f("ix_samplers_weights_id"), "samplers", ["weights_id"], unique=False)


def _create_tracked_runs() -> None:
    op.create_table(
        "tracked_runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("run_key", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("search", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("num_parts", sa.Integer(), nullable=False),
        sa.Column("parent_path", sa.Text(), nullable=True),
        sa.Column("parent_run_id", sa.Text(), nullable=True),
        sa.Column("num_steps", sa.BigInteger(), nullable=True),
        sa.Column("steps_reported", sa.BigInteger(), nullable=True),
        sa.Column("optim_steps", sa.BigInteger(), nullable=True),
        sa.Column("past_seconds", sa.Double(), nullable=False),
        sa.Column("ended", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("is_archived", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_tracked_runs")),
        sa.UniqueConstraint("user_id", "run_key", name=op.f("uq_tracked_runs_user_id_run_key")),
    )
    newest = ["user_id", "is_archived", "created_at", "run_id"]
    op.create_index(op.f(f"ix_tracked_runs_{'_'.join(newest)}"), "tracked_runs", newest, unique=False)
    op.create_index(op.f("ix_tracked_runs_user_id_number"), "tracked_runs", ["user_id", "number"], unique=False)
    op.create_index(
        "ix_tracked_runs_parent_run_id",
        "tracked_runs",
        ["parent_run_id"],
        unique=False,
        sqlite_where=sa.text("parent_run_id IS NOT NULL"),
        postgresql_where=sa.text("parent_run_id IS NOT NULL"),
    )
    _create_of_run("run_tags", sa.Column("tag", sa.Text(), nullable=False))
    _create_of_run(
        "run_fields",
        sa.Column("field", sa.Text(), nullable=False),
        sa.Column("number", sa.Double(), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
    )
    _create_of_run(
        "run_metrics",
        sa.Column("name", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("last", "min", "max")),
        *(sa.Column(f"{name}_step", sa.BigInteger(), nullable=True) for name in ("last", "min", "max")),
    )
    op.create_table(
        "metric_states",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("entry_id", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["runs.model_id"], name=op.f("fk_metric_states_model_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_metric_states")),
    )


def _create_of_run(name: str, *columns: Any) -> None:
    """Create a table whose rows belong to a tracked run; the first column names one of them."""
    op.create_table(
        name,
        sa.Column("run_id", sa.Text(), nullable=False),
        *columns,
        sa.ForeignKeyConstraint(
            ["run_id"], ["tracked_runs.run_id"], name=op.f(f"fk_{name}_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", columns[0].name, name=op.f(f"pk_{name}")),
    )
