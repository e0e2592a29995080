"""The port between mechanism and order: who gets the next tokens, and who yields when something is short.

A policy keeps its own queues and knows nothing of blocks, rows or the runner; the scheduler knows nothing of order.
All of it is deterministic: the same calls lead to the same offers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Protocol

from engine.request import Request
from engine.standing import Standing, TeamShare

Offers = Generator[tuple[Request, int], int, None]
"""Yields (request, most tokens it may get now, at least 1) and is sent how many it did get."""


class Policy(Protocol):
    """An order over requests.

    It knows a request from `admit` to `forget`. In between the request waits (no row, no table), is resident, or is
    parked (a table and no row). One that is paused at its cap stays known while it has its table; its `num_wanted` is
    0.
    """

    def admit(self, request: Request) -> None:
        """The request waits from now on, having arrived or come back from a pause in which it lost its blocks."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended, or lost its blocks while it was paused."""
        ...

    def preempted(self, request: Request) -> None:
        """The resident or parked request has lost what it held to somebody else, and waits again."""
        ...

    def parked(self, request: Request) -> None:
        """The resident request has lost its row to somebody else, and keeps its blocks."""
        ...

    def offers(self, budget: int, now_us: int) -> Offers:
        """The order of one step, made while it is asked for.

        What a request gets is charged to it at once. It may be less than offered, or nothing: the step's budget, free
        rows and free blocks set the limit. A waiting or parked one that gets any is resident from then on. The same
        request may be offered to again; its grants add up to one chunk. A resident one may have become a waiting
        one in the meantime (`preempted`). The generator is closed when the budget is used up; every grant is told
        before that. What was offered stands with `sealed`; without it, all of it is revoked or there was nothing.
        """
        ...

    def sealed(self) -> None:
        """The step that was offered last will run as granted."""
        ...

    def revoke(self, request: Request, num_tokens: int) -> None:
        """Of what the request got in the step being planned, this will not be computed after all."""
        ...

    def yields_row(self, claimant: Request) -> Iterator[Request]:
        """Resident requests that are to be parked for the claimant, which has no row while none is free; the first
        first. Each is parked before the next is asked for; never the claimant itself."""
        ...

    def victims(self, claimant: Request) -> Iterator[Request]:
        """Resident or parked requests that must yield all they hold to the claimant (who has nothing if it waits), the
        first first. Each is preempted before the next is asked for; never the claimant itself."""
        ...

    def measured(self, elapsed_us: int) -> None:
        """The oldest sealed step not told of yet has taken so long."""
        ...

    def standing(self, request: Request, now_us: int) -> Standing:
        """Where a known request stands; all but its phase and where its time went, which the caller fills in."""
        ...

    def teams(self) -> tuple[TeamShare, ...]:
        """What each team has at the moment; empty where teams mean nothing."""
        ...

    def set_weight(self, node_id: str, weight: int) -> None: ...

    def charge_external(self, node_id: str, cost_us: int) -> None: ...
