"""What our engine charged each team, read from the server's Prometheus metrics.

Metrics know teams by name, and a client knows keys: whose a key is, is found by trying. Nobody else may use the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.bench.caller import Caller

_SERVED = "evenhand_team_engine_seconds_total"
FRESH_S = 2.5
"""After so long the metrics say all that has been done before: a server asks its engine every 2 s."""

TeamName = tuple[str, str]
"""Organization and team."""
Reading = Mapping[TeamName, float] | None
"""Seconds by team; None if they cannot be read."""


def difference(before: Reading, after: Reading, team: TeamName | None) -> float | None:
    """What a team was charged between two readings; None if one of them does not say, or the team is not known."""
    if before is None or after is None or team is None or team not in before or team not in after:
        return None
    return after[team] - before[team]


class EngineSeconds:
    """The counters of one server.

    Args:
        url: of its metrics; None if they cannot be read, and nothing is known then.
    """

    def __init__(self, http: httpx.AsyncClient, url: str | None) -> None:
        self._http = http
        self._url = url

    async def owner_of(self, caller: Caller) -> TeamName | None:
        """The team that a request of this caller is charged to; None if that cannot be told."""
        before = await self.settled()
        await caller.complete(256, 8)
        after = await self.settled()
        if before is None or after is None:
            return None
        grown = {team: seconds - before.get(team, 0.0) for team, seconds in after.items()}
        return max((team for team in grown if grown[team] > 0), key=grown.__getitem__, default=None)

    async def settled(self) -> Reading:
        """Engine time charged so far, exact if nothing has run for a while: with a wait before the reading."""
        if self._url is None:
            return None
        await asyncio.sleep(FRESH_S)
        return await self.now()

    async def now(self) -> Reading:
        """Engine time charged until a moment in the last two seconds, the same for all teams; None if not known."""
        if self._url is None:
            return None
        try:
            response = await self._http.get(self._url)
            response.raise_for_status()
        except httpx.HTTPError:
            return None
        return {
            (sample.labels["organization"], sample.labels["team"]): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
            if sample.name == _SERVED
        }
