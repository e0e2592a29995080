"""A key's holder with all that its requests are limited by, read in one transaction. Knows nothing of how long it is
kept."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.domain.limits.periods import period_at, zone_named
from gateway.domain.limits.policy import Limit, QuotaPeriod, QuotaRule, TopUp
from gateway.domain.tenancy import KeyHolder, Organization
from gateway.services.stores import Work

TOP_UPS_MS = 400 * 86_400_000
"""How far back top-ups are looked for: one may be for a period that begins a year later, and lasts a month."""


async def read_holder(work: Work, public_id: str, now_ms: int) -> KeyHolder | None:
    """The holder of a key, whatever its state, with limits and top-ups; None if there is no such key."""
    holder = await work.keys.holder(public_id)
    if holder is None:
        return None
    scope_ids = (holder.organization.id, holder.team.id, holder.key.id)
    limits = tuple(await work.limits.of(scope_ids))
    periods = _periods(limits)
    top_ups: Sequence[TopUp] = ()
    if periods:
        found = await work.limits.top_ups(scope_ids, since_ms=now_ms - TOP_UPS_MS)
        top_ups = _not_over(found, periods, holder.organization, now_ms)
    return msgspec.structs.replace(holder, limits=limits, top_ups=tuple(top_ups))


_Place = tuple[str, str | None, str]


def _periods(limits: Sequence[Limit]) -> dict[_Place, QuotaPeriod]:
    """Of each quota."""
    return {
        (limit.scope_id, limit.model, limit.name): limit.rule.period
        for limit in limits
        if isinstance(limit.rule, QuotaRule)
    }


def _not_over(
    top_ups: Sequence[TopUp], periods: dict[_Place, QuotaPeriod], organization: Organization, now_ms: int
) -> list[TopUp]:
    """Those of the quotas whose period has not passed: ids of the periods of one kind sort by time."""
    zone = zone_named(organization.time_zone)
    present = {kind: period_at(kind, zone, now_ms).id for kind in set(periods.values())}
    return [
        each
        for each in top_ups
        if (kind := periods.get((each.scope_id, each.model, each.name))) is not None and each.period_id >= present[kind]
    ]
