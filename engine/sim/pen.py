"""Writes workloads down: the means that `workloads.py` uses. Lengths are drawn, never constant: requests of one length
run in lockstep, and every figure is off by a tenth or more."""

from __future__ import annotations

import random

from engine.messages import PathNode, RequestClass
from engine.sched.cost import CostModel
from engine.sim.workload import FIRST_SHARED_ID, Arrival, Segment

S = 1_000_000
"""Microseconds in a second."""


class Pen:
    """Writes arrivals down for one engine, with ids in order.

    Attributes:
        slots: sequence slots that suit the engine.
        pace: how much longer than on a large GPU something should last, so that as much happens in it.
        long_tokens: a prompt that keeps the engine busy for some seconds: 100,000 tokens if that is all.
    """

    def __init__(self, seed: int, cost: CostModel) -> None:
        self.seed = seed
        self.cost = cost
        self.rng = random.Random(seed)
        self.arrivals: list[Arrival] = []
        self.slots = max(16, min(64, cost.fixed_us * 1000 // cost.decode_token_ns))
        self.pace = 1 if cost.marginal_us(0, 400, 400) < 40_000 else 5
        self.long_tokens = next((n for n in (100_000, 32_000) if cost.marginal_us(0, n, n) < 60 * S), 8_000)
        self._num_segments = 0

    def s(self, seconds: float) -> int:
        """Microseconds of so many seconds, at this engine's pace."""
        return int(seconds * self.pace * S)

    def segment(self, num_tokens: int) -> Segment:
        """A text that nobody has had before."""
        self._num_segments += 1
        return Segment(FIRST_SHARED_ID + self._num_segments, num_tokens)

    def length(self, mean: int) -> int:
        """Between half and one and a half of the mean."""
        return self.rng.randint(max(1, mean // 2), max(1, mean * 3 // 2))

    def arrive(
        self,
        at_us: int,
        path: tuple[PathNode, ...],
        num_output_tokens: int,
        *,
        num_prompt_tokens: int = 0,
        prompt: tuple[Segment, ...] = (),
        request_class: RequestClass = "interactive",
        cancel_after_us: int | None = None,
        after: Arrival | None = None,
    ) -> Arrival:
        """With `num_prompt_tokens` the prompt ends with so many new tokens."""
        if num_prompt_tokens:
            prompt = (*prompt, self.segment(num_prompt_tokens))
        arrival = Arrival(
            id=len(self.arrivals),
            at_us=at_us,
            path=path,
            prompt=prompt,
            num_output_tokens=num_output_tokens,
            request_class=request_class,
            cancel_after_us=cancel_after_us,
            after=after.id if after is not None else None,
        )
        self.arrivals.append(arrival)
        return arrival

    def stream(
        self,
        path: tuple[PathNode, ...],
        *,
        load: float,
        num_prompt_tokens: int,
        num_output_tokens: int,
        until_us: int,
        from_us: int = 0,
        request_class: RequestClass = "interactive",
        canceled: float = 0.0,
    ) -> None:
        """Requests with exponential gaps.

        Args:
            load: the part of the engine's time that they take, fixed cost not regarded.
            canceled: the part of them that is canceled, at some time after their arrival.
        """
        work_us = self.cost.marginal_us(0, num_prompt_tokens + num_output_tokens - 1, num_prompt_tokens)
        now_us = float(from_us)
        while (now_us := now_us + self.rng.expovariate(load / work_us)) < until_us:
            is_canceled = self.rng.random() < canceled
            self.arrive(
                int(now_us),
                path,
                self.length(num_output_tokens),
                num_prompt_tokens=self.length(num_prompt_tokens),
                request_class=request_class,
                cancel_after_us=self.rng.randrange(20 * work_us) if is_canceled else None,
            )

    def clients(
        self,
        num_clients: int,
        path: tuple[PathNode, ...],
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        until_us: int,
        from_us: int = 0,
        request_class: RequestClass = "interactive",
    ) -> None:
        """So many clients, each of which asks again as soon as it has its answer, for as long as the run lasts."""
        work_us = self.cost.marginal_us(0, num_prompt_tokens + num_output_tokens - 1, num_prompt_tokens)
        share = (until_us - from_us) // (work_us * num_clients)  # how often it is its turn if all are equal
        most = (until_us - from_us) // (num_output_tokens * self.cost.fixed_us)  # how often if it never waits
        for _ in range(num_clients):
            last: Arrival | None = None
            for _ in range(min(most, 4 * share + 4) + 1):
                at_us = from_us + self.rng.randrange(1000) if last is None else 0
                last = self.arrive(
                    at_us,
                    path,
                    self.length(num_output_tokens),
                    num_prompt_tokens=self.length(num_prompt_tokens),
                    request_class=request_class,
                    after=last,
                )


def path_of(
    team: str, weight: int = 1, *, org: str = "org", org_weight: int = 1, key: str = "key", session: str = "session"
) -> tuple[PathNode, ...]:
    """Organization, team, key, session."""
    return (
        PathNode(org, org_weight),
        PathNode(team, weight),
        PathNode(f"{team}/{key}"),
        PathNode(f"{team}/{key}/{session}"),
    )
