"""The policies that fair share is compared with, made as `FairHarness` makes its own: to show that a test can fail."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from engine.sched.cost import CostModel
from engine.sched.fcfs import Fcfs
from engine.sched.policy import Policy
from engine.sim.baselines import LongestPrefix, StrictPriority, TokenBuckets, VirtualTokenCounter
from engine.sim.timed_steps import TimedSteps


def fcfs(cost: CostModel, max_sequences: int, **_: object) -> Policy:
    return TimedSteps(Fcfs(), cost)


def vtc(cost: CostModel, max_sequences: int, **_: object) -> Policy:
    return TimedSteps(VirtualTokenCounter(cost), cost)


def priority(cost: CostModel, max_sequences: int, **_: object) -> Policy:
    return TimedSteps(StrictPriority(), cost)


def prefix(cost: CostModel, max_sequences: int, **_: object) -> Policy:
    return TimedSteps(LongestPrefix(16), cost)


def buckets(weights: dict[str, int]) -> Callable[..., Policy]:
    """A rate limit for each of these teams; its clock is one millisecond a question, whoever runs."""

    def make(cost: CostModel, max_sequences: int, **_: object) -> Policy:
        return TimedSteps(TokenBuckets(cost, count(0, 1000).__next__, weights), cost)

    return make
