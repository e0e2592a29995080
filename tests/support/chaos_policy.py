"""A policy of whims: any order, any quantum, any victim. Whatever it does, the scheduler's books must stay true."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from engine.request import Request
from engine.sched.policy import Offers
from engine.standing import Standing, TeamShare


class ChaosPolicy:
    """A `Policy` that also checks what it is told.

    Attributes:
        charged: tokens granted less tokens revoked.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._known: list[Request] = []
        self.charged: dict[Request, int] = {}

    def admit(self, request: Request) -> None:
        assert request not in self._known
        assert request.row is None
        self._known.append(request)
        self.charged.setdefault(request, 0)

    def forget(self, request: Request) -> None:
        self._known.remove(request)

    def preempted(self, request: Request) -> None:
        assert request in self._known
        assert request.row is None

    def parked(self, request: Request) -> None:
        assert request in self._known
        assert request.row is None
        assert request.table is not None

    def offers(self, budget: int, now_us: int) -> Offers:
        for _ in range(self._random.randint(1, 3)):
            for request in self._random.sample(self._known, len(self._known)):
                if request not in self._known:
                    continue
                most = self._random.choice([1, 3, 16, budget])
                granted = yield request, most
                assert 0 <= granted <= most
                self.charged[request] += granted

    def revoke(self, request: Request, num_tokens: int) -> None:
        self.charged[request] -= num_tokens
        assert self.charged[request] >= 0

    def sealed(self) -> None:
        """Whims keep nothing."""

    def yields_row(self, claimant: Request) -> Iterator[Request]:
        assert claimant.row is None
        holders = [r for r in self._known if r.row is not None and r is not claimant]
        return iter(self._random.sample(holders, self._random.randint(0, min(1, len(holders)))))

    def victims(self, claimant: Request) -> Iterator[Request]:
        resident = [r for r in self._known if r.table is not None and r is not claimant]
        return iter(self._random.sample(resident, self._random.randint(0, len(resident))))

    def measured(self, elapsed_us: int) -> None:
        """Time means nothing here."""

    def standing(self, request: Request, now_us: int) -> Standing:
        return Standing()

    def teams(self) -> tuple[TeamShare, ...]:
        return ()

    def set_weight(self, node_id: str, weight: int) -> None:
        """Whims have no weight."""

    def charge_external(self, node_id: str, cost_us: int) -> None:
        """Whims cost nothing."""
