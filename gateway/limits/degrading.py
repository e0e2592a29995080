"""Limits while Redis does not answer, if that is wanted: each process enforces its share by itself.

A share is what a limit allows divided by the number of processes, rounded down, so that all shares together are never
more than the limit. Of a number of requests it has the fewer left, the more run already that Redis has admitted in this
process. A rate's share is full when a process begins, whatever is left of the rate, and refills with its part of it: as
much as one more burst of the whole limit may pass, and while Redis falls silent over and over at most twice the rate.
Likewise a process that ran more than its share of a number of requests when Redis fell silent makes up for it by taking
no more itself, while others may fill theirs.

Hard quotas have no shares: where one holds, requests are refused until Redis answers again. Requests that were admitted
by a share never become known to Redis: what they use of soft quotas is in the ledger, and missing from the counter
until the period ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.meters import Bucket, Lease, Meter, Quota, Use
from gateway.domain.limits.rules import is_exact
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable
from gateway.limits.memory import MemoryLimits
from gateway.services.limit_store import LimitStore


class DegradingLimits:
    """Implements `gateway.services.limit_store.LimitStore` over another one.

    Args:
        store: asked first, always; it must say quickly that it cannot answer.
        num_processes: gateway processes that share the limits.

    Attributes:
        is_degraded: the last admission was decided by a share.
    """

    never_waits = False

    def __init__(self, store: LimitStore, *, num_processes: int, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._num_processes = num_processes
        self._shares = MemoryLimits(now_ms)
        self._by_share: set[RequestId] = set()
        self._by_store: dict[RequestId, tuple[str, ...]] = {}  # what runs, with the keys of its leases
        self._running: Counter[str] = Counter()
        self.is_degraded = False

    async def check(self, ask: Ask) -> Verdict:
        try:
            verdict = await self._store.check(ask)
        except LimitsUnavailable:
            self._begin(ask)
            return _by_share(await self._shares.check(self._shared(ask)))
        self._end()
        return verdict

    async def admit(self, ask: Ask) -> Verdict:
        try:
            verdict = await self._store.admit(ask)
        except LimitsUnavailable:
            self._begin(ask)
            verdict = _by_share(await self._shares.admit(self._shared(ask)))
            if verdict.is_admitted:
                self._by_share.add(ask.request_id)
            return verdict
        self._end()
        if verdict.is_admitted and ask.request_id not in self._by_store:
            leases = tuple(use.meter.key for use in ask.uses if isinstance(use.meter, Lease))
            if leases:
                self._by_store[ask.request_id] = leases
                self._running.update(leases)
        return verdict

    async def raise_output(
        self, organization_id: OrganizationId, request_id: RequestId, wanted: int, quotas: Sequence[Quota] = ()
    ) -> int | None:
        if request_id in self._by_share:
            return await self._shares.raise_output(organization_id, request_id, wanted)
        return await self._store.raise_output(organization_id, request_id, wanted, quotas)

    async def report(
        self, organization_id: OrganizationId, outputs: Mapping[RequestId, int], lease_ms: int
    ) -> Sequence[RequestId]:
        by_share = {each: output for each, output in outputs.items() if each in self._by_share}
        if by_share:
            await self._shares.report(organization_id, by_share, lease_ms)
        others = {each: output for each, output in outputs.items() if each not in by_share}
        return await self._store.report(organization_id, others, lease_ms) if others else ()

    async def settle(
        self, organization_id: OrganizationId, request_id: RequestId, usage: TokenUsage
    ) -> Settlement | None:
        if request_id in self._by_share:
            self._by_share.discard(request_id)
            return await self._shares.settle(organization_id, request_id, usage)
        self._note_ended(request_id)
        return await self._store.settle(organization_id, request_id, usage)

    async def cancel(self, organization_id: OrganizationId, request_id: RequestId) -> bool:
        if request_id in self._by_share:
            self._by_share.discard(request_id)
            return await self._shares.cancel(organization_id, request_id)
        self._note_ended(request_id)
        return await self._store.cancel(organization_id, request_id)

    async def reap(self, organization_id: OrganizationId, most: int) -> Sequence[RequestId]:
        return await self._store.reap(organization_id, most)

    async def look(self, organization_id: OrganizationId, uses: Sequence[Use]) -> Sequence[int]:
        return await self._store.look(organization_id, uses)

    async def begin_epoch(
        self,
        organization_id: OrganizationId,
        committed: Mapping[str, int],
        reservations: Sequence[Reservation],
        *,
        view: str = "",
        settled: Collection[RequestId] = (),
        is_whole: bool = True,
        num_parts: int = 0,
    ) -> bool:
        known = [each for each in reservations if each.ask.request_id not in self._by_share]
        return await self._store.begin_epoch(
            organization_id,
            committed,
            known,
            view=view,
            settled=settled,
            is_whole=is_whole,
            num_parts=num_parts,
        )

    async def held(self, organization_id: OrganizationId, owner: str = "") -> Sequence[RequestId]:
        return await self._store.held(organization_id, owner)

    async def born_ms(self) -> int | None:
        return await self._store.born_ms()

    async def age_ms(self) -> int | None:
        return await self._store.age_ms()

    async def close(self) -> None:
        await self._store.close()

    def _begin(self, ask: Ask) -> None:
        """Raises `LimitsUnavailable` where a share may not decide."""
        if any(is_exact(use.meter) for use in ask.uses):
            raise LimitsUnavailable
        self.is_degraded = True

    def _end(self) -> None:
        self.is_degraded = False

    def _note_ended(self, request_id: RequestId) -> None:
        """Whether the store takes its settlement or not, it runs no more."""
        for key in self._by_store.pop(request_id, ()):
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    def _shared(self, ask: Ask) -> Ask:
        uses = tuple(Use(self._share(use.meter), use.weights) for use in ask.uses)
        return msgspec.structs.replace(ask, uses=uses)

    def _share(self, meter: Meter) -> Meter:
        num, replace = self._num_processes, msgspec.structs.replace
        match meter:
            case Bucket(capacity=capacity, refill=refill, max_debt=debt):
                return replace(meter, capacity=capacity // num, refill=refill // num, max_debt=debt // num)
            case Quota(amount=amount):
                return replace(meter, amount=amount // num)
            case Lease(limit=limit):
                return replace(meter, limit=max(limit // num - self._running[meter.key], 0))


def _by_share(verdict: Verdict) -> Verdict:
    """What is too large for a share may be taken when the store answers again."""
    return msgspec.structs.replace(verdict, is_by_share=True, is_never=False)
