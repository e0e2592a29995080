"""Where meters are kept, as a port. Nothing comes between the parts of a method (`domain/limits/admission.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.meters import Quota, Use
from gateway.domain.usage import TokenUsage


class LimitStore(Protocol):
    """Raises `LimitsUnavailable` from every method if the store does not answer in its time."""

    async def check(self, ask: Ask) -> Verdict:
        """What `admit` would say now; consumes nothing."""

    async def admit(self, ask: Ask) -> Verdict: ...

    async def raise_output(
        self, organization_id: OrganizationId, request_id: RequestId, wanted: int, quotas: Sequence[Quota] = ()
    ) -> int | None:
        """Grow the output that the request may have, up to `wanted`, as far as its hard quotas allow.

        Returns what is granted now, never less than before; None if there is no such reservation.

        Args:
            quotas: those of the request that were changed since it was admitted, as they are now.
        """

    async def report(
        self, organization_id: OrganizationId, outputs: Mapping[RequestId, int], lease_ms: int
    ) -> Sequence[RequestId]:
        """These requests run, and have so many output tokens so far: their leases begin anew.

        Returns those that have no reservation (any more).
        """

    async def settle(
        self, organization_id: OrganizationId, request_id: RequestId, usage: TokenUsage
    ) -> Settlement | None:
        """Exactly once: a second time answers the same and changes nothing. None if there never was a reservation, or
        that is too long ago to know."""

    async def cancel(self, organization_id: OrganizationId, request_id: RequestId) -> bool:
        """The engine has done nothing for the request: everything is given back. False if there was no reservation."""

    async def reap(self, organization_id: OrganizationId, most: int) -> Sequence[RequestId]:
        """Settle up to `most` reservations whose leases have run out; which they were."""

    async def look(self, organization_id: OrganizationId, uses: Sequence[Use]) -> Sequence[int]:
        """What each has left (`Verdict.remaining`) at the moment."""

    async def begin_epoch(
        self, organization_id: OrganizationId, committed: Mapping[str, int], reservations: Sequence[Reservation]
    ) -> None:
        """Make known again what a store has lost: committed amounts by quota key, and what runs. Until it is called for
        an organization that has hard quotas, `check` and `admit` answer `is_lost` if one is among the uses.

        Called by several processes at once, or again: amounts are taken once, reservations that are there stay.
        """

    async def close(self) -> None: ...
