"""Every table there is, the same for SQLite and PostgreSQL. `migrations/` makes them; a test compares the two.

Times are milliseconds since the epoch, durations microseconds. Knows nothing of domain objects.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    UniqueConstraint,
)

from gateway.storage.text import PlainText

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

organizations = Table(
    "organizations",
    metadata,
    Column("id", PlainText, primary_key=True),
    Column("name", PlainText, nullable=False),
    Column("weight", Integer, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("disabled_at_ms", BigInteger),
    Column("time_zone", PlainText, nullable=False, server_default="UTC"),
    UniqueConstraint("name"),
    CheckConstraint("weight >= 1", name="weight"),
)

teams = Table(
    "teams",
    metadata,
    Column("id", PlainText, primary_key=True),
    Column("organization_id", PlainText, ForeignKey("organizations.id"), nullable=False),
    Column("name", PlainText, nullable=False),
    Column("weight", Integer, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("disabled_at_ms", BigInteger),
    UniqueConstraint("organization_id", "name"),
    CheckConstraint("weight >= 1", name="weight"),
    Index(None, "organization_id", "id"),  # pages of one organization's teams
)

keys = Table(
    "keys",
    metadata,
    Column("id", PlainText, primary_key=True),
    Column("team_id", PlainText, ForeignKey("teams.id"), nullable=False),
    Column("name", PlainText, nullable=False),
    Column("public_id", PlainText, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("pepper_id", PlainText, nullable=False),
    Column("default_class", PlainText, nullable=False),
    Column("models", JSON(none_as_null=True)),
    Column("endpoints", JSON(none_as_null=True)),
    Column("max_queue_depth", Integer),
    Column("deadline_ms", BigInteger),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger),
    Column("revoked_at_ms", BigInteger),
    Column("networks", JSON(none_as_null=True)),
    UniqueConstraint("public_id"),
    Index(None, "team_id", "id"),  # pages of one team's keys
)

admin_tokens = Table(
    "admin_tokens",
    metadata,
    Column("id", PlainText, primary_key=True),
    Column("name", PlainText, nullable=False),
    Column("role", PlainText, nullable=False),
    Column("public_id", PlainText, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("pepper_id", PlainText, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger),
    Column("revoked_at_ms", BigInteger),
    UniqueConstraint("public_id"),
)

models = Table(
    "models",
    metadata,
    Column("name", PlainText, primary_key=True),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("disabled_at_ms", BigInteger),
)

aliases = Table(
    "aliases",
    metadata,
    Column("name", PlainText, primary_key=True),
    Column("model", PlainText, ForeignKey("models.name"), nullable=False),
    Column("system_default", PlainText),
    Column("request_class", PlainText),
    Column("created_at_ms", BigInteger, nullable=False),
)

# What administrators set holds for an organization, a team or a key, so `scope_id` refers to one of three tables. The
# model '' is all models: a primary key has no null.
limits = Table(
    "limits",
    metadata,
    Column("scope", PlainText, nullable=False),
    Column("scope_id", PlainText, nullable=False),
    Column("model", PlainText, nullable=False),
    Column("name", PlainText, nullable=False),
    Column("rule", JSON, nullable=False),
    Column("is_shadow", Boolean, nullable=False),
    Column("changed_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("scope_id", "name", "model"),
)

top_ups = Table(
    "top_ups",
    metadata,
    Column("id", PlainText, primary_key=True),
    Column("scope", PlainText, nullable=False),
    Column("scope_id", PlainText, nullable=False),
    Column("model", PlainText, nullable=False),
    Column("name", PlainText, nullable=False),
    Column("period_id", PlainText, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("reason", PlainText, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Index(None, "scope_id", "created_at_ms"),
)

prices = Table(
    "prices",
    metadata,
    Column("model", PlainText, primary_key=True),
    Column("valid_from_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("prompt", BigInteger, nullable=False),
    Column("cached", BigInteger, nullable=False),
    Column("completion", BigInteger, nullable=False),
)

# The ledger and what is made from it have neither foreign keys nor checks: what a request has used goes in whatever
# became of its team or key meanwhile, and one row that cannot be must not hold up the batch it comes in. `evenhand
# ledger verify` looks for such rows instead.
ledger = Table(
    "ledger",
    metadata,
    Column("request_id", PlainText, primary_key=True),
    Column("opened_at_ms", BigInteger, nullable=False),
    Column("closed_at_ms", BigInteger, nullable=False),
    Column("organization_id", PlainText, nullable=False),
    Column("team_id", PlainText, nullable=False),
    Column("key_id", PlainText, nullable=False),
    Column("model", PlainText, nullable=False),
    Column("requested_model", PlainText, nullable=False),
    Column("endpoint", PlainText, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("request_class", PlainText, nullable=False),
    Column("outcome", PlainText, nullable=False),
    Column("finish_reason", PlainText, nullable=False),
    Column("error_code", PlainText),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("queue_us", BigInteger, nullable=False),
    Column("prefill_us", BigInteger, nullable=False),
    Column("decode_us", BigInteger, nullable=False),
    Column("preempted_us", BigInteger, nullable=False),
    Column("engine_us", BigInteger, nullable=False),
    Column("ttft_us", BigInteger),
    Column("total_us", BigInteger),
    Column("parked_us", BigInteger, nullable=False, server_default="0"),
    Column("cost_microusd", BigInteger, nullable=False, server_default="0"),
    Column("charges", JSON(none_as_null=True)),  # of each: key, ends_at_ms, units; null if there are none
    Index(None, "closed_at_ms", "request_id"),
    Index(None, "team_id", "closed_at_ms", "request_id"),
)

rollup_queue = Table(
    "rollup_queue",
    metadata,
    Column("request_id", PlainText, primary_key=True),
)

hourly_usage = Table(
    "hourly_usage",
    metadata,
    Column("hour_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("organization_id", PlainText, primary_key=True),
    Column("team_id", PlainText, primary_key=True),
    Column("key_id", PlainText, primary_key=True),
    Column("model", PlainText, primary_key=True),
    Column("num_requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("engine_us", BigInteger, nullable=False),
    Column("cost_microusd", BigInteger, nullable=False, server_default="0"),
    Index(None, "team_id", "hour_ms"),
)

# The sums of the ledger rows' charges, one row for each quota and period.
quota_usage = Table(
    "quota_usage",
    metadata,
    Column("key", PlainText, primary_key=True),
    Column("organization_id", PlainText, nullable=False),
    Column("ends_at_ms", BigInteger, nullable=False),
    Column("committed", BigInteger, nullable=False),
    Index(None, "organization_id", "ends_at_ms"),
)

quota_alerts = Table(
    "quota_alerts",
    metadata,
    Column("key", PlainText, primary_key=True),
    Column("percent", Integer, primary_key=True, autoincrement=False),
    Column("organization_id", PlainText, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Index(None, "organization_id", "at_ms"),
)

audit = Table(
    "audit",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("actor", PlainText, nullable=False),
    Column("source", PlainText, nullable=False),
    Column("request_id", PlainText, nullable=False),
    Column("action", PlainText, nullable=False),
    Column("object_id", PlainText, nullable=False),
    Column("before", PlainText, nullable=False),
    Column("after", PlainText, nullable=False),
    Column("previous_hash", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)

# One row for ever, made by the migration.
tenancy_version = Table(
    "tenancy_version",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)
