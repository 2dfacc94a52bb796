"""Episodes: what programs outside did with a run's sampler, turn by turn."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "episode_runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("sampler", sa.Text(), nullable=True),
        sa.Column("temperature", sa.Double(), nullable=True),
        sa.Column("max_tokens", sa.BigInteger(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=True),
        *(sa.Column(f"num_{name}", sa.BigInteger(), nullable=False) for name in ("created", "episodes", "bytes")),
        _run_key("episode_runs"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_episode_runs")),
    )
    op.create_table(
        "episodes",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("episode_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("sampler", sa.Text(), nullable=True),
        sa.Column("temperature", sa.Double(), nullable=True),
        sa.Column("max_tokens", sa.BigInteger(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("reward_parts", sa.Text(), nullable=False),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        *(sa.Column(f"num_{name}", sa.BigInteger(), nullable=False) for name in ("begun", "turns", "tokens", "bytes")),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        _run_key("episodes"),
        sa.PrimaryKeyConstraint("run_id", "episode_id", name=op.f("pk_episodes")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_episodes_run_id_number")),
    )
    op.create_index(op.f("ix_episodes_finished_at"), "episodes", ["finished_at"], unique=False)
    is_open = sa.text("state = 'open'")
    op.create_index(
        "ix_episodes_open", "episodes", ["last_used_at"], unique=False, sqlite_where=is_open, postgresql_where=is_open
    )
    op.create_table(
        "turns",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("turn_id", "run_id", "episode_id")),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("number", "choice")),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("kind", "stop_reason", "sampler")),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("top_p", sa.Double(), nullable=False),
        sa.Column("top_k", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("is_constrained", sa.Boolean(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("turn_id", name=op.f("pk_turns")),
        sa.UniqueConstraint(
            "run_id", "episode_id", "number", "choice", name=op.f("uq_turns_run_id_episode_id_number_choice")
        ),
    )


def _run_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["run_id"], ["tracked_runs.run_id"], name=op.f(f"fk_{table}_run_id"), ondelete="CASCADE"
    )
