"""Processes that share a ledger and, if it is in Redis, a store of limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from identity_kit import SteppedClock
from limiter_kit import MODEL, NOW_S, Told, Wanted, info_of
from storage_kit import ledger_row

from gateway.domain.ids import OrganizationId
from gateway.domain.ledger import Charge, LedgerRow
from gateway.domain.principal import Principal
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable, StorageDown
from gateway.limits.memory import MemoryLimits
from gateway.services.grants import Grant
from gateway.services.limit_keeping import LimitKeeping
from gateway.services.limit_store import LimitStore
from gateway.services.limiter import Limiter


class Ledger:
    """Implements what limits use of `gateway.services.stores.Storage`: rows, and what they were charged of quotas.

    Attributes:
        failure: raised by whoever reads.
        unreadable: organizations whose sums make it fail.
        has_read: called with each view that was read, before anybody acts on it.
    """

    def __init__(self) -> None:
        self.rows: dict[str, LedgerRow] = {}
        self.failure: Exception | None = None
        self.unreadable: set[OrganizationId] = set()
        self.has_read: Callable[[], Any] | None = None

    def post(self, *rows: LedgerRow) -> None:
        self.rows.update({row.request_id: row for row in rows})

    def committed(self, key: str) -> int:
        return sum(charge.units for row in self.rows.values() for charge in row.charges if charge.key == key)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        yield SimpleNamespace(ledger=_View(dict(self.rows), self.unreadable))
        if self.has_read is not None:
            await self.has_read()

    def writing(self) -> Any:
        raise StorageDown


class _View:
    def __init__(self, rows: dict[str, LedgerRow], unreadable: set[OrganizationId]) -> None:
        self._rows = rows
        self._unreadable = unreadable

    async def committed(self, organization_id: OrganizationId, *, since_ms: int) -> dict[str, int]:
        if organization_id in self._unreadable:
            raise ZeroDivisionError("a bug")
        sums: dict[str, int] = {}
        for row in self._rows.values():
            for charge in row.charges:
                if row.organization_id == organization_id and charge.ends_at_ms >= since_ms:
                    sums[charge.key] = sums.get(charge.key, 0) + charge.units
        return sums

    async def present(self, request_ids: Sequence[str]) -> set[str]:
        return set(request_ids) & self._rows.keys()


class Gateway:
    """A process.

    Attributes:
        unposted: rows of its requests that are not in the ledger yet.
    """

    def __init__(self, ledger: Ledger, store: LimitStore | None = None, *, clock: SteppedClock | None = None) -> None:
        self.clock = clock or SteppedClock(NOW_S)
        self.store = store or MemoryLimits(lambda: int(self.clock.time() * 1000))
        self.ledger = ledger
        self.limiter = Limiter(self.store, self.clock)
        self.told = self.limiter.events = Told()
        self.keeping = LimitKeeping(self.limiter, ledger, self.clock)  # type: ignore[arg-type]  # of its methods these are used
        self.unposted: list[LedgerRow] = []

    @contextlib.asynccontextmanager
    async def reviving(self) -> AsyncIterator[None]:
        """Makes known what the store has lost, meanwhile; reports are up to the test."""
        task = asyncio.create_task(self._revive())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _revive(self) -> None:
        while True:
            with contextlib.suppress(LimitsUnavailable):
                await self.keeping._keep_reviving()
            await asyncio.sleep(0.001)

    async def admit(self, principal: Principal, prompt: int = 10, most: int = 100) -> Grant:
        return await self.limiter.admit(info_of(principal), Wanted((prompt,), (most,)), (), num_choices=1)

    async def end(self, grant: Grant, output: int, prompt: int = 10) -> None:
        """With a row, that is not posted yet."""
        usage = TokenUsage(prompt, output) if output else TokenUsage()
        await self.limiter.settle(grant, usage)
        self.write(grant, usage)

    def write(self, grant: Grant, usage: TokenUsage) -> LedgerRow:
        row = row_of(grant, usage)
        self.unposted.append(row)
        return row

    def post(self) -> None:
        rows, self.unposted = self.unposted, []
        self.ledger.post(*rows)
        self.keeping.posted(rows)

    async def left(self, principal: Principal) -> list[int]:
        uses = self.limiter.plan(principal, MODEL, ()).uses
        return list(await self.store.look(principal.organization_id, uses))


def row_of(grant: Grant, usage: TokenUsage) -> LedgerRow:
    return ledger_row(
        1,
        request_id=grant.info.request_id,
        organization_id=grant.organization_id,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        charges=tuple(Charge(each.key, each.ends_at_ms, each.weights.cost(usage)) for each in grant.plan.quotas),
    )
