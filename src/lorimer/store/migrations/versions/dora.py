"""DoRA: whether a run, and saved weights, have magnitudes of rows beside the pairs."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("runs", "weights"):
        op.add_column(table, sa.Column("use_dora", sa.Boolean(), nullable=False, server_default=sa.false()))
