"""Samples of the system over time, and optimizer steps of the client's steps.

Summaries of runs are built again, because the engine's steps count from 0.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "system_samples",
        sa.Column("period", sa.Integer(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("period", "source", "at", name=op.f("pk_system_samples")),
    )
    op.create_index(op.f("ix_system_samples_period_at"), "system_samples", ["period", "at"])
    op.add_column("metrics", sa.Column("optim_steps", sa.BigInteger(), nullable=True))
    where = sa.text("optim_steps IS NOT NULL")
    op.create_index(
        "ix_metrics_optim_steps", "metrics", ["model_id", "number"], postgresql_where=where, sqlite_where=where
    )
    op.execute("DELETE FROM metric_states")
