"""Limits, top-ups, prices, what is committed of quotas, and what requests have cost; time zones; networks of keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TEXT = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")


def upgrade() -> None:
    # Defaults are for rows that are there, and for gateways of the version before that still write some. Charges have
    # none: PostgreSQL cannot compare values of its type json, so nobody could tell whether a default is the right one.
    op.add_column("organizations", sa.Column("time_zone", TEXT, server_default="UTC", nullable=False))
    op.add_column("keys", sa.Column("networks", sa.JSON))
    op.add_column("ledger", sa.Column("cost_microusd", sa.BigInteger, server_default="0", nullable=False))
    op.add_column("ledger", sa.Column("charges", sa.JSON))
    op.add_column("hourly_usage", sa.Column("cost_microusd", sa.BigInteger, server_default="0", nullable=False))
    _create_policy()
    op.create_table(
        "quota_usage",
        sa.Column("key", TEXT, nullable=False),
        sa.Column("organization_id", TEXT, nullable=False),
        sa.Column("ends_at_ms", sa.BigInteger, nullable=False),
        sa.Column("committed", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_quota_usage")),
    )
    op.create_index(op.f("ix_quota_usage_organization_id_ends_at_ms"), "quota_usage", ["organization_id", "ends_at_ms"])
    op.create_table(
        "quota_alerts",
        sa.Column("key", TEXT, nullable=False),
        sa.Column("percent", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("organization_id", TEXT, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("key", "percent", name=op.f("pk_quota_alerts")),
    )
    op.create_index(op.f("ix_quota_alerts_organization_id_at_ms"), "quota_alerts", ["organization_id", "at_ms"])


def _create_policy() -> None:
    op.create_table(
        "limits",
        sa.Column("scope", TEXT, nullable=False),
        sa.Column("scope_id", TEXT, nullable=False),
        sa.Column("model", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("rule", sa.JSON, nullable=False),
        sa.Column("is_shadow", sa.Boolean, nullable=False),
        sa.Column("changed_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("scope_id", "name", "model", name=op.f("pk_limits")),
    )
    op.create_table(
        "top_ups",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("scope", TEXT, nullable=False),
        sa.Column("scope_id", TEXT, nullable=False),
        sa.Column("model", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("period_id", TEXT, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_top_ups")),
    )
    op.create_index(op.f("ix_top_ups_scope_id_created_at_ms"), "top_ups", ["scope_id", "created_at_ms"])
    op.create_table(
        "prices",
        sa.Column("model", TEXT, nullable=False),
        sa.Column("valid_from_ms", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("prompt", sa.BigInteger, nullable=False),
        sa.Column("cached", sa.BigInteger, nullable=False),
        sa.Column("completion", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("model", "valid_from_ms", name=op.f("pk_prices")),
    )


def downgrade() -> None:
    for table in ("quota_alerts", "quota_usage", "prices", "top_ups", "limits"):
        op.drop_table(table)
    op.drop_column("hourly_usage", "cost_microusd")
    op.drop_column("ledger", "charges")
    op.drop_column("ledger", "cost_microusd")
    op.drop_column("keys", "networks")
    op.drop_column("organizations", "time_zone")
