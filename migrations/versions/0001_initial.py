"""Organizations, teams, keys, admin tokens, models, the ledger with its hourly sums, and the audit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Compared byte by byte in both databases; SQLite's own text is.
TEXT = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "organizations",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("weight", sa.Integer, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("disabled_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_organizations")),
        sa.UniqueConstraint("name", name=op.f("uq_organizations_name")),
        sa.CheckConstraint("weight >= 1", name=op.f("ck_organizations_weight")),
    )
    op.create_table(
        "teams",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("organization_id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("weight", sa.Integer, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("disabled_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_teams")),
        sa.ForeignKeyConstraint(["organization_id"], ["organizations.id"], name=op.f("fk_teams_organization_id")),
        sa.UniqueConstraint("organization_id", "name", name=op.f("uq_teams_organization_id_name")),
        sa.CheckConstraint("weight >= 1", name=op.f("ck_teams_weight")),
    )
    op.create_index(op.f("ix_teams_organization_id_id"), "teams", ["organization_id", "id"])
    op.create_table(
        "keys",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("team_id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("public_id", TEXT, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("pepper_id", TEXT, nullable=False),
        sa.Column("default_class", TEXT, nullable=False),
        sa.Column("models", sa.JSON),
        sa.Column("endpoints", sa.JSON),
        sa.Column("max_queue_depth", sa.Integer),
        sa.Column("deadline_ms", sa.BigInteger),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger),
        sa.Column("revoked_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name=op.f("fk_keys_team_id")),
        sa.UniqueConstraint("public_id", name=op.f("uq_keys_public_id")),
    )
    op.create_index(op.f("ix_keys_team_id_id"), "keys", ["team_id", "id"])
    op.create_table(
        "admin_tokens",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("role", TEXT, nullable=False),
        sa.Column("public_id", TEXT, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("pepper_id", TEXT, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger),
        sa.Column("revoked_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_admin_tokens")),
        sa.UniqueConstraint("public_id", name=op.f("uq_admin_tokens_public_id")),
    )
    op.create_table(
        "models",
        sa.Column("name", TEXT, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("disabled_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
    )
    op.create_table(
        "aliases",
        sa.Column("name", TEXT, nullable=False),
        sa.Column("model", TEXT, nullable=False),
        sa.Column("system_default", TEXT),
        sa.Column("request_class", TEXT),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_aliases")),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_aliases_model")),
    )
    _create_ledger()
    op.create_table(
        "audit",
        sa.Column("sequence", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("actor", TEXT, nullable=False),
        sa.Column("source", TEXT, nullable=False),
        sa.Column("request_id", TEXT, nullable=False),
        sa.Column("action", TEXT, nullable=False),
        sa.Column("object_id", TEXT, nullable=False),
        sa.Column("before", TEXT, nullable=False),
        sa.Column("after", TEXT, nullable=False),
        sa.Column("previous_hash", sa.LargeBinary, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_audit")),
    )
    version = op.create_table(
        "tenancy_version",
        sa.Column("id", sa.SmallInteger, autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenancy_version")),
        sa.CheckConstraint("id = 1", name=op.f("ck_tenancy_version_one_row")),
    )
    op.execute(version.insert().values(id=1, version=0))


def _create_ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("request_id", TEXT, nullable=False),
        sa.Column("opened_at_ms", sa.BigInteger, nullable=False),
        sa.Column("closed_at_ms", sa.BigInteger, nullable=False),
        sa.Column("organization_id", TEXT, nullable=False),
        sa.Column("team_id", TEXT, nullable=False),
        sa.Column("key_id", TEXT, nullable=False),
        sa.Column("model", TEXT, nullable=False),
        sa.Column("requested_model", TEXT, nullable=False),
        sa.Column("endpoint", TEXT, nullable=False),
        sa.Column("stream", sa.Boolean, nullable=False),
        sa.Column("request_class", TEXT, nullable=False),
        sa.Column("outcome", TEXT, nullable=False),
        sa.Column("finish_reason", TEXT, nullable=False),
        sa.Column("error_code", TEXT),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("queue_us", sa.BigInteger, nullable=False),
        sa.Column("prefill_us", sa.BigInteger, nullable=False),
        sa.Column("decode_us", sa.BigInteger, nullable=False),
        sa.Column("preempted_us", sa.BigInteger, nullable=False),
        sa.Column("engine_us", sa.BigInteger, nullable=False),
        sa.Column("ttft_us", sa.BigInteger),
        sa.Column("total_us", sa.BigInteger),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_ledger")),
    )
    op.create_index(op.f("ix_ledger_closed_at_ms_request_id"), "ledger", ["closed_at_ms", "request_id"])
    op.create_index(
        op.f("ix_ledger_team_id_closed_at_ms_request_id"), "ledger", ["team_id", "closed_at_ms", "request_id"]
    )
    op.create_table(
        "rollup_queue",
        sa.Column("request_id", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_rollup_queue")),
    )
    op.create_table(
        "hourly_usage",
        sa.Column("hour_ms", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("organization_id", TEXT, nullable=False),
        sa.Column("team_id", TEXT, nullable=False),
        sa.Column("key_id", TEXT, nullable=False),
        sa.Column("model", TEXT, nullable=False),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("engine_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "hour_ms", "organization_id", "team_id", "key_id", "model", name=op.f("pk_hourly_usage")
        ),
    )
    op.create_index(op.f("ix_hourly_usage_team_id_hour_ms"), "hourly_usage", ["team_id", "hour_ms"])


def downgrade() -> None:
    for table in (
        "tenancy_version",
        "audit",
        "hourly_usage",
        "rollup_queue",
        "ledger",
        "aliases",
        "models",
        "admin_tokens",
        "keys",
        "teams",
        "organizations",
    ):
        op.drop_table(table)
