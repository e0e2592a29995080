"""A database with any number of keys and ledger rows, filled by the database itself: a million rows in seconds.

Ten keys a team, ten teams an organization; a rate on each key and a quota on each team; rows spread evenly over the
keys, and those of a key over the hours of the last day.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from string import Template

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.domain.ledger import HOUR_MS

KEYS_PER_TEAM = 10
NOW_MS = 1_796_000_000_000
MODEL = "m1"

_DRIVERS = {"postgresql": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
_POSTGRESQL = {
    "series": "FROM generate_series(0, $last) AS s(n)",
    "hex": "lpad(to_hex({number}), {width}, '0')",
    "blob": "'\\x00'::bytea",
    "false": "false",
}
_SQLITE = {
    "series": (
        "FROM (WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c WHERE n < $last) SELECT n FROM c) AS s"
    ),
    "hex": "printf('%0{width}x', {number})",
    "blob": "x'00'",
    "false": "0",
}

_ORGANIZATIONS = """
INSERT INTO organizations (id, name, weight, created_at_ms, time_zone)
SELECT 'org_' || $n, 'o' || $n, 1, 0, 'UTC' $series
"""
_TEAMS = """
INSERT INTO teams (id, organization_id, name, weight, created_at_ms)
SELECT 'team_' || $n, 'org_' || $tenth, 't' || $n, 1, 0 $series
"""
_KEYS = """
INSERT INTO keys (id, team_id, name, public_id, digest, pepper_id, default_class, created_at_ms)
SELECT 'key_' || $n, 'team_' || $tenth, 'k', $short, $blob, 'p1', 'interactive', 0 $series
"""
_KEY_LIMITS = """
INSERT INTO limits (scope, scope_id, model, name, rule, is_shadow, changed_at_ms)
SELECT 'key', 'key_' || $n, '', 'requests/minute', '{"type": "requests", "amount": 1000, "period": "minute"}',
       $false, 0 $series
"""
_TEAM_LIMITS = """
INSERT INTO limits (scope, scope_id, model, name, rule, is_shadow, changed_at_ms)
SELECT 'team', 'team_' || $n, '', 'quota-tokens/month',
       '{"type": "quota", "unit": "tokens", "period": "month", "amount": 1000000000}', $false, 0 $series
"""
_LEDGER = """
INSERT INTO ledger (request_id, opened_at_ms, closed_at_ms, organization_id, team_id, key_id, model, requested_model,
                    endpoint, stream, request_class, outcome, finish_reason, prompt_tokens, cached_tokens,
                    completion_tokens, queue_us, prefill_us, decode_us, preempted_us, engine_us)
SELECT 'req_' || $n, $closed, $closed, 'org_' || $organization, 'team_' || $team, 'key_' || $key, 'm1', 'm1',
       'chat', $false, 'interactive', 'finished', 'stop', 100, 0, 20, 0, 0, 0, 0, 100 $series
"""
_HOURS = """
INSERT INTO hourly_usage (hour_ms, organization_id, team_id, key_id, model, num_requests, prompt_tokens, cached_tokens,
                          completion_tokens, engine_us, cost_microusd)
SELECT closed_at_ms - closed_at_ms % $hour, organization_id, team_id, key_id, model, count(*), sum(prompt_tokens), 0,
       sum(completion_tokens), sum(engine_us), 0 FROM ledger GROUP BY 1, 2, 3, 4, 5
"""


@dataclass(frozen=True)
class Filling:
    """How much is in a database. The number of keys is a multiple of 100."""

    num_keys: int
    num_rows: int

    @property
    def num_teams(self) -> int:
        return self.num_keys // KEYS_PER_TEAM

    @property
    def num_organizations(self) -> int:
        return self.num_teams // KEYS_PER_TEAM


def public_id(n: int) -> str:
    return f"{n:012x}"


def team_id(n: int) -> str:
    return f"team_{n:032x}"


def organization_id(n: int) -> str:
    return f"org_{n:032x}"


def drawn(n: int, num: int) -> int:
    """The n-th of some numbers below `num`, all over the place and always the same."""
    return int.from_bytes(hashlib.sha256(str(n).encode()).digest()[:8], "big") % num


async def fill(url: str, filling: Filling) -> None:
    """Fill a database that has all tables and nothing in them."""
    dialect = _POSTGRESQL if url.startswith("postgresql") else _SQLITE

    def of(number: str, width: int = 32) -> str:
        return dialect["hex"].format(number=number, width=width)

    key = f"s.n % {filling.num_keys}"
    words = {
        "n": of("s.n"),
        "short": of("s.n", 12),
        "tenth": of(f"s.n / {KEYS_PER_TEAM}"),
        "key": of(key),
        "team": of(f"({key}) / {KEYS_PER_TEAM}"),
        "organization": of(f"({key}) / {KEYS_PER_TEAM * KEYS_PER_TEAM}"),
        "closed": f"{NOW_MS} - 1 - ((s.n / {filling.num_keys}) % 24) * {HOUR_MS}",
        "hour": str(HOUR_MS),
        "blob": dialect["blob"],
        "false": dialect["false"],
    }
    scheme, _, rest = url.partition("://")
    engine = create_async_engine(f"{_DRIVERS[scheme]}://{rest}")  # ours would not wait as long as this takes
    try:
        async with engine.begin() as connection:
            for statement, num in (
                (_ORGANIZATIONS, filling.num_organizations),
                (_TEAMS, filling.num_teams),
                (_KEYS, filling.num_keys),
                (_KEY_LIMITS, filling.num_keys),
                (_TEAM_LIMITS, filling.num_teams),
                (_LEDGER, filling.num_rows),
                (_HOURS, 1),
                ("ANALYZE", 1),
            ):
                series = Template(dialect["series"]).substitute(last=num - 1)
                await connection.execute(text(Template(statement).substitute(words, series=series).replace(":", "\\:")))
    finally:
        await engine.dispose()
