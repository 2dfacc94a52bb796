"""Owners and replicas: which process computes which runs and requests."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "owners",
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("door", sa.Text(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner_id", name=op.f("pk_owners")),
    )
    op.create_table(
        "replicas",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("info", sa.Text(), nullable=True),
        sa.Column("load", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["owner_id"], ["owners.owner_id"], name=op.f("fk_replicas_owner_id"), ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_replicas")),
    )
    op.create_index(op.f("ix_replicas_owner_id"), "replicas", ["owner_id"], unique=False)
    op.create_table(
        "cluster",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_cluster")),
    )
    op.add_column("runs", sa.Column("replica", sa.Text(), nullable=True))
    op.create_index(
        "ix_runs_replica",
        "runs",
        ["replica"],
        unique=False,
        sqlite_where=sa.text("replica IS NOT NULL"),
        postgresql_where=sa.text("replica IS NOT NULL"),
    )
    op.add_column("futures", sa.Column("place", sa.Text(), nullable=True))
    op.add_column("futures", sa.Column("finished_no", sa.BigInteger(), nullable=True))
    op.add_column("futures", sa.Column("deaths", sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.create_index(
        "ix_futures_place",
        "futures",
        ["place"],
        unique=False,
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
