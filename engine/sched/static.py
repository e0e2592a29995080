"""Static batches: the baseline that continuous batching is measured against (`evenhand bench batching`).

Takes a batch of waiting requests and lets nobody else in until the last of them has ended, as inference servers did
before iteration-level scheduling. Within its batch it is first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import takewhile

from engine.request import Request, RequestState
from engine.sched.fcfs import Fcfs
from engine.sched.line import in_line
from engine.sched.policy import Offers
from engine.standing import Standing, TeamShare


class StaticBatches:
    """A `Policy`.

    Args:
        batch_size: most requests in a batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._members: set[Request] = set()
        self._batch = Fcfs()
        self._waiting: deque[Request] = deque()

    def admit(self, request: Request) -> None:
        self._waiting.append(request)

    def forget(self, request: Request) -> None:
        self._members.discard(request)
        self._batch.forget(request)

    def preempted(self, request: Request) -> None:
        self._batch.preempted(request)

    def parked(self, request: Request) -> None:
        """Never happens: nobody is named by `yields_row`."""

    def offers(self, budget: int, now_us: int) -> Offers:
        while self._waiting and not self._members:
            self._form_batch()
        yield from self._batch.offers(budget, now_us)

    def revoke(self, request: Request, num_tokens: int) -> None:
        """Nothing was charged."""

    def sealed(self) -> None:
        """Nothing is kept from step to step."""

    def yields_row(self, claimant: Request) -> Iterator[Request]:  # noqa: ARG002 - the port's signature
        """Nobody is parked."""
        return iter(())

    def victims(self, claimant: Request) -> Iterator[Request]:
        return self._batch.victims(claimant)

    def measured(self, elapsed_us: int) -> None:
        """Time means nothing here."""

    def standing(self, request: Request, now_us: int) -> Standing:
        """Outside the batch all are ahead that came before, those of the batch that still wait among them."""
        if request in self._members:
            return self._batch.standing(request, now_us)
        earlier = takewhile(lambda other: other is not request, self._waiting)
        ahead = [*sorted(self._members, key=lambda member: member.arrival), *earlier]
        return in_line(request, [other for other in ahead if other.state is RequestState.WAITING], "slot")

    def teams(self) -> tuple[TeamShare, ...]:
        return ()

    def set_weight(self, node_id: str, weight: int) -> None:
        """Everybody is equal here."""

    def charge_external(self, node_id: str, cost_us: int) -> None:
        """Nobody pays here."""

    def _form_batch(self) -> None:
        while self._waiting and len(self._members) < self._batch_size:
            request = self._waiting.popleft()
            if request.state is RequestState.WAITING:  # else it ended in the queue
                self._members.add(request)
                self._batch.admit(request)
