"""First come, first served.

A step goes to the resident requests first: those that want one token, then unfinished prompts, then newcomers; each
by arrival. Nobody passes the head of the queue. When blocks are short, the latest arrival yields to any older one that
is resident, and comes back to its place by arrival. So the oldest request never waits for a younger one's block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush

from engine.request import Request, RequestState
from engine.sched.line import in_line
from engine.sched.policy import Offers
from engine.standing import Standing, TeamShare


class Fcfs:
    """A `Policy`. Weights and paths mean nothing to it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Request]] = []  # a heap by arrival; ended ones leave when they reach its top
        self._resident: list[Request] = []  # by arrival

    def admit(self, request: Request) -> None:
        heappush(self._waiting, (request.arrival, request))

    def forget(self, request: Request) -> None:
        i = bisect_left(self._resident, request.arrival, key=_arrival)
        if i < len(self._resident) and self._resident[i] is request:
            del self._resident[i]

    def preempted(self, request: Request) -> None:
        self.forget(request)
        self.admit(request)

    def parked(self, request: Request) -> None:
        """Never happens: nobody is named by `yields_row`."""

    def offers(self, budget: int, now_us: int) -> Offers:  # noqa: ARG002 - all ask for all; the scheduler cuts it
        prompts = []
        for request in self._resident.copy():
            num_wanted = request.num_wanted
            if num_wanted > 1:
                prompts.append(request)
            elif num_wanted == 1 and request.row is not None:
                yield request, 1
        for request in prompts:
            if request.row is not None:  # else an older one has claimed its blocks in this very step
                yield request, request.num_wanted
        while self._waiting:
            head = self._waiting[0][1]
            if head.state is RequestState.WAITING:
                if not (yield head, head.num_wanted):
                    return
                insort(self._resident, head, key=_arrival)
            heappop(self._waiting)

    def revoke(self, request: Request, num_tokens: int) -> None:
        """Nothing was charged."""

    def sealed(self) -> None:
        """Nothing is kept from step to step."""

    def yields_row(self, claimant: Request) -> Iterator[Request]:  # noqa: ARG002 - the port's signature
        """Nobody is parked."""
        return iter(())

    def victims(self, claimant: Request) -> Iterator[Request]:
        if claimant.row is None:
            return iter(())
        i = bisect_left(self._resident, claimant.arrival + 1, key=_arrival)
        return reversed(self._resident[i:])

    def measured(self, elapsed_us: int) -> None:
        """Time means nothing here."""

    def standing(self, request: Request, now_us: int) -> Standing:  # noqa: ARG002 - the port's signature
        """Who is resident runs. How long one waits cannot be told without knowing how long answers get."""
        if request.row is not None:
            return Standing(expected_wait_us=0)
        waiting = [other for _, other in self._waiting if other.state is RequestState.WAITING]
        ahead = sorted((other for other in waiting if other.arrival < request.arrival), key=_arrival)
        return in_line(request, ahead, "slot")

    def teams(self) -> tuple[TeamShare, ...]:
        return ()

    def set_weight(self, node_id: str, weight: int) -> None:
        """Everybody is equal here."""

    def charge_external(self, node_id: str, cost_us: int) -> None:
        """Nobody pays here."""


def _arrival(request: Request) -> int:
    return request.arrival
