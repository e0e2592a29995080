"""Names and weights of all teams, as this process knows them: read again whenever something has changed.

Principals carry weights too (`directory`), but only new requests bring those to an engine; that a team whose requests
all wait or run is weighed anew is this module's work. It reads everything and compares nothing, at most once in
`READ_EVERY_S`: a script that changes a thousand keys costs two readings a second as long as it runs. Knows nothing of
engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from gateway.domain.principal import TeamNames, organization_node, team_node
from gateway.domain.tenancy import RollEntry
from gateway.errors import StorageDown
from gateway.services.stores import Storage

READ_EVERY_S = 0.5
READ_S = 2.0
"""What the storage gets for all of it."""

_log = logging.getLogger(__name__)


class Versions(Protocol):
    """`gateway.services.directory.Directory` is one."""

    async def version_after(self, seen: int | None) -> int:
        """Waits until another version than this one is confirmed; None is no version."""


class Roll:
    """The last reading.

    Args:
        on_weights: told the weight of every fairness node that has one, after each reading. Must not raise.
    """

    def __init__(self, storage: Storage, versions: Versions, on_weights: Callable[[Mapping[str, int]], None]) -> None:
        self._storage = storage
        self._versions = versions
        self._on_weights = on_weights
        self._names: dict[str, TeamNames] = {}

    def names(self, node_id: str) -> TeamNames | None:
        """Of the team with this fairness node; None if it is not known, or not yet."""
        return self._names.get(node_id)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps reading meanwhile. Entering does not wait for the first one."""
        reading = asyncio.create_task(self._keep_reading())
        try:
            yield
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _keep_reading(self) -> None:
        seen: int | None = None
        while True:
            version = await self._versions.version_after(seen)
            try:
                async with asyncio.timeout(READ_S), self._storage.reading() as work:
                    entries = await work.teams.roll()
                self._names = {team_node(each.team_id): (each.organization, each.team) for each in entries}
                self._on_weights(_weights(entries))
                # Of before the reading: should it have moved on meanwhile, that is one reading too many.
                seen = version
            except (StorageDown, TimeoutError):
                _log.info("weights and names could not be read; they will be again")
            except Exception:  # noqa: BLE001 - a bug of ours must not end the reading
                _log.exception("reading weights and names failed")
            await asyncio.sleep(READ_EVERY_S)


def _weights(entries: Sequence[RollEntry]) -> dict[str, int]:
    weights = {organization_node(each.organization_id): each.organization_weight for each in entries}
    weights.update((team_node(each.team_id), each.team_weight) for each in entries)
    return weights
