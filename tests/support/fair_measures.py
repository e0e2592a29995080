"""How far apart siblings are, and what the rules allow: counted from plans and requests alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from fair_harness import FairHarness
from fair_witness import NodePath

from engine.request import Request
from engine.sched.fair.tree import SCALE

KEY_LEVELS = 4
"""Down to the key; among the sessions of one key few long prompts run at a time, and nothing is claimed."""


@dataclass(frozen=True)
class Breach:
    """Two siblings that have moved further apart than they may, in service by weight."""

    pair: tuple[NodePath, NodePath]
    step: int
    moved: Fraction
    allowed: Fraction


class Gaps:
    """Watches siblings that are both backlogged without a break.

    A child may be ahead of the one furthest behind by B = Λ + Θ + q + d of its own service, T being the largest
    target step so far, and it may come with a lag of Θ of its own service from the time when it was not backlogged. So,
    by weight, one is ahead of the other by B / weight of the one at most, or by Θ / weight of the other: between the
    two ends is never more than 2 B by the smaller weight. Where weights have changed the smallest so far counts.

    Attributes:
        breaches: where that did not hold.
        worst: the largest part of what is allowed that was used.
    """

    def __init__(self) -> None:
        self.breaches: list[Breach] = []
        self.worst = Fraction(0)
        self._v: dict[NodePath, Fraction] = {}
        self._served: Counter[NodePath] = Counter()
        self._least_weight: dict[NodePath, int] = {}
        self._ranges: dict[tuple[NodePath, NodePath], tuple[Fraction, Fraction]] = {}
        self._num_seen = 0

    def look(self, harness: FairHarness) -> None:
        if len(harness.steps) == self._num_seen:
            return
        self._num_seen = len(harness.steps)
        for names, weight in harness.weights.items():
            self._least_weight[names] = min(weight, self._least_weight.get(names, weight))
            served_us = harness.served_us[names] - self._served[names]
            if served_us:
                self._v[names] = self._v.get(names, Fraction(0)) + Fraction(served_us, weight)
                self._served[names] = harness.served_us[names]
        ranges: dict[tuple[NodePath, NodePath], tuple[Fraction, Fraction]] = {}
        bound_us = distance_us(harness)
        lag_us = harness.parameters.lag_steps * max(harness.targets_us)
        for one, other in combinations(sorted(harness.backlogged()), 2):
            if len(one) > KEY_LEVELS or one[:-1] != other[:-1]:
                continue
            gap = self._v.get(one, Fraction(0)) - self._v.get(other, Fraction(0))
            low, high = self._ranges.get((one, other), (gap, gap))
            low, high = ranges[one, other] = min(low, gap), max(high, gap)
            weights = self._least_weight[one], self._least_weight[other]
            allowed = sum(Fraction(bound_us, weight) for weight in weights) + Fraction(lag_us, min(weights))
            self.worst = max(self.worst, (high - low) / allowed)
            if high - low > allowed:
                self.breaches.append(Breach((one, other), self._num_seen, high - low, allowed))
        self._ranges = ranges


def distance_us(harness: FairHarness) -> int:
    """B: how far a child may be ahead of its sibling furthest behind, in service of its own."""
    target_us = max(harness.targets_us, default=0)
    parameters = harness.parameters
    longest = max((len(seen.request.token_ids) for seen in harness.seen.values()), default=1)
    least_us = harness.cost.marginal_us(max(0, longest - parameters.least_quantum_tokens), longest, longest)
    quantum_us = max(target_us // parameters.quanta_per_step, least_us)
    decode_us = harness.cost.marginal_us(longest, longest + 1, 0)
    return (parameters.window_steps + parameters.lag_steps) * target_us + quantum_us + decode_us


def ledger_us(harness: FairHarness, org: str) -> Fraction:
    """All that the policy has charged, if there never was but this one organization, with a weight of 1.

    Where it has no requests and was forgotten, what is left of it is its siblings' clock.
    """
    root = harness.policy.tree.root
    child = root.children.get(org)
    return Fraction(max(root.clock, child.v if child is not None else 0), SCALE)


def next_token_us(harness: FairHarness, request: Request) -> int:
    """The least that the request could have been granted beside what the step planned last grants it."""
    start = request.num_scheduled if request.table is not None else 0
    return harness.cost.marginal_us(start, start + 1, request.num_prompt_tokens)
