"""Meters in this process, for one that has no other beside it. Nothing awaits inside a step, so each is whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.meters import Quota, Use
from gateway.domain.limits.rules import whole
from gateway.domain.limits.validation import Validator, validate
from gateway.domain.usage import TokenUsage
from gateway.limits.books import Books


class MemoryLimits:
    """Implements `gateway.services.limit_store.LimitStore`."""

    never_waits = True

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._books: dict[OrganizationId, Books] = {}
        self._validator = Validator()

    async def check(self, ask: Ask) -> Verdict:
        self._validator.validate(ask)
        now_ms = self._now_ms()
        return self._of(ask.organization_id, now_ms).answer(ask, now_ms, is_binding=False)

    async def admit(self, ask: Ask) -> Verdict:
        self._validator.validate(ask)
        now_ms = self._now_ms()
        return self._of(ask.organization_id, now_ms).answer(ask, now_ms, is_binding=True)

    async def raise_output(
        self, organization_id: OrganizationId, request_id: RequestId, wanted: int, quotas: Sequence[Quota] = ()
    ) -> int | None:
        return self._of(organization_id, self._now_ms()).raise_output(request_id, wanted, quotas, self._now_ms())

    async def report(
        self, organization_id: OrganizationId, outputs: Mapping[RequestId, int], lease_ms: int
    ) -> Sequence[RequestId]:
        return self._of(organization_id, self._now_ms()).report(outputs, lease_ms, self._now_ms())

    async def settle(
        self, organization_id: OrganizationId, request_id: RequestId, usage: TokenUsage
    ) -> Settlement | None:
        now_ms = self._now_ms()
        return self._of(organization_id, now_ms).settle(request_id, usage, now_ms)

    async def cancel(self, organization_id: OrganizationId, request_id: RequestId) -> bool:
        return self._of(organization_id, self._now_ms()).cancel(request_id, self._now_ms())

    async def reap(self, organization_id: OrganizationId, most: int) -> Sequence[RequestId]:
        return self._of(organization_id, self._now_ms()).reap(most, self._now_ms())

    async def look(self, organization_id: OrganizationId, uses: Sequence[Use]) -> Sequence[int]:
        books, now_ms = self._of(organization_id, self._now_ms()), self._now_ms()
        return [whole(use.meter, books.meters.standing(use.meter, now_ms)) for use in uses]

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
        for each in reservations:
            validate(each.ask)
            if each.ask.organization_id != organization_id or len(each.reserved) != len(each.ask.uses):
                raise ValueError(f"{each.ask.request_id} is no reservation of {organization_id}")
        books = self._of(organization_id, self._now_ms())
        books.begin_epoch(
            committed, reservations, settled, self._now_ms(), view=view, is_whole=is_whole, num_parts=num_parts
        )
        return books.is_begun

    async def held(self, organization_id: OrganizationId, owner: str = "") -> Sequence[RequestId]:
        held = self._of(organization_id, self._now_ms()).requests.held
        return [request_id for request_id, each in held.items() if not owner or each.ask.owner == owner]

    async def born_ms(self) -> int | None:
        return None

    async def age_ms(self) -> int | None:
        return None

    async def close(self) -> None:
        """Nothing is open."""

    def _of(self, organization_id: OrganizationId, now_ms: int) -> Books:
        books = self._books.get(organization_id)
        if books is None:
            books = self._books[organization_id] = Books()
        books.requests.note_asked(now_ms)
        return books
