"""Final counts of requests whose gateway may not have heard of their end, kept until it collects them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

from engine.messages import FinalCounts

logger = logging.getLogger(__name__)


class FinalStore:
    """A bounded store, in memory only: what is in it when the engine process ends is lost.

    At the bound the oldest entry of the client that has been here longest makes room, with a warning.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num = 0
        self._clients: dict[str, dict[str, FinalCounts]] = {}

    def __len__(self) -> int:
        return self._num

    def keep(self, client_id: str, final: FinalCounts) -> None:
        mine = self._clients.setdefault(client_id, {})
        if final.request_id not in mine:
            self._num += 1
        mine[final.request_id] = final
        if self._num > self._limit:
            oldest_client = next(iter(self._clients))
            oldest = next(iter(self._clients[oldest_client]))
            self._forget(oldest_client, oldest)
            logger.warning("more than %d final counts wait to be collected; dropped %s", self._limit, oldest)

    def acknowledge(self, client_id: str, request_ids: Iterable[str]) -> None:
        """Forget these; ids that are not here are ignored."""
        for request_id in request_ids:
            self._forget(client_id, request_id)

    def page(self, client_id: str, size: int) -> tuple[FinalCounts, ...]:
        """The oldest `size` entries of a client; they stay until acknowledged."""
        return tuple(itertools.islice(self._clients.get(client_id, {}).values(), size))

    def num_kept(self, client_id: str) -> int:
        return len(self._clients.get(client_id, ()))

    def _forget(self, client_id: str, request_id: str) -> None:
        mine = self._clients.get(client_id, {})
        if mine.pop(request_id, None) is not None:
            self._num -= 1
            if not mine:
                del self._clients[client_id]
