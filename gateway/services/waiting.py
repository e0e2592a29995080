"""How many requests of each key wait for their first token in this process, and how many may."""

from __future__ import annotations

from gateway.domain.ids import KeyId
from gateway.domain.principal import Principal
from gateway.errors import QueueFull


class WaitingRequests:
    """The counts."""

    def __init__(self) -> None:
        self._num: dict[KeyId, int] = {}

    def enter(self, principal: Principal) -> Place:
        """One more request of the principal's key waits. Raises `QueueFull` if as many wait as may."""
        num, limit = self._num.get(principal.key_id, 0), principal.max_queue_depth
        if limit is not None and num >= limit:
            raise QueueFull(limit)
        self._num[principal.key_id] = num + 1
        return Place(self, principal.key_id)

    def leave(self, key_id: KeyId) -> None:
        """One fewer; a `Place` calls it once."""
        num = self._num[key_id] - 1
        if num:
            self._num[key_id] = num
        else:
            del self._num[key_id]


class Place:
    """A waiting request's place in the count. Leaving it again does nothing."""

    __slots__ = ("_key_id", "_waiting")

    def __init__(self, waiting: WaitingRequests, key_id: KeyId) -> None:
        self._waiting: WaitingRequests | None = waiting
        self._key_id = key_id

    def leave(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.leave(self._key_id)
