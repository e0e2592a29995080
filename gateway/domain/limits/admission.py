"""What is asked of all of a request's meters at once, and what is answered.

The rules, which every store keeps in one step that nothing comes between:

1. A request that was admitted and is asked for again gets the same answer and costs nothing more.
2. Some reservations of the organization whose lease has run out are settled first (`Settlement` says how, and which are
   spared).
3. A bucket is charged for the prompt and the expected output, though not more than its capacity for the sake of output.
   Its level must be that high. If the prompt alone is above its capacity, the request can never be admitted.
4. A hard quota reserves the prompt and as much output as is granted: the most, up to `max_output`, that all hard quotas
   have left. Less than `min_output` is a refusal. A soft quota reserves the same and refuses nothing.
5. A lease has one more request, if it may.
6. All meters take part or none: a refusal leaves everything as it was. Shadow meters never refuse or clamp; they are
   charged all the same, a bucket no lower than its debt.
"""

from __future__ import annotations

import msgspec

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.meters import Use


class Ask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """
    Attributes:
        owner: the process that runs the request and reports of it.
        lease_ms: the reservation is settled by others if nothing is heard of it for so long.
        prompt_tokens: exact.
        min_output, expected_output, max_output: tokens over all answers; 0 <= min_output <= max_output, and
            expected_output <= max_output.
        uses: all of one organization, no two of one meter.
    """

    organization_id: OrganizationId
    request_id: RequestId
    owner: str
    lease_ms: int
    prompt_tokens: int
    min_output: int
    expected_output: int
    max_output: int
    uses: tuple[Use, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """
    Attributes:
        granted_output: what the engine's cap may be now, over all answers; 0 if refused.
        binding: index of the first use that refuses, or else of the hard quota that granted least though less than
            `max_output`; None if nothing does.
        remaining: of each use, in its units, after this request: a bucket's level rounded down, what a quota or a lease
            has left; below 0 in debt or over a soft or shadow amount.
        wait_ms: after which all buckets that refuse would not; None if none of them does, or never will.
        is_never: a prompt above a bucket's capacity, or above a hard quota's whole amount.
        shadow_refused: indices of shadow uses that would have refused.
        is_lost: the store has lost what it knew of the organization (`LimitStore.begin_epoch`); nothing is decided.
        is_by_share: the store did not answer, so the process decided by its share of each limit.
    """

    is_admitted: bool
    granted_output: int = 0
    binding: int | None = None
    remaining: tuple[int, ...] = ()
    wait_ms: int | None = None
    is_never: bool = False
    shadow_refused: tuple[int, ...] = ()
    is_lost: bool = False
    is_by_share: bool = False


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What an admitted request holds.

    Attributes:
        ask: as it was admitted.
        granted_output: as raised since.
        reserved: of each use, in its units; of a bucket what it was charged, of a lease 1.
        reported_output: tokens that its owner last told of.
    """

    ask: Ask
    granted_output: int
    reserved: tuple[int, ...]
    reported_output: int = 0


class Settlement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request has cost in the end.

    A bucket gets back what was reserved and not used, or loses what was used beyond, down to its debt. A quota commits
    what was used, in the period that the request was admitted in, and no longer reserves anything. A lease is free.
    If nobody settles a reservation until its lease has run out, it is settled for its prompt and the output that was
    last reported; if its owner comes after all, that is corrected to what was really used.

    Time in which nobody could report does not count. A store knows when it was last asked anything of an organization.
    If that is more than half a lease ago (the one it was last told of), a reservation that was not heard of since gets
    one whole lease more, from the moment at which it was asked again; once, until its owner reports, so that what a
    dead one has left ends even if the organization is seldom asked for.

    Attributes:
        charged: of each use, in its units; of a lease 0.
        forgiven: of each use, in whole units: what a bucket's debt did not take.
        was_reaped: it had been settled before, since its lease had run out.
        was_settled: this answer had been given before; nothing was changed.
    """

    charged: tuple[int, ...]
    forgiven: tuple[int, ...]
    was_reaped: bool = False
    was_settled: bool = False
