"""The values that clients reported to a run are counted as they come, and not with each report."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "metric_totals",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("num_values", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["runs.model_id"], name=op.f("fk_metric_totals_model_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_metric_totals")),
    )
    op.execute(
        "INSERT INTO metric_totals SELECT model_id, sum(weight) FROM metrics WHERE source = 'client' GROUP BY model_id"
    )
