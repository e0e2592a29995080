"""The port between mechanism and order: who gets the next tokens, and who yields when something is short.

A policy keeps its own queues and knows nothing of blocks, rows or the runner; the scheduler knows nothing of order.
All of it is deterministic: the same calls lead to the same offers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Protocol

from engine.request import Request

Offers = Generator[tuple[Request, int], int, None]
"""Yields (request, most tokens it may get now, at least 1) and is sent how many it did get."""


class Policy(Protocol):
    """An order over requests.

    It knows a request from `admit` to `forget`. In between the request waits (row is None) or is resident. A resident
    one that is paused at its cap stays known; its `num_wanted` is 0.
    """

    def admit(self, request: Request) -> None:
        """The request waits from now on, having arrived or come back from a pause in which it lost its blocks."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended, or lost its blocks while it was paused."""
        ...

    def preempted(self, request: Request) -> None:
        """The resident request has lost row and blocks for somebody else, and waits again."""
        ...

    def offers(self, budget: int) -> Offers:
        """The order of one step, made while it is asked for.

        What a request gets is charged to it at once. It may be less than offered, or nothing: the step's budget, free
        rows and free blocks set the limit. A waiting request that gets any is resident from then on. The same
        request may be offered to again; its grants add up to one chunk. A resident one may have become a waiting
        one in the meantime (`preempted`). The generator is closed when the budget is used up; every grant is told
        before that.
        """
        ...

    def revoke(self, request: Request, num_tokens: int) -> None:
        """Of what the request got in the step being planned, this will not be computed after all."""
        ...

    def victims(self, claimant: Request) -> Iterator[Request]:
        """Resident requests that must yield row and blocks to the claimant (who has none if it waits), the first
        first. Each is preempted before the next is asked for; never the claimant itself."""
        ...

    def set_weight(self, node_id: str, weight: int) -> None: ...

    def charge_external(self, node_id: str, cost_us: int) -> None: ...
