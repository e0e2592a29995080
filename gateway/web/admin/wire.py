"""How our values look in answers of the admin API. Secrets and digests are left out by `describe`, the audit's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gateway.domain.audit import AuditEntry
from gateway.domain.ledger import HourlyUsage, LedgerRow
from gateway.domain.limits.policy import Limit, Price
from gateway.domain.tenancy import AdminToken, ApiKey
from gateway.limit_notation import form_of
from gateway.services.admin_pages import Page
from gateway.services.admin_quotas import QuotaStatus
from gateway.services.audit import describe
from gateway.web.admin.times import to_iso

T = TypeVar("T", bound=msgspec.Struct)
Wire = dict[str, Any]


def to_wire(value: msgspec.Struct) -> Wire:
    """Field by field; times, whose names end in ``_at_ms``, become text, and their names end in ``_at``.

    Of a secret's pepper there is the id, so that one can see which keys and tokens keep an old one in use.
    """
    wire: Wire = {}
    for name, field in describe(value).items():
        if name.endswith("_at_ms"):
            wire[name.removesuffix("_ms")] = to_iso(field)
        else:
            wire[name] = field
    if isinstance(value, ApiKey | AdminToken):
        wire["pepper_id"] = value.secret.pepper_id
    return wire


def limit_to_wire(limit: Limit) -> Wire:
    """The rule is as it can be set again."""
    return {
        "scope": limit.scope,
        "scope_id": limit.scope_id,
        "model": limit.model,
        "name": limit.name,
        "rule": form_of(limit.rule),
        "shadow": limit.is_shadow,
        "changed_at": to_iso(limit.changed_at_ms),
    }


def quota_to_wire(status: QuotaStatus) -> Wire:
    """Amounts are in the quota's unit."""
    limit, rule = status.limit, status.rule
    return {
        "scope": limit.scope,
        "scope_id": limit.scope_id,
        "model": limit.model,
        "name": limit.name,
        "unit": rule.unit,
        "period": rule.period,
        "period_id": status.period.id,
        "period_start": to_iso(status.period.start_ms),
        "period_end": to_iso(status.period.end_ms),
        "amount": rule.amount,
        "topped_up": status.topped_up,
        "committed": status.committed,
        "percent": status.percent,
        "hard": rule.is_hard,
        "shadow": limit.is_shadow,
        "alerts": rule.alerts,
        "alerts_reached": [{"percent": each.percent, "at": to_iso(each.at_ms)} for each in status.alerts],
    }


def price_to_wire(price: Price) -> Wire:
    return {
        "model": price.model,
        "valid_from": to_iso(price.valid_from_ms),
        "prompt": price.prompt,
        "cached": price.cached,
        "completion": price.completion,
    }


def page_to_wire(page: Page[T], convert: Callable[[T], Wire] = to_wire) -> Wire:
    return {"data": [convert(each) for each in page.data], "next": page.next}


def audit_to_wire(entry: AuditEntry) -> Wire:
    """`before` and `after` are as they were written, for the hash is over them."""
    said = entry.draft
    return {
        "sequence": entry.sequence,
        "at": to_iso(said.at_ms),
        "actor": said.actor,
        "source": said.source,
        "request_id": said.request_id,
        "action": said.action,
        "object_id": said.object_id,
        "before": msgspec.Raw(said.before.encode()) if said.before else None,
        "after": msgspec.Raw(said.after.encode()) if said.after else None,
        "previous_hash": entry.previous_hash.hex(),
        "hash": entry.hash.hex(),
    }


def ledger_to_wire(row: LedgerRow) -> Wire:
    """Of each charge whose quota it is for, which is its meter's key, until when that counts, and how much it was."""
    charges = [{"quota": each.key, "ends_at": to_iso(each.ends_at_ms), "units": each.units} for each in row.charges]
    return to_wire(row) | {"charges": charges}


def usage_to_wire(usage: HourlyUsage) -> Wire:
    """The sums beside what they are of."""
    totals = usage.totals
    return {
        "hour": to_iso(usage.hour_ms),
        "organization_id": usage.organization_id,
        "team_id": usage.team_id,
        "key_id": usage.key_id,
        "model": usage.model,
        "requests": totals.num_requests,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "completion_tokens": totals.completion_tokens,
        "engine_us": totals.engine_us,
        "cost_microusd": totals.cost_microusd,
    }
