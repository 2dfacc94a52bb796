"""Methods of training: a run trains an adapter, or all weights of its model."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("runs", "weights"):
        op.add_column(table, sa.Column("method", sa.Text(), nullable=False, server_default=sa.text("'lora'")))
        for name in ("train_embed", "train_norms"):
            op.add_column(table, sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false()))
