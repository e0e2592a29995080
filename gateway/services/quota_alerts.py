"""Tells administrators, once a period, that a quota has reached one of its percentages: by the ledger, not by what is
only reserved. Once over all processes, since the database keeps what was told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from gateway.domain.ids import OrganizationId
from gateway.domain.ledger import LedgerRow
from gateway.domain.limits.meters import Quota
from gateway.domain.limits.plan import Metered
from gateway.domain.limits.policy import QuotaRule
from gateway.errors import StorageDown
from gateway.services.ports import Clock
from gateway.services.stores import Storage

EVERY_S = 5.0
LAST_LOOK_S = 2.0
MOST_KEYS = 1_000
"""Quotas that one look asks the ledger for at a time."""
MOST_CHARGED = 50_000

_log = logging.getLogger(__name__)


class QuotaAlerts:
    """Looks at the quotas that rows of the ledger were charged to, after they were.

    Args:
        find: a quota as requests were last held to it, by the key of its meter; None if no request was, as yet.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        find: Callable[[str], tuple[OrganizationId, Metered] | None],
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._find = find
        self._charged: dict[str, int] = {}
        self._told: dict[tuple[str, int], int] = {}

    def posted(self, rows: Sequence[LedgerRow]) -> None:
        """These are in the ledger, of whichever process: their quotas are to be looked at.

        Of more than `MOST_CHARGED` that nobody could look at, those that were charged last.
        """
        for row in rows:
            for charge in row.charges:
                self._charged.pop(charge.key, None)
                self._charged[charge.key] = charge.ends_at_ms
        while len(self._charged) > MOST_CHARGED:
            del self._charged[next(iter(self._charged))]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """To be held around what posts: on leaving it is looked once more, as far as the database answers."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            with suppress(StorageDown, TimeoutError):
                async with asyncio.timeout(LAST_LOOK_S):
                    await self.look()

    async def look(self) -> int:
        """Once; how many percentages were reached that nobody had told of. Raises `StorageDown`; what was not looked at
        stays to be."""
        now_ms = int(self._clock.time() * 1000)
        self._told = {told: ends_ms for told, ends_ms in self._told.items() if ends_ms > now_ms}
        waiting, self._charged = self._charged, {}
        num_new = 0
        try:
            found = {key: quota for key in waiting if (quota := self._find(key)) is not None}
            # Of a quota that no request was held to since this process began, what it allows is not known yet.
            unknown = {key: ends_ms for key, ends_ms in waiting.items() if key not in found and ends_ms > now_ms}
            keys = list(found)
            for begin in range(0, len(keys), MOST_KEYS):
                some = keys[begin : begin + MOST_KEYS]
                async with self._storage.reading() as work:
                    committed = await work.ledger.committed_of(some)
                for key in some:
                    num_new += await self._compare(key, *found[key], committed.get(key, 0), now_ms)
        except BaseException:
            self._charged = waiting | self._charged
            raise
        self._charged = unknown | self._charged
        return num_new

    async def _compare(
        self, key: str, organization_id: OrganizationId, metered: Metered, used: int, now_ms: int
    ) -> int:
        quota, rule, period = metered.use.meter, metered.limit.rule, metered.period
        if not isinstance(quota, Quota) or not isinstance(rule, QuotaRule) or period is None:
            return 0
        num_new = 0
        for percent in rule.alerts:
            if used * 100 >= percent * quota.amount and (key, percent) not in self._told:
                num_new += await self._tell(key, percent, organization_id, metered, used, now_ms)
                self._told[key, percent] = period.end_ms
        return num_new

    async def _tell(
        self, key: str, percent: int, organization_id: OrganizationId, metered: Metered, used: int, now_ms: int
    ) -> bool:
        async with self._storage.writing() as work:
            is_new = await work.limits.alert(key, percent, organization_id=organization_id, at_ms=now_ms)
        if is_new:
            limit, quota = metered.limit, metered.use.meter
            _log.warning(
                "quota %s of %s %s has reached %d %%: %d of %d",
                limit.name,
                limit.scope,
                limit.scope_id,
                percent,
                used,
                quota.amount if isinstance(quota, Quota) else 0,
            )
        return is_new

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
            except StorageDown:
                pass  # the rest of the server says so; what was not looked at is kept
            except Exception:  # noqa: BLE001 - a bug of ours must not end the telling
                _log.exception("looking at quotas failed")
