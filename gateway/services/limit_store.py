"""Where meters are kept, as a port. Nothing comes between the parts of a method (`domain/limits/admission.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.meters import Quota, Use
from gateway.domain.usage import TokenUsage


class LimitStore(Protocol):
    """Raises `LimitsUnavailable` from every method if the store does not answer in its time.

    Attributes:
        never_waits: no method suspends its caller; then nothing can come between a call and its end.
    """

    never_waits: bool

    async def check(self, ask: Ask) -> Verdict:
        """What `admit` would say now; consumes nothing."""

    async def admit(self, ask: Ask) -> Verdict: ...

    async def raise_output(
        self, organization_id: OrganizationId, request_id: RequestId, wanted: int, quotas: Sequence[Quota] = ()
    ) -> int | None:
        """Grow the output that the request may have, up to `wanted`, as far as its hard quotas allow.

        Returns what is granted now, never less than before; None if there is no such reservation. Of an organization
        that is lost nothing is granted that a hard quota might not have.

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
        """Look at up to `most` reservations whose leases have run out, and settle those that are not spared
        (`Settlement`); which they were."""

    async def look(self, organization_id: OrganizationId, uses: Sequence[Use]) -> Sequence[int]:
        """What each has left (`Verdict.remaining`) at the moment."""

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
        """Make known again what a store has lost: committed amounts by quota key, and what runs. Until it is called for
        an organization that has hard quotas, `check` and `admit` answer `is_lost` if one is among the uses.

        Called by several processes at once, or again: amounts are taken once, reservations that are there stay. Amounts
        and what is settled go together, so both are taken of one view: of whoever comes first with its whole.

        Of an organization that was not lost, but never had a hard quota, the store has counted all the same. So the
        larger is taken of what is told and what was counted; and where more was counted, which the ledger lacks as yet,
        those among `settled` that count for the quota run on, for their owners to settle. That is exact if the store
        has counted all of the period. If it had been lost in it, what it has settled since that is not in the view is
        missing until the period ends.

        Returns whether the organization is known now.

        Args:
            view: of the ledger, from which amounts and `settled` come; another one in every process and at every try.
            settled: reservations that are part of the committed amounts already: if this begins the epoch they end
                without being committed again.
            is_whole: else more is to come of this view. Its amounts are put aside until then, for ten minutes at most;
                reservations are made known at once.
            num_parts: of this view that were told before its whole. If the store does not have them all any more, since
                it was lost meanwhile, or for too long, nothing of the view is taken.
        """

    async def held(self, organization_id: OrganizationId, owner: str = "") -> Sequence[RequestId]:
        """The requests that have reservations, in any order; only those of one owner (`Ask.owner`) if one is named."""

    async def born_ms(self) -> int | None:
        """When the store was first asked this since it was lost, by its own clock: another answer means that it was
        lost meanwhile. None if no other process can use it."""

    async def age_ms(self) -> int | None:
        """How long ago that is."""

    async def close(self) -> None: ...
