"""Steps as large as promises allow, for policies that know no promises.

What is compared is the order, so every baseline gets the step sizes that a policy with promises would choose: small
steps cost throughput, and large ones cost latency, whatever the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

from engine.messages import RequestClass
from engine.request import Request
from engine.sched.cost import CostModel
from engine.sched.policy import Offers, Policy
from engine.standing import Standing, TeamShare

STEP_US: dict[RequestClass, int] = {"interactive": 50_000, "standard": 150_000, "batch": 500_000}
"""The longest step while a request of the class is here."""


class TimedSteps:
    """A `Policy` around another: a step ends when it takes as long as the tightest class among its requests allows."""

    def __init__(self, inner: Policy, cost: CostModel) -> None:
        self._inner = inner
        self._cost = cost
        self._num_known: Counter[RequestClass] = Counter()

    def admit(self, request: Request) -> None:
        self._num_known[request.request_class] += 1
        self._inner.admit(request)

    def forget(self, request: Request) -> None:
        self._num_known[request.request_class] -= 1
        self._inner.forget(request)

    def preempted(self, request: Request) -> None:
        self._inner.preempted(request)

    def offers(self, budget: int, now_us: int) -> Offers:
        left_us = self._step_us() - self._cost.fixed_us
        is_empty = True
        granted: Counter[Request] = Counter()
        with closing(self._inner.offers(budget, now_us)) as offers:
            try:
                request, most = next(offers)
                while left_us > 0 or is_empty:
                    start = request.num_scheduled + granted[request]
                    num_prompt = request.num_prompt_tokens
                    most = max(int(is_empty), self._cost.num_tokens_within(left_us, start, start + most, num_prompt))
                    if not most:
                        return
                    num_tokens = yield request, most
                    if num_tokens:
                        is_empty = False
                        # Now it is resident, and begins behind what the prefix cache had.
                        start = request.num_scheduled + granted[request]
                        left_us -= self._cost.marginal_us(start, start + num_tokens, num_prompt)
                        granted[request] += num_tokens
                    request, most = offers.send(num_tokens)
            except StopIteration:
                return

    def revoke(self, request: Request, num_tokens: int) -> None:
        self._inner.revoke(request, num_tokens)

    def sealed(self) -> None:
        self._inner.sealed()

    def parked(self, request: Request) -> None:
        self._inner.parked(request)

    def yields_row(self, claimant: Request) -> Iterator[Request]:
        return self._inner.yields_row(claimant)

    def victims(self, claimant: Request) -> Iterator[Request]:
        return self._inner.victims(claimant)

    def measured(self, elapsed_us: int) -> None:
        self._inner.measured(elapsed_us)

    def standing(self, request: Request, now_us: int) -> Standing:
        return self._inner.standing(request, now_us)

    def teams(self) -> tuple[TeamShare, ...]:
        return self._inner.teams()

    def set_weight(self, node_id: str, weight: int) -> None:
        self._inner.set_weight(node_id, weight)

    def charge_external(self, node_id: str, cost_us: int) -> None:
        self._inner.charge_external(node_id, cost_us)

    def _step_us(self) -> int:
        present = [step_us for request_class, step_us in STEP_US.items() if self._num_known[request_class] > 0]
        return min(present, default=STEP_US["batch"])
