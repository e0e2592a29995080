"""Values to keep, and short ways to keep them, for tests of the storage."""

from __future__ import annotations

from typing import Any

from gateway.domain.audit import AuditDraft
from gateway.domain.catalog import Model
from gateway.domain.ids import AdminTokenId, KeyId, OrganizationId, RequestId, TeamId
from gateway.domain.ledger import HOUR_MS, Charge, LedgerRow
from gateway.domain.limits.policy import Limit, Price, RequestRate, TopUp
from gateway.domain.tenancy import AdminToken, ApiKey, Organization, Secret, Team
from gateway.storage.database import Database

NOW_MS = 480_000 * HOUR_MS + 1234


def organization(n: int = 1, **fields: Any) -> Organization:
    return Organization(
        **{"id": OrganizationId(f"org_{n:04}"), "name": f"organization {n}", "created_at_ms": NOW_MS} | fields
    )


def team(n: int = 1, **fields: Any) -> Team:
    defaults: dict[str, Any] = {
        "id": TeamId(f"team_{n:04}"),
        "organization_id": OrganizationId("org_0001"),
        "name": f"team {n}",
        "created_at_ms": NOW_MS,
    }
    return Team(**defaults | fields)


def secret(n: int = 1) -> Secret:
    return Secret(public_id=f"public{n:04}", digest=bytes([n % 256]) * 32, pepper_id="p1")


def key(n: int = 1, **fields: Any) -> ApiKey:
    defaults: dict[str, Any] = {
        "id": KeyId(f"key_{n:04}"),
        "team_id": TeamId("team_0001"),
        "name": f"key {n}",
        "secret": secret(n),
        "created_at_ms": NOW_MS,
    }
    return ApiKey(**defaults | fields)


def admin_token(n: int = 1, **fields: Any) -> AdminToken:
    defaults: dict[str, Any] = {
        "id": AdminTokenId(f"adm_{n:04}"),
        "name": f"token {n}",
        "role": "admin",
        "secret": secret(n),
        "created_at_ms": NOW_MS,
    }
    return AdminToken(**defaults | fields)


def model(name: str = "m1", **fields: Any) -> Model:
    return Model(**{"name": name, "created_at_ms": NOW_MS} | fields)


def limit(n: int = 1, **fields: Any) -> Limit:
    """Of organization n, if nothing is said."""
    defaults: dict[str, Any] = {
        "scope": "organization",
        "scope_id": f"org_{n:04}",
        "rule": RequestRate(amount=n, period="minute"),
        "changed_at_ms": NOW_MS + n,
    }
    return Limit(**defaults | fields)


def top_up(n: int = 1, **fields: Any) -> TopUp:
    defaults: dict[str, Any] = {
        "id": f"top_{n:04}",
        "scope": "organization",
        "scope_id": "org_0001",
        "name": "quota-tokens/month",
        "period_id": "2024-10",
        "amount": n,
        "reason": f"reason {n}",
        "created_at_ms": NOW_MS + n,
    }
    return TopUp(**defaults | fields)


def price(n: int = 1, **fields: Any) -> Price:
    defaults: dict[str, Any] = {
        "model": "m1",
        "valid_from_ms": NOW_MS + n,
        "prompt": 10 * n,
        "cached": n,
        "completion": 20 * n,
    }
    return Price(**defaults | fields)


def charge(key: str, units: int, **fields: Any) -> Charge:
    """Its quota's period ends a day after `NOW_MS`."""
    return Charge(**{"key": key, "ends_at_ms": NOW_MS + 24 * HOUR_MS, "units": units} | fields)


def draft(n: int = 1, **fields: Any) -> AuditDraft:
    defaults: dict[str, Any] = {
        "at_ms": NOW_MS + n,
        "actor": "cli:test",
        "source": "",
        "request_id": "",
        "action": "team.create",
        "object_id": f"team_{n:04}",
        "before": "",
        "after": f'{{"n":{n}}}',
    }
    return AuditDraft(**defaults | fields)


def ledger_row(n: int = 1, **fields: Any) -> LedgerRow:
    """Row n: 10 n prompt tokens, of which n are cached, and n of the completion, at 7 n micro-USD; closed n ms after
    `NOW_MS`."""
    defaults: dict[str, Any] = {
        "request_id": RequestId(f"req_{n:06}"),
        "opened_at_ms": NOW_MS,
        "closed_at_ms": NOW_MS + n,
        "organization_id": OrganizationId("org_0001"),
        "team_id": TeamId("team_0001"),
        "key_id": KeyId("key_0001"),
        "model": "m1",
        "requested_model": "gpt-5",
        "endpoint": "chat",
        "stream": n % 2 == 0,
        "request_class": "interactive",
        "outcome": "finished",
        "finish_reason": "stop",
        "error_code": None,
        "prompt_tokens": 10 * n,
        "cached_tokens": n,
        "completion_tokens": n,
        "queue_us": 1,
        "prefill_us": 2,
        "decode_us": 3,
        "preempted_us": 4,
        "parked_us": 6,
        "engine_us": 5,
        "ttft_us": None,
        "total_us": 7,
        "cost_microusd": 7 * n,
    }
    return LedgerRow(**defaults | fields)


async def with_team(storage: Database) -> None:
    """Keep `organization` and `team`."""
    async with storage.writing() as work:
        await work.organizations.add(organization())
        await work.teams.add(team())
