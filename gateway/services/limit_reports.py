"""The use case "what may I use": every limit of a principal with what is left of it right now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.domain.limits.meters import Meter
from gateway.domain.limits.periods import Period
from gateway.domain.limits.plan import Metered
from gateway.domain.limits.policy import Limit
from gateway.domain.principal import Principal
from gateway.services.catalog import Listings
from gateway.services.limiter import Limiter


class LimitStanding(NamedTuple):
    """A limit and where it stands.

    Attributes:
        meter: None for limits on a request's size, which have none.
        remaining: in its units, what is reserved for running requests taken off; None if there is no meter.
    """

    limit: Limit
    meter: Meter | None
    period: Period | None
    remaining: int | None


class LimitReports:
    """The use case."""

    def __init__(self, limiter: Limiter, listings: Listings) -> None:
        self._limiter = limiter
        self._listings = listings

    async def of(self, principal: Principal) -> Sequence[LimitStanding]:
        """In the order of organization, team, key. Raises `LimitsUnavailable` or `StorageDown`."""
        prices = (await self._listings.listing()).prices
        metered: dict[Limit, Metered] = {}
        for model in dict.fromkeys(limit.model or "" for limit in principal.limits):
            plan = self._limiter.plan(principal, model, prices)
            metered.update((each.limit, each) for each in plan.metered)
        found = list(metered.values())
        if any(each.period is not None for each in found):
            await self._limiter.until_known(principal.organization_id)
        left = await self._limiter.store.look(principal.organization_id, [each.use for each in found]) if found else ()
        remaining = {each.limit: units for each, units in zip(found, left, strict=True)}
        return [
            LimitStanding(limit, None, None, None)
            if (each := metered.get(limit)) is None
            else LimitStanding(limit, each.use.meter, each.period, remaining[limit])
            for limit in principal.limits
        ]
