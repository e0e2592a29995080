"""The orders that ours is compared with. They exist for the simulator only, and cannot be configured.

What they share: requests that want one token come first, then unfinished prompts in the order of their admission, then
waiting ones in the order that makes the difference. None of them takes back a slot. When blocks are short, the latest
arrival yields to an older one, as with fcfs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from engine.request import Request, RequestState
from engine.sched.cost import CostModel
from engine.sched.policy import Offers
from engine.sim.workload import TEAM_DEPTH
from engine.standing import Standing, TeamShare

_CLASS_RANKS = {"interactive": 0, "standard": 1, "batch": 2}
_SCALE = 1 << 20
"""Virtual time is cost times this over weight, so that whole numbers are exact enough."""


class _AdmissionOrder:
    """A `Policy` without an order of its own: the subclass says who of those waiting is next."""

    def __init__(self) -> None:
        self._waiting: dict[Request, None] = {}
        self._resident: dict[Request, None] = {}

    def admit(self, request: Request) -> None:
        self._waiting[request] = None

    def forget(self, request: Request) -> None:
        self._waiting.pop(request, None)
        self._resident.pop(request, None)

    def preempted(self, request: Request) -> None:
        del self._resident[request]
        self._waiting[request] = None

    def offers(self, budget: int, now_us: int) -> Offers:  # noqa: ARG002 - all ask for all; the scheduler cuts it
        prompts = []
        for request in list(self._resident):
            if request.num_wanted > 1:
                prompts.append(request)
            elif request.num_wanted and request in self._resident:
                self._charge(request, (yield request, 1))
        for request in prompts:
            if request in self._resident:
                self._charge(request, (yield request, request.num_wanted))
        while (head := self._next()) is not None:
            num_tokens = yield head, head.num_wanted
            if not num_tokens:
                return
            del self._waiting[head]
            self._resident[head] = None
            self._admitted(head)
            self._charge(head, num_tokens)

    def revoke(self, request: Request, num_tokens: int) -> None:
        """Nothing was charged."""

    def sealed(self) -> None:
        """Nothing is kept from step to step."""

    def parked(self, request: Request) -> None:
        """Never happens: nobody is named by `yields_row`."""

    def yields_row(self, claimant: Request) -> Iterator[Request]:  # noqa: ARG002 - the port's signature
        """Nobody is parked."""
        return iter(())

    def victims(self, claimant: Request) -> Iterator[Request]:
        if claimant.state is not RequestState.RUNNING:
            return iter(())
        younger = [request for request in self._resident if request.arrival > claimant.arrival]
        return iter(sorted(younger, key=_arrival, reverse=True))

    def measured(self, elapsed_us: int) -> None:
        """Time means nothing here."""

    def standing(self, request: Request, now_us: int) -> Standing:  # noqa: ARG002 - the port's signature
        """Nobody asks in a simulation."""
        return Standing()

    def teams(self) -> tuple[TeamShare, ...]:
        return ()

    def set_weight(self, node_id: str, weight: int) -> None:
        """Weights come with the requests."""

    def charge_external(self, node_id: str, cost_us: int) -> None:
        """Nobody pays here."""

    def _next(self) -> Request | None:
        """Who of those waiting is to be admitted next."""
        raise NotImplementedError  # each order below says so itself; this class has none

    def _admitted(self, request: Request) -> None:
        """The request has just become resident."""

    def _charge(self, request: Request, num_tokens: int) -> None:
        """The request was granted so many tokens, perhaps none."""


class StrictPriority(_AdmissionOrder):
    """By class, then by arrival: a lower class runs when nobody above it waits."""

    def _next(self) -> Request | None:
        return min(self._waiting, key=lambda r: (_CLASS_RANKS[r.request_class], r.arrival), default=None)


class LongestPrefix(_AdmissionOrder):
    """Whose prompt begins with the most blocks that were computed before, then by arrival.

    It remembers all prompts it has let in and forgets none, which is exact as long as the pool evicts nothing.
    """

    def __init__(self, block_tokens: int) -> None:
        super().__init__()
        self._block_tokens = block_tokens
        self._known: defaultdict[str, set[int]] = defaultdict(set)  # by salt: chained hashes of blocks
        self._chains: dict[Request, list[int]] = {}

    def admit(self, request: Request) -> None:
        super().admit(request)
        if request not in self._chains:
            self._chains[request] = self._chain(request.token_ids)

    def forget(self, request: Request) -> None:
        super().forget(request)
        del self._chains[request]
        self._known[request.cache_salt].update(self._chain(request.token_ids))

    def _next(self) -> Request | None:
        return min(self._waiting, key=lambda r: (-self._num_known_blocks(r), r.arrival), default=None)

    def _admitted(self, request: Request) -> None:
        self._known[request.cache_salt].update(self._chains[request])

    def _num_known_blocks(self, request: Request) -> int:
        known, chain = self._known[request.cache_salt], self._chains[request]
        low, high = 0, len(chain)
        while low < high:  # a block is known only if all before it are
            middle = (low + high + 1) // 2
            low, high = (middle, high) if chain[middle - 1] in known else (low, middle - 1)
        return low

    def _chain(self, token_ids: list[int]) -> list[int]:
        chain = []
        link = 0
        for i in range(0, len(token_ids) - self._block_tokens + 1, self._block_tokens):
            link = hash((link, *token_ids[i : i + self._block_tokens]))
            chain.append(link)
        return chain


class VirtualTokenCounter(_AdmissionOrder):
    """VTC (Sheng and others, OSDI 2024), weighted, charging the same cost as we do: whose team has been served least.

    As published it decides at admission only: who is resident stays until its end, and prompts are not sliced by it.
    A team that comes back is lifted to the least counter among those waiting, or to the last one that left.
    """

    def __init__(self, cost: CostModel) -> None:
        super().__init__()
        self._cost = cost
        self._counters: Counter[str] = Counter()
        self._num_waiting: Counter[str] = Counter()
        self._last_left: str | None = None
        self._granted: Counter[Request] = Counter()

    def admit(self, request: Request) -> None:
        team = _team(request)
        if not self._num_waiting[team]:
            active = [self._counters[other] for other, num in self._num_waiting.items() if num]
            last = self._counters[self._last_left] if self._last_left is not None else 0
            self._counters[team] = max(self._counters[team], min(active, default=last))
        self._num_waiting[team] += 1
        super().admit(request)

    def forget(self, request: Request) -> None:
        if request in self._waiting:
            self._leave(request)
        self._granted.pop(request, None)
        super().forget(request)

    def preempted(self, request: Request) -> None:
        super().preempted(request)
        self._num_waiting[_team(request)] += 1

    def _next(self) -> Request | None:
        return min(self._waiting, key=lambda r: (self._counters[_team(r)], r.arrival), default=None)

    def _admitted(self, request: Request) -> None:
        self._leave(request)
        self._granted[request] = request.num_scheduled

    def _leave(self, request: Request) -> None:
        team = _team(request)
        self._num_waiting[team] -= 1
        if not self._num_waiting[team]:
            self._last_left = team

    def _charge(self, request: Request, num_tokens: int) -> None:
        start = self._granted[request]
        cost_us = self._cost.marginal_us(start, start + num_tokens, request.num_prompt_tokens)
        self._granted[request] += num_tokens
        self._counters[_team(request)] += cost_us * _SCALE // request.path[TEAM_DEPTH - 1].weight


class TokenBuckets(_AdmissionOrder):
    """A rate limit for each team: its share by weight of the engine, which refills whoever else is there.

    A team gets in while its bucket is not empty, and pays what it used; nobody is refused, they wait.

    Args:
        weights: of all teams that share the engine.
    """

    BURST_US = 1_000_000
    """What a full bucket holds, in microseconds of engine time."""

    def __init__(self, cost: CostModel, clock: Callable[[], int], weights: Mapping[str, int]) -> None:
        super().__init__()
        self._cost = cost
        self._clock = clock
        self._weights = weights
        self._total = sum(weights.values())
        self._levels = dict.fromkeys(weights, self.BURST_US * self._total)  # microseconds times total weight
        self._filled_us = clock()
        self._granted: Counter[Request] = Counter()

    def forget(self, request: Request) -> None:
        self._granted.pop(request, None)
        super().forget(request)

    def _next(self) -> Request | None:
        self._refill()
        allowed = (request for request in self._waiting if self._levels[_team(request)] > 0)
        return min(allowed, key=_arrival, default=None)

    def _admitted(self, request: Request) -> None:
        self._granted[request] = request.num_scheduled

    def _charge(self, request: Request, num_tokens: int) -> None:
        start = self._granted[request]
        self._granted[request] += num_tokens
        cost_us = self._cost.marginal_us(start, start + num_tokens, request.num_prompt_tokens)
        self._levels[_team(request)] -= cost_us * self._total

    def _refill(self) -> None:
        now_us = self._clock()
        passed_us, self._filled_us = now_us - self._filled_us, now_us
        if passed_us:
            full = self.BURST_US * self._total
            for team, weight in self._weights.items():
                self._levels[team] = min(full, self._levels[team] + passed_us * weight)


def _arrival(request: Request) -> int:
    return request.arrival


def _team(request: Request) -> str:
    return request.path[TEAM_DEPTH - 1].id
