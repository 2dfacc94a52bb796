"""Evaluations: grades of checkpoints and base models on the items of tasks."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "evaluations",
        sa.Column("evaluation_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("checkpoint_key", sa.Text(), nullable=True),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("model", "base_model", "task", "metric", "harness", "settings", "variant")
        ),
        sa.Column("num_items", sa.Integer(), nullable=False),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("estimates", sa.Text(), nullable=False),
        sa.Column("outcomes", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_key"],
            ["checkpoints.checkpoint_key"],
            name=op.f("fk_evaluations_checkpoint_key"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("evaluation_id", name=op.f("pk_evaluations")),
    )
    op.create_index(op.f("ix_evaluations_checkpoint_key"), "evaluations", ["checkpoint_key"])
    op.create_index(
        op.f("ix_evaluations_user_id_created_at_evaluation_id"),
        "evaluations",
        ["user_id", "created_at", "evaluation_id"],
    )
    op.create_index(op.f("ix_evaluations_user_id_model"), "evaluations", ["user_id", "model"])
