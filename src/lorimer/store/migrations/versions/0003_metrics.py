"""Runs have metrics over their steps, and the errors of a user are found without reading all requests."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
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
    op.create_index(
        "ix_futures_errors",
        "futures",
        ["user_id", "finished_at"],
        unique=False,
        sqlite_where=sa.text("error IS NOT NULL"),
        postgresql_where=sa.text("error IS NOT NULL"),
    )
