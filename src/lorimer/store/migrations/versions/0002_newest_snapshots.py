"""Runs have a newest snapshot beside the one that the journal begins at."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("newest_seq", sa.BigInteger(), nullable=True))
    op.add_column("runs", sa.Column("newest_name", sa.Text(), nullable=True))
