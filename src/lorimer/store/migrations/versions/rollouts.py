"""Rollouts: what a policy wrote in a step. Their turns are blobs; their text is a table of its own, to be searched."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", number, nullable=False, autoincrement=True),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("advantage", sa.Double(), nullable=True),
        sa.Column("num_tokens", sa.BigInteger(), nullable=True),
        sa.Column("num_turns", sa.BigInteger(), nullable=False),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        sa.Column("has_errors", sa.Boolean(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("prompt_key", sa.Text(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("content_bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["tracked_runs.run_id"], name=op.f("fk_rollouts_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint(
            "run_id",
            "step",
            "kind",
            "split",
            "group_name",
            "number",
            name=op.f("uq_rollouts_run_id_step_kind_split_group_name_number"),
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_rollouts_step", "rollouts", ["run_id", "step", "rollout_id", "stored_bytes"], unique=False)
    for key in ("reward", "num_tokens"):
        columns = ["run_id", key, "rollout_id"]
        op.create_index(op.f(f"ix_rollouts_run_id_{key}_rollout_id"), "rollouts", columns, unique=False)
    op.create_index(
        op.f("ix_rollouts_run_id_prompt_key_step"), "rollouts", ["run_id", "prompt_key", "step"], unique=False
    )
    op.create_table(
        "rollout_texts",
        sa.Column("rollout_id", number, nullable=False, autoincrement=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_rollout_texts_rollout_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_rollout_texts")),
    )
