"""Trainings that the server starts for users in processes of its own; an index of operations that an engine died of."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "trainings",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("training_id", "user_id", "kind", "base_model")),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("is_dry_run", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("key_id", sa.BigInteger(), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("num_starts", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.user_id"], name=op.f("fk_trainings_user_id")),
        sa.PrimaryKeyConstraint("training_id", name=op.f("pk_trainings")),
    )
    op.create_index(op.f("ix_trainings_user_id_created_at"), "trainings", ["user_id", "created_at"], unique=False)
    has_deaths = sa.text("deaths > 0")
    op.create_index(
        "ix_futures_deaths", "futures", ["lane", "seq_id"], sqlite_where=has_deaths, postgresql_where=has_deaths
    )
