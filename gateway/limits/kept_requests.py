"""The requests of one organization that hold something, and those that did, in memory."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from gateway.domain.ids import RequestId
from gateway.domain.limits.admission import Ask, Settlement, Verdict
from gateway.domain.limits.meters import Use

SETTLED_KEPT_MS = 600_000
REAPED_KEPT_MS = 3_600_000
MOST_KEPT = 50_000
"""Ended requests of an organization, settled and reaped ones each; then the oldest are forgotten before their time."""


class Held(msgspec.Struct, gc=False):
    """A request that was admitted and has not ended.

    Attributes:
        reserved: of each use.
        reported: its output as last told.
        looked_at_ms: when its lease is looked at next, not after it runs out; the only entry in the heap that counts.
        heard_at_ms: when its owner was last heard of it; None if it has been spared since.
    """

    ask: Ask
    verdict: Verdict
    granted: int
    reserved: tuple[int, ...]
    reported: int
    lease_ms: int
    expires_at_ms: int
    looked_at_ms: int
    heard_at_ms: int | None


class Ended(msgspec.Struct, gc=False):
    uses: tuple[Use, ...]
    verdict: Verdict
    settlement: Settlement
    kept_until_ms: int = 0


class KeptRequests:
    """In `settled` and `reaped` those that are forgotten first come first.

    Attributes:
        lease_ms: the one that was asked for last.
    """

    def __init__(self) -> None:
        self.lease_ms = 0
        self.held: dict[RequestId, Held] = {}
        self.settled: OrderedDict[RequestId, Ended] = OrderedDict()
        self.reaped: OrderedDict[RequestId, Ended] = OrderedDict()
        self._looks: list[tuple[int, RequestId]] = []
        self._asked_at_ms: int | None = None
        self._back_at_ms: int | None = None  # asked again after a silence of more than half a lease

    def note_asked(self, now_ms: int) -> None:
        """To be called with every question: nobody may have been able to report while there was none."""
        if self._asked_at_ms is not None and 2 * (now_ms - self._asked_at_ms) > self.lease_ms:
            self._back_at_ms = now_ms
        self._asked_at_ms = now_ms

    def hold(self, ask: Ask, verdict: Verdict, reserved: tuple[int, ...], now_ms: int) -> Held:
        """It is admitted."""
        self.lease_ms, due_ms = ask.lease_ms, now_ms + ask.lease_ms
        held = Held(ask, verdict, verdict.granted_output, reserved, 0, ask.lease_ms, due_ms, due_ms, now_ms)
        self.held[ask.request_id] = held
        self._look_at(held)
        return held

    def heard(self, held: Held, output: int, lease_ms: int, now_ms: int) -> None:
        """Its owner has told of it."""
        self.lease_ms = held.lease_ms = lease_ms
        held.reported = max(held.reported, output)
        held.heard_at_ms, held.expires_at_ms = now_ms, now_ms + lease_ms
        if held.expires_at_ms < held.looked_at_ms:
            self._look_at(held)

    def has_due(self, now_ms: int) -> bool:
        """There may be a lease that has run out."""
        return bool(self._looks) and self._looks[0][0] <= now_ms

    def expired(self, most: int, now_ms: int) -> Iterator[Held]:
        """Of the first `most` whose leases have run out, those that are not spared; they are held no longer."""
        for _ in range(most):
            held = self._expired(now_ms)
            if held is None:
                return
            if self._is_spared(held, now_ms):
                self._look_at(held)
                continue
            del self.held[held.ask.request_id]
            yield held

    def known(self, request_id: RequestId) -> Held | Ended | None:
        """Also one that has ended, for as long as that is known."""
        return self.held.get(request_id) or self.ended(request_id)

    def ended(self, request_id: RequestId) -> Ended | None:
        return self.settled.get(request_id) or self.reaped.get(request_id)

    def bury_settled(self, request_id: RequestId, ended: Ended, now_ms: int) -> None:
        ended.kept_until_ms = now_ms + SETTLED_KEPT_MS
        _bury(self.settled, request_id, ended, now_ms)

    def bury_reaped(self, request_id: RequestId, ended: Ended, now_ms: int) -> None:
        ended.kept_until_ms = now_ms + REAPED_KEPT_MS
        _bury(self.reaped, request_id, ended, now_ms)

    def _look_at(self, held: Held) -> None:
        """When its lease runs out, as it is now."""
        held.looked_at_ms = held.expires_at_ms
        heapq.heappush(self._looks, (held.expires_at_ms, held.ask.request_id))

    def _expired(self, now_ms: int) -> Held | None:
        """Of those whose lease has run out the one that did first; it is not looked at again."""
        while self._looks and self._looks[0][0] <= now_ms:
            at_ms, request_id = heapq.heappop(self._looks)
            held = self.held.get(request_id)
            if held is None or held.looked_at_ms != at_ms:
                continue
            if held.expires_at_ms == at_ms:
                return held
            self._look_at(held)
        return None

    def _is_spared(self, held: Held, now_ms: int) -> bool:
        """Whether the lease has another whole time to run since the silence after which nothing was heard yet; once."""
        back, heard = self._back_at_ms, held.heard_at_ms
        if back is None or heard is None or heard >= back or back + held.lease_ms <= now_ms:
            return False
        held.heard_at_ms, held.expires_at_ms = None, back + held.lease_ms
        return True


def _bury(graves: OrderedDict[RequestId, Ended], request_id: RequestId, ended: Ended, now_ms: int) -> None:
    graves[request_id] = ended
    while len(graves) > MOST_KEPT or next(iter(graves.values())).kept_until_ms <= now_ms:
        graves.popitem(last=False)
