"""The use case "what has my team used": exact up to now, in whole hours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.domain.ids import TeamId
from gateway.domain.ledger import HOUR_MS, HourlyUsage, UsageTotals
from gateway.errors import InvalidRequest
from gateway.services.ports import Clock
from gateway.services.stores import Storage

DAY_MS = 24 * HOUR_MS
MAX_DAYS = 31
MAX_ROWS = 20_000


class UsageReport(NamedTuple):
    """A team's usage in ``[from_ms, until_ms)``, both whole hours; each of `hours` is one hour, key and model."""

    from_ms: int
    until_ms: int
    totals: UsageTotals
    hours: Sequence[HourlyUsage]


class UsageReports:
    """What teams have used."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock

    async def of_team(
        self,
        team_id: TeamId,
        *,
        from_ms: int | None = None,
        until_ms: int | None = None,
        model: str | None = None,
        key_id: str | None = None,
    ) -> UsageReport:
        """Everything that is in the ledger by now; the newest requests get there within a second.

        Args:
            from_ms: rounded down to an hour; None is a day before the end.
            until_ms: rounded up to an hour; None is now.
            model: only what this model has answered.
            key_id: only what came with this key of the team.

        Raises:
            InvalidRequest: no time lies between the two, or too much, or the answer would be too long.
            StorageDown: the database does not answer.
        """
        until_ms = int(self._clock.time() * 1000) if until_ms is None else until_ms
        from_ms = until_ms - DAY_MS if from_ms is None else from_ms
        if from_ms >= until_ms:
            raise InvalidRequest("'from' must be before 'until'.", param="from")
        if until_ms - from_ms > MAX_DAYS * DAY_MS:
            raise InvalidRequest(f"At most {MAX_DAYS} days can be asked for at a time.", param="from")
        begin_ms, end_ms = from_ms // HOUR_MS * HOUR_MS, -(-until_ms // HOUR_MS) * HOUR_MS
        async with self._storage.reading() as work:
            hours = await work.ledger.hourly(from_ms=begin_ms, until_ms=end_ms, team_id=team_id, limit=MAX_ROWS + 1)
        if len(hours) > MAX_ROWS:
            raise InvalidRequest("The answer would be too long. Please ask for less time.", param="from")
        wanted = [hour for hour in hours if model in (None, hour.model) and key_id in (None, hour.key_id)]
        return UsageReport(begin_ms, end_ms, _sum([hour.totals for hour in wanted]), wanted)


def _sum(totals: Sequence[UsageTotals]) -> UsageTotals:
    return UsageTotals(
        num_requests=sum(each.num_requests for each in totals),
        prompt_tokens=sum(each.prompt_tokens for each in totals),
        cached_tokens=sum(each.cached_tokens for each in totals),
        completion_tokens=sum(each.completion_tokens for each in totals),
        engine_us=sum(each.engine_us for each in totals),
        cost_microusd=sum(each.cost_microusd for each in totals),
    )
