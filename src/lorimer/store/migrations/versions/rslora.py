"""rsLoRA: whether the adapters of a run, and of saved weights, are scaled by alpha / sqrt(rank)."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("runs", "weights"):
        op.add_column(table, sa.Column("use_rslora", sa.Boolean(), nullable=False, server_default=sa.false()))
