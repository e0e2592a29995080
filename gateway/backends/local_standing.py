"""Where requests stand in our engines, in the words of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.errors import EngineUnavailable
from engine.standing import RequestPhase, Standing
from gateway.backends.local_generation import to_gateway_error
from gateway.domain.ids import RequestId, TeamId
from gateway.domain.principal import CLASSES
from gateway.domain.standing import LiveRequest, LiveStatus
from gateway.domain.usage import EngineTimings

MOST_PARTS = 128
"""A request with several prompts is so many requests to an engine at most; a caller may send no more prompts."""
ANSWER_WITHIN_S = 5.0
"""An engine answers between two steps, which take half a second at most."""
TEAM_NODE = "team:"
"""What the id of a team's node begins with (`Principal.path`)."""

_STATUSES: Mapping[RequestPhase, LiveStatus] = {
    "queue": "queued",
    "prefill": "running",
    "decode": "running",
    "preempted": "preempted",
    "parked": "parked",
    "at_cap": "at_cap",
}


class Client(Protocol):
    """What we use of `engine.client.EngineClient`."""

    async def standing(self, request_id: str, other_ids: Sequence[str] = ...) -> Standing: ...


class LocalStandings:
    """Asks a pool of engines, one question at a time.

    An answer takes an engine some milliseconds of the time in which it could do a step, so a flood of questions must
    not get at it faster than one for each step.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asking = asyncio.Lock()

    async def of(self, request_id: RequestId) -> LiveRequest | None:
        """See `gateway.services.ports.Backend.standing`."""
        parts = [f"{request_id}-{part}" for part in range(MOST_PARTS)]
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), self._asking:
                standing = await self._client.standing(request_id, parts)
        except (EngineUnavailable, TimeoutError) as e:
            raise to_gateway_error(EngineUnavailable(str(e))) from e
        return _live(request_id, standing)


def _live(request_id: RequestId, standing: Standing) -> LiveRequest | None:
    if standing.phase == "unknown":
        return None
    whole = dict.fromkeys(RequestId(name.partition("-")[0]) for name in standing.ahead_of_team)
    whole.pop(request_id, None)
    request_class = next(name for name in CLASSES if name == standing.request_class)
    return LiveRequest(
        request_id=request_id,
        team_id=TeamId(standing.team_id.removeprefix(TEAM_NODE)),
        request_class=request_class,
        status=_STATUSES[standing.phase],
        waiting_for=standing.resource or None,
        ahead={name: standing.ahead[name] for name in CLASSES if name in standing.ahead},
        ahead_of_team=tuple(whole),
        expected_wait_us=standing.expected_wait_us,
        timings=EngineTimings(
            queue_us=standing.queue_us,
            prefill_us=standing.prefill_us,
            decode_us=standing.decode_us,
            preempted_us=standing.preempted_us,
            parked_us=standing.parked_us,
        ),
    )
