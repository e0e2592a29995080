"""How far quotas are used up, by the ledger, and what is added to one for a period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zoneinfo import ZoneInfo

import msgspec

from gateway.domain.ids import new_top_up_id
from gateway.domain.limits.meters import MOST_QUOTA
from gateway.domain.limits.periods import Period, period_at, period_named, zone_named
from gateway.domain.limits.policy import Limit, QuotaRule, TopUp, meter_key
from gateway.errors import InvalidRequest, NotFound
from gateway.services.admin_changes import Changes
from gateway.services.admin_limits import check_total, require_limit
from gateway.services.admin_pages import Page, PageRequest, fetch_page
from gateway.services.admin_rules import check_reason
from gateway.services.admin_scopes import require_scope
from gateway.services.audit import Actor
from gateway.services.ports import Clock
from gateway.services.stores import Storage, Work

MOST_AHEAD_MS = 366 * 86_400_000
"""How far from now a period may begin that is topped up: what lies further ahead is a year that was mistyped."""


class Alert(msgspec.Struct, frozen=True):
    """That a quota has reached a percentage of its amount, and when that was noticed."""

    percent: int
    at_ms: int


class QuotaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A quota in the present period.

    Attributes:
        topped_up: what was added to its amount for this period.
        committed: what the ledger has for it; requests that run are not in it.
        alerts: those reached so far, ascending.
    """

    limit: Limit
    rule: QuotaRule
    period: Period
    topped_up: int
    committed: int
    alerts: tuple[Alert, ...]

    @property
    def total(self) -> int:
        return self.rule.amount + self.topped_up

    @property
    def percent(self) -> int:
        """Of the total, rounded down, so that 100 is reached when nothing is left. Of nothing all is used."""
        return self.committed * 100 // self.total if self.total else 100


class Quotas:
    """The use cases; they raise `InvalidRequest` or `NotFound`."""

    def __init__(self, storage: Storage, changes: Changes, clock: Clock) -> None:
        self._storage = storage
        self._changes = changes
        self._clock = clock

    async def status(self, scope_id: str) -> Sequence[QuotaStatus]:
        """Of all quotas that requests of an organization, a team or a key count for: its own, and those of what it
        belongs to. From the organization down, then by name and model."""
        now_ms = int(self._clock.time() * 1000)
        async with self._storage.reading() as work:
            of = await require_scope(work, scope_id)
            zone = zone_named(of.organization.time_zone)
            limits = await work.limits.of(of.chain)
            periods = {
                meter_key(limit, period.id): (limit, limit.rule, period)
                for limit in limits
                if isinstance(limit.rule, QuotaRule)
                for period in (period_at(limit.rule.period, zone, now_ms),)
            }
            keys = list(periods)
            committed = await work.ledger.committed_of(keys)
            alerts = await work.limits.alerts_of(keys)
            top_ups = await work.limits.top_ups(of.chain, since_ms=0)
        return [
            QuotaStatus(
                limit=limit,
                rule=rule,
                period=period,
                topped_up=_sum_for(limit, period.id, top_ups),
                committed=committed.get(key, 0),
                alerts=_alerts(key, alerts),
            )
            for key, (limit, rule, period) in periods.items()
        ]

    async def top_up(
        self,
        actor: Actor,
        *,
        scope_id: str,
        name: str,
        amount: int,
        reason: str,
        model: str | None = None,
        period_id: str | None = None,
    ) -> TopUp:
        """Add to a quota for one period: the present one, or one that is named and not over.

        Raises:
            NotFound: there is no such quota.
            InvalidRequest: it is not an amount, a reason or a period.
        """
        async with self._changes.begin(actor) as change:
            of = await require_scope(change.work, scope_id)
            limit, rule = await _require_quota(change.work, scope_id, model, name)
            if not 1 <= amount <= MOST_QUOTA:
                raise InvalidRequest(f"'amount' must be between 1 and {MOST_QUOTA}.", param="amount")
            made = TopUp(
                id=new_top_up_id(change.now_ms),
                scope=limit.scope,
                scope_id=limit.scope_id,
                model=limit.model,
                name=limit.name,
                period_id=_period(rule, zone_named(of.organization.time_zone), period_id, change.now_ms).id,
                amount=amount,
                reason=check_reason(reason),
                created_at_ms=change.now_ms,
            )
            top_ups = await change.work.limits.top_ups([scope_id], since_ms=0)
            check_total(amount, rule.amount + _sum_for(limit, made.period_id, top_ups), "amount")
            await change.work.limits.add_top_up(made)
            change.record("quota.top_up", made.id, after=made)
            return made

    async def top_ups(self, page: PageRequest, scope_id: str) -> Page[TopUp]:
        """All that there ever were of an organization, a team or a key, the oldest first."""
        after = page.after_id("top_")
        async with self._storage.reading() as work:
            await require_scope(work, scope_id)
            behind = [each for each in await work.limits.top_ups([scope_id], since_ms=0) if each.id > after]

        async def fetch(limit: int) -> Sequence[TopUp]:
            return behind[:limit]

        return await fetch_page(page, fetch, lambda each: each.id)


async def _require_quota(work: Work, scope_id: str, model: str | None, name: str) -> tuple[Limit, QuotaRule]:
    limit = await require_limit(work, scope_id, model, name)
    if not isinstance(limit.rule, QuotaRule):
        raise NotFound("The limit of this name is no quota.")
    return limit, limit.rule


def _period(rule: QuotaRule, zone: ZoneInfo, period_id: str | None, now_ms: int) -> Period:
    if period_id is None:
        return period_at(rule.period, zone, now_ms)
    try:
        period = period_named(rule.period, zone, period_id)
    except ValueError as e:
        raise InvalidRequest(f"'period_id' must be a {rule.period} of this quota: {e}.", param="period_id") from e
    if period.end_ms <= now_ms:
        raise InvalidRequest(f"'period_id' must not be over: {period_id} is.", param="period_id")
    if period.start_ms > now_ms + MOST_AHEAD_MS:
        raise InvalidRequest("'period_id' must not begin more than a year from now.", param="period_id")
    return period


def _sum_for(limit: Limit, period_id: str, top_ups: Sequence[TopUp]) -> int:
    wanted = (limit.scope_id, limit.model, limit.name, period_id)
    return sum(each.amount for each in top_ups if (each.scope_id, each.model, each.name, each.period_id) == wanted)


def _alerts(key: str, alerts: Mapping[str, Sequence[tuple[int, int]]]) -> tuple[Alert, ...]:
    return tuple(Alert(percent, at_ms) for percent, at_ms in sorted(alerts.get(key, ())))
