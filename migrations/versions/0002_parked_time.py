"""The time that a request was parked: without a slot in the engine, its computed tokens kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The default is for rows that are there, and for gateways of the version before that still write some.
    op.add_column("ledger", sa.Column("parked_us", sa.BigInteger, server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("ledger", "parked_us")
