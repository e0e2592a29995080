"""The use case "where does my request stand": one that runs is told of by its engine, one that has ended by the ledger.

Between the two lies the time in which a request is settled and posted, half a second or so. What this process settles
it knows itself. What another one settles is waited for, and only then is a request said not to exist. A request of
another team gets the same answer after the same time as one that never was.
"""

from __future__ import annotations

import asyncio
from typing import Protocol
from weakref import WeakValueDictionary

from gateway.domain.ids import RequestId, TeamId, as_request_id
from gateway.domain.ledger import LedgerRow, Opening
from gateway.domain.standing import LiveRequest
from gateway.errors import EngineDown, RequestNotFound
from gateway.services.ports import Backend, Clock
from gateway.services.stores import Storage

WAIT_S = 2.0
"""How long a request that nobody knows is looked for: another process may be about to post it (`posting.POST_EVERY_S`),
or to hand it to the engine."""
POLL_S = 0.1
"""Until it is looked for again, and each time twice as long: an answer takes the engine time from its next step."""

Found = LiveRequest | Opening | LedgerRow
"""An opening alone is all there is of a request that is being settled."""


class OwnRequests(Protocol):
    """What this process knows of its own requests; `metering.MeteringRecorder` implements it."""

    def find(self, request_id: RequestId) -> Opening | LedgerRow | None:
        """A row is of a request that is settled and may not be in the ledger yet."""


class RequestLookup:
    """Finds requests by id."""

    def __init__(
        self,
        backend: Backend,
        storage: Storage,
        own: OwnRequests,
        clock: Clock,
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        self._backend = backend
        self._storage = storage
        self._own = own
        self._clock = clock
        self._wait_s = wait_s
        self._turns: WeakValueDictionary[TeamId, asyncio.Lock] = WeakValueDictionary()

    async def find(self, text: str, team_id: TeamId) -> Found:
        """A request of this team.

        Args:
            text: its id, as somebody says.

        Raises:
            RequestNotFound: there is none, or it is another team's.
            EngineDown: it has not ended, or there is none; which of the two cannot be told now.
            StorageDown: the database does not answer, and no engine has it.
        """
        request_id = as_request_id(text)
        if request_id is None:
            raise RequestNotFound(text)
        until_s = self._clock.monotonic() + self._wait_s
        pause_s = POLL_S
        while True:
            found = await self._look(request_id, team_id)
            if found is not None and found.team_id == team_id:
                return found
            left_s = until_s - self._clock.monotonic()
            if left_s <= 0:
                raise RequestNotFound(text)
            await asyncio.sleep(min(pause_s, left_s))
            pause_s *= 2

    async def _look(self, request_id: RequestId, team_id: TeamId) -> Found | None:
        own = self._own.find(request_id)
        if isinstance(own, LedgerRow):
            return own
        down: EngineDown | None = None
        try:
            live = await self._ask(request_id, team_id)
        except EngineDown as e:
            down = e
        else:
            if live is not None:
                return live
        async with self._storage.reading() as work:
            rows = await work.ledger.rows([request_id])
        # Looked up again: it may have been settled since.
        found = next(iter(rows), None) or self._own.find(request_id)
        if down is not None and not isinstance(found, LedgerRow):
            raise down
        return found

    async def _ask(self, request_id: RequestId, team_id: TeamId) -> LiveRequest | None:
        """One question of a team at a time, so that a team that asks for many holds up nobody else."""
        turn = self._turns.get(team_id)
        if turn is None:
            turn = self._turns[team_id] = asyncio.Lock()
        async with turn:
            return await self._backend.standing(request_id)
