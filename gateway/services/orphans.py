"""What processes of this host that died had reserved: kept until the ledger has what they used, and then settled by it.

An engine may go on for a while before it notices that a gateway is gone. Were a reservation settled for what its
process had told when its lease runs out, others would use the rest, and a hard quota be exceeded. So whoever recovers a
dead process' journal renews its leases meanwhile. When all of the journal is in the ledger, so is every request that
has begun: what is left of its reservations belongs to one of these, or was never used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.usage import TokenUsage
from gateway.services.limit_store import LimitStore
from gateway.services.stores import Storage


class Orphans:
    """
    Attributes:
        dying: the dead processes whose journals are not yet in the ledger as a whole, by name (`Ask.owner`).
    """

    def __init__(self, store: LimitStore, storage: Storage, lease_ms: int) -> None:
        self._store = store
        self._storage = storage
        self._lease_ms = lease_ms
        self._gone: dict[str, set[OrganizationId] | None] = {}  # with the organizations that are still to be looked at
        self.dying: Callable[[], Collection[str]] = tuple

    def gone(self, owner: str) -> None:
        """All requests of a dead process are in the ledger."""
        self._gone[owner] = None

    def begin_round(self, organization_ids: Iterable[OrganizationId]) -> None:
        """These may know something of dead processes."""
        self._gone = {
            owner: set(organization_ids) if left is None else left
            for owner, left in self._gone.items()
            if left is None or left
        }

    async def tend(self, organization_id: OrganizationId, *, is_lost: bool) -> None:
        """Do for one organization what can be done now. Raises `LimitsUnavailable` or `StorageDown`.

        Args:
            is_lost: the store does not know what is committed, so nothing is settled.
        """
        for owner in self.dying():
            if held := await self._store.held(organization_id, owner):
                await self._store.report(organization_id, dict.fromkeys(held, 0), self._lease_ms)
        if is_lost:
            return
        for owner, left in list(self._gone.items()):
            if left is not None and organization_id in left:
                await self._settle_left(organization_id, owner)
                left.discard(organization_id)

    async def _settle_left(self, organization_id: OrganizationId, owner: str) -> None:
        held: list[RequestId] = list(await self._store.held(organization_id, owner))
        if not held:
            return
        async with self._storage.reading() as work:
            rows = {row.request_id: row for row in await work.ledger.rows(held)}
        for request_id in held:
            row = rows.get(request_id)
            usage = (
                TokenUsage() if row is None else TokenUsage(row.prompt_tokens, row.completion_tokens, row.cached_tokens)
            )
            if usage.total_tokens:
                await self._store.settle(organization_id, request_id, usage)
            else:
                await self._store.cancel(organization_id, request_id)
