"""A user may have quotas of their own; without one, that of the server's settings holds."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("users", sa.Column("max_stored_bytes", sa.BigInteger(), nullable=True))
    op.add_column("users", sa.Column("requests_per_second", sa.Double(), nullable=True))
