"""What has to be done for limits besides requests: leases kept alive, late settlements, and what a store has lost.

A store that was lost (Redis came back empty; the process began) knows nothing of an organization's hard quotas and says
so. Then, in this order, whichever processes there are:

1. each makes the reservations of its own requests known again, as soon as it notices, which is within a second or with
   its next report: of those that run, and of those that it has settled and not posted yet; what ends meanwhile is not
   settled yet, so that its reservation stays;
2. once all must have noticed, a lease time after the first of them asked how old the store is, and once the journals of
   dead processes of this host are in the ledger, anyone reads from the ledger, in one view, what is committed and which
   of the reservations are part of that already; and tells both to the store, with what it has settled itself and not
   posted yet. Whoever comes second changes nothing;
3. what has ended meanwhile is settled.

The same is done, without refusing or delaying anything, for an organization that has only soft or shadow quotas, once
this process admits a request of it for the first time, or for the first time since the store was lost.

Until then requests that a hard quota holds for are refused with 503. What a process used that died within the very
lease time in which the store was lost, is in the ledger, but may be missing from the store until the period ends. So
may be what a living process had settled before the loss, if for a whole lease time it could reach neither the store nor
the database, while another could reach both.

Whoever cannot report of a request for most of a lease, while others can, must take its reservation for given away: if a
hard quota holds for the request, it ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.ledger import LedgerRow
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable, StorageDown
from gateway.services.grants import Grant, LateSettlement
from gateway.services.limiter import Limiter
from gateway.services.orphans import Orphans
from gateway.services.ports import Clock
from gateway.services.stores import Storage

REPORTS_PER_LEASE = 4
CHUNK = 500
"""Requests or quotas that the store is told of at a time."""
RETRY_S = 0.25
UNHEARD_LEASES = 0.8
"""After so much of a lease without a report that was answered a request ends, before others may take what it holds."""
LOOKS_PER_LEASE = 20
WATCH_S = 1.0
DRAIN_S = 2.0
STORAGE_S = 10.0
PERIOD_SLACK_MS = 86_400_000
"""Requests may run on in a period that is over; its amounts are told for so long."""
REAPED_AT_A_TIME = 100
ORGANIZATIONS_AT_A_TIME = 8

_log = logging.getLogger(__name__)


class LimitKeeping:
    """Works while it is `running`.

    Attributes:
        is_recovered: whether nothing of dead processes of this host waits to be entered in the ledger.
        orphans: what these had reserved.
    """

    def __init__(self, limiter: Limiter, storage: Storage, clock: Clock) -> None:
        self._limiter = limiter
        self._store = limiter.store
        self._storage = storage
        self._clock = clock
        self.is_recovered: Callable[[], bool] = lambda: True
        self.orphans = Orphans(self._store, storage, limiter.lease_ms)
        self._seen: dict[OrganizationId, None] = {}
        self._recovered: dict[RequestId, LedgerRow] = {}
        self._num_rounds = 0
        self._born_ms: int | None = None

    def posted(self, rows: Sequence[LedgerRow]) -> None:
        """Requests of this process are in the ledger."""
        self._limiter.posted(row.request_id for row in rows)

    def recovered(self, rows: Sequence[LedgerRow]) -> None:
        """Requests of dead processes are in the ledger: what is reserved for them, or was charged when they were given
        up, is set right."""
        self._recovered.update((row.request_id, row) for row in rows)

    def is_told(self, request_id: RequestId) -> bool:
        """The store has taken what a request has used, or never knew of it. Until then the request must stay in a
        journal, so that the next process can tell it."""
        return request_id not in self._limiter.untold and request_id not in self._recovered

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """To be held while requests are answered; on leaving what is late is settled, as far as the store answers."""
        tasks = [
            asyncio.create_task(_for_ever(work), name=name)
            for name, work in (
                ("limit-reports", self._keep_reporting),
                ("limit-epochs", self._keep_reviving),
                ("limit-watch", self._watch),
                ("limit-ends", self._end_unheard),
            )
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._for_each([*self._limiter.late], self._limiter.settle_late)
            await self._store.close()

    async def _watch(self) -> None:
        """Ask, though no request may come: a server that says it is not ready gets none, and would never find out that
        the store answers again."""
        await asyncio.sleep(WATCH_S)
        await self.look_at_store()

    async def look_at_store(self) -> None:
        """Find out whether it was lost. Raises `LimitsUnavailable`."""
        born_ms = await self._store.born_ms()
        if born_ms != self._born_ms:
            self._limiter.note_store_lost()
        self._born_ms = born_ms

    async def _keep_reporting(self) -> None:
        await asyncio.sleep(self._limiter.lease_ms / 1000 / REPORTS_PER_LEASE)
        await self.report()

    async def report(self) -> None:
        """One round: every lease anew, late settlements once more, and what others left behind. What the store does
        not take of one organization keeps nobody from the others; it is tried again in the next round."""
        limiter = self._limiter
        recovered: dict[OrganizationId, list[LedgerRow]] = {}
        for row in self._recovered.values():
            recovered.setdefault(row.organization_id, []).append(row)
        self._seen.update(dict.fromkeys([*limiter.live, *limiter.late, *recovered]))
        self.orphans.begin_round(self._seen)

        async def report_one(organization_id: OrganizationId) -> None:
            grants = _holders(limiter, organization_id)
            for begin in range(0, len(grants), CHUNK):
                await self._report_some(organization_id, grants[begin : begin + CHUNK])
            if organization_id not in limiter.lost:
                await limiter.settle_late(organization_id)
                await self._settle_recovered(recovered.get(organization_id, ()))
            await self.orphans.tend(organization_id, is_lost=organization_id in limiter.lost)
            await self._store.reap(organization_id, REAPED_AT_A_TIME)
            if not grants and organization_id not in limiter.live and not await self._store.held(organization_id):
                self._seen.pop(organization_id, None)

        await self._for_each([*self._seen], report_one)

    async def _end_unheard(self) -> None:
        """One round: end what nothing could be reported of for too long."""
        lease_s = self._limiter.lease_ms / 1000
        due_s = UNHEARD_LEASES * lease_s
        await asyncio.sleep(lease_s / LOOKS_PER_LEASE)
        now = self._clock.monotonic()
        exact = [
            grant
            for grants in self._limiter.live.values()
            for grant in grants.values()
            if grant.plan.is_exact and not grant.is_by_share
        ]
        unheard: dict[OrganizationId, list[Grant]] = {}
        for grant in exact:
            if grant.heard_s < now - due_s and not grant.is_lost:
                unheard.setdefault(grant.organization_id, []).append(grant)
        for organization_id, grants in unheard.items():
            try:
                for begin in range(0, len(grants), CHUNK):
                    await self._report_some(organization_id, grants[begin : begin + CHUNK])
            except LimitsUnavailable:
                ended = [grant for grant in grants if grant.heard_s < now - due_s]
                _log.warning("%d requests of %s end: nothing can be reported of them", len(ended), organization_id)
                for grant in ended:
                    grant.end()

    async def _settle_recovered(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            usage = TokenUsage(row.prompt_tokens, row.completion_tokens, row.cached_tokens)
            await self._store.settle(row.organization_id, row.request_id, usage)
            self._recovered.pop(row.request_id, None)

    async def _for_each(
        self, organization_ids: Sequence[OrganizationId], work: Callable[[OrganizationId], Awaitable[None]]
    ) -> None:
        """Some at a time, beginning with another one each time. One that fails is left out."""
        if not organization_ids:
            return
        first = self._num_rounds % len(organization_ids)
        self._num_rounds += 1
        waiting = iter([*organization_ids[first:], *organization_ids[:first]])

        async def work_on() -> None:
            for organization_id in waiting:
                try:
                    await work(organization_id)
                except (LimitsUnavailable, StorageDown, TimeoutError):
                    pass  # the rest of the server says so already
                except Exception:  # noqa: BLE001 - a bug of ours; the others must be gone on with
                    _log.exception("the keeping of limits of %s failed; it is tried again", organization_id)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(ORGANIZATIONS_AT_A_TIME, len(organization_ids))):
                group.create_task(work_on())

    async def _report_some(self, organization_id: OrganizationId, grants: Sequence[Grant]) -> None:
        limiter = self._limiter
        unheard_since = self._clock.monotonic() - limiter.lease_ms / 1000
        unheard = {grant.info.request_id for grant in grants if grant.heard_s <= unheard_since}
        missing = await self._missing(organization_id, grants)
        if not missing:
            return
        is_begun = await self._register(organization_id, missing)
        if not is_begun and any(grant.plan.is_exact for grant in missing):
            limiter.note_lost(organization_id)
            return
        # What is missing still had been given up for dead, and settled. What was not heard of for a whole lease may be
        # missing since the store was lost, and known again without it.
        gone = [grant for grant in missing if grant.info.request_id in unheard]
        for grant in [*gone, *await self._missing(organization_id, missing)]:
            if grant.plan.is_exact and grant.info.request_id in limiter.live.get(organization_id, {}):
                grant.end(is_given_away=True)

    async def _missing(self, organization_id: OrganizationId, grants: Sequence[Grant]) -> list[Grant]:
        outputs = {grant.info.request_id: grant.output for grant in grants}
        asked_s = self._clock.monotonic()
        missing = set(await self._store.report(organization_id, outputs, self._limiter.lease_ms))
        for grant in grants:
            if grant.info.request_id not in missing:
                grant.held(outputs[grant.info.request_id], asked_s)
        live, late = self._limiter.live.get(organization_id, {}), self._limiter.late.get(organization_id, {})
        # Of those that have not ended while the store was asked.
        return [
            grant
            for grant in grants
            if (request_id := grant.info.request_id) in missing and (request_id in live or request_id in late)
        ]

    async def _register(self, organization_id: OrganizationId, grants: Sequence[Grant]) -> bool:
        """Make their reservations known again; whether the store knows the organization."""
        is_begun = False
        for begin in range(0, max(len(grants), 1), CHUNK):
            reservations = [grant.reservation() for grant in grants[begin : begin + CHUNK]]
            is_begun = await self._store.begin_epoch(organization_id, {}, reservations, is_whole=False)
        return is_begun

    async def _keep_reviving(self) -> None:
        """Until no organization is lost."""
        limiter = self._limiter
        await self.look_at_store()  # so that its age counts from now, and not from the first request
        if not (limiter.lost or limiter.unsure):
            limiter.has_lost.clear()
            await limiter.has_lost.wait()
        while limiter.lost or limiter.unsure:
            await self.revive()
            if limiter.lost or limiter.unsure:
                await asyncio.sleep(RETRY_S)

    async def revive(self) -> None:
        """Try once to make the organizations known that are lost. Raises `LimitsUnavailable`."""
        limiter = self._limiter
        can_read = await self._have_all_noticed() and self.is_recovered()

        async def revive_one(organization_id: OrganizationId) -> None:
            if await self._revive_one(organization_id, can_read=can_read):
                await limiter.note_known(organization_id)
                self._seen[organization_id] = None
                await limiter.settle_late(organization_id)

        # Another process may have made it known, so who waits is worth a question even if nothing can be read.
        waiting = limiter.unsure if can_read else limiter.awaited
        await self._for_each([*(limiter.lost | waiting)], revive_one)

    async def _revive_one(self, organization_id: OrganizationId, *, can_read: bool) -> bool:
        """Whether the store knows the organization now.

        Args:
            can_read: what is committed can be told by the ledger.
        """
        holders = _holders(self._limiter, organization_id)
        if await self._register(organization_id, holders):
            return True
        if any(grant.plan.is_exact for grant in holders):
            self._limiter.note_lost(organization_id)  # no report says so any more
        if not can_read:
            return False
        view = secrets.token_hex(8)
        # A store that is lost from here on has not heard of the view, and takes nothing of it.
        await self._store.begin_epoch(organization_id, {}, (), view=view, is_whole=False)
        if not await self._have_all_noticed():
            return False
        request_ids = list(await self._store.held(organization_id))
        since_ms = int(self._clock.time() * 1000) - PERIOD_SLACK_MS
        async with asyncio.timeout(STORAGE_S), self._storage.reading() as work:
            committed = Counter(await work.ledger.committed(organization_id, since_ms=since_ms))
            present = await work.ledger.present([*request_ids, *self._unposted(organization_id)])
        # What came since is not part of what was read either.
        for request_id, (grant, usage) in self._unposted(organization_id).items():
            if request_id not in present:
                committed.update({quota.key: quota.weights.cost(usage) for quota in grant.plan.quotas})
        settled = [request_id for request_id in request_ids if request_id in present]
        amounts, num_parts = list(committed.items()), 1
        for begin in range(0, len(amounts), CHUNK):
            part = dict(amounts[begin : begin + CHUNK])
            await self._store.begin_epoch(organization_id, part, (), view=view, is_whole=False)
            num_parts += 1
        is_known = await self._store.begin_epoch(
            organization_id, {}, (), view=view, settled=settled, num_parts=num_parts
        )
        if is_known:
            _log.info(
                "limits of %s are known again: %d quotas, %d requests running, %d settled meanwhile",
                organization_id,
                len(amounts),
                len(request_ids) - len(settled),
                len(settled),
            )
        return is_known

    async def _have_all_noticed(self) -> bool:
        """Whether the store was there for a whole lease."""
        age_ms = await self._store.age_ms()
        return age_ms is None or age_ms >= self._limiter.lease_ms

    def _unposted(self, organization_id: OrganizationId) -> dict[RequestId, LateSettlement]:
        """What this process has settled and may not have posted yet."""
        unposted = self._limiter.unposted.items()
        return {request_id: each for request_id, each in unposted if each.grant.organization_id == organization_id}


def _holders(limiter: Limiter, organization_id: OrganizationId) -> list[Grant]:
    """Those of this process whose reservations the store should have."""
    late = limiter.late.get(organization_id, {})
    return [*limiter.live.get(organization_id, {}).values(), *(each.grant for each in late.values())]


async def _for_ever(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except LimitsUnavailable:
            await asyncio.sleep(RETRY_S)  # the breaker has logged it
        except Exception:  # noqa: BLE001 - a bug of ours; leases must go on being renewed
            _log.exception("the keeping of limits failed; it is started again")
            await asyncio.sleep(RETRY_S)
