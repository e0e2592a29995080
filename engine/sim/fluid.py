"""The ideal that no engine can reach: every node with work is served at every moment, by weight, in infinitely small
pieces. Exact, in rational numbers, and therefore for small cases only.

Its time is service: it is given what the engine has computed, so both are always equally far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from engine.sim.trace import Run
from engine.sim.workload import nodes_of

Node = tuple[str, ...]
MAX_LEAVES = 32
MAX_EVENTS = 2000


class TooLargeError(ValueError):
    """More leaves or events than exact numbers are meant for."""


class Fluid:
    """Hierarchical generalized processor sharing.

    Args:
        weights: of every node, by the ids from the top down to it. Those without children are leaves.

    Attributes:
        served: of every node so far.
        backlog: of every leaf.
    """

    def __init__(self, weights: Mapping[Node, int]) -> None:
        self._weights = dict(weights)
        self._children: defaultdict[Node, list[Node]] = defaultdict(list)
        for node in weights:
            self._children[node[:-1]].append(node)
        leaves = [node for node in weights if node not in self._children]
        if len(leaves) > MAX_LEAVES:
            raise TooLargeError(f"{len(leaves)} leaves; exact numbers are for {MAX_LEAVES}")
        self.served: dict[Node, Fraction] = {node: Fraction(0) for node in weights}
        self.backlog: dict[Node, Fraction] = {leaf: Fraction(0) for leaf in leaves}
        self._num_events = 0

    def arrive(self, leaf: Node, work: int | Fraction) -> None:
        self._count()
        self.backlog[leaf] += work

    def serve(self, amount: int | Fraction) -> None:
        """So much work is done, or all there is if that is less."""
        self._count()
        left = Fraction(amount)
        while left > 0:
            rates = dict(self._rates((), Fraction(1)))
            if not rates:
                return
            done = min(left, *(self.backlog[leaf] / rate for leaf, rate in rates.items()))
            for leaf, rate in rates.items():
                self.backlog[leaf] -= rate * done
                for depth in range(1, len(leaf) + 1):
                    self.served[leaf[:depth]] += rate * done
            left -= done

    def _rates(self, node: Node, rate: Fraction) -> Iterator[tuple[Node, Fraction]]:
        """The leaves with work below a node that is served at this rate."""
        if node in self.backlog:
            yield node, rate
            return
        active = [child for child in self._children[node] if self._has_work(child)]
        total = sum(self._weights[child] for child in active)
        for child in active:
            yield from self._rates(child, rate * self._weights[child] / total)

    def _has_work(self, node: Node) -> bool:
        if node in self.backlog:
            return self.backlog[node] > 0
        return any(self._has_work(child) for child in self._children[node])

    def _count(self) -> None:
        self._num_events += 1
        if self._num_events > MAX_EVENTS:
            raise TooLargeError(f"more than {MAX_EVENTS} events; exact numbers are not for that")


@dataclass(frozen=True, slots=True)
class Lag:
    """The most that a node was behind the ideal: microseconds of service, rounded up; whose, and when."""

    lag_us: int = 0
    node: Node | None = None
    at_us: int = 0


def largest_lag(run: Run) -> Lag:
    """Raises `TooLargeError`. Requests are taken to want what they were charged in the end, all of it at their arrival;
    those that did not end, what they would be charged."""
    fluid = Fluid(run.workload.weights())
    work_us = work_by_arrival(run)
    due = sorted((trace.submitted_us, arrival_id) for arrival_id, trace in run.requests.items())
    paths = {arrival_id: tuple(nodes_of(trace.arrival.path)) for arrival_id, trace in run.requests.items()}
    served: defaultdict[Node, int] = defaultdict(int)
    largest = Lag()
    next_due = 0
    for step in run.steps:
        while next_due < len(due) and due[next_due][0] <= step.start_us:
            arrival_id = due[next_due][1]
            fluid.arrive(paths[arrival_id][-1][0], work_us[arrival_id])
            next_due += 1
        fluid.serve(step.useful_us)
        for charge in step.charges:
            for node, _ in paths.get(charge.id, ()):
                served[node] += charge.useful_us
        for node, ideal in fluid.served.items():
            lag_us = -((served[node] - ideal) // 1)
            if lag_us > largest.lag_us:
                largest = Lag(lag_us, node, step.end_us)
    return largest


def work_by_arrival(run: Run) -> dict[int, int]:
    """What each request is charged in the end: known for those that ended, reckoned for the others."""
    charged: defaultdict[int, int] = defaultdict(int)
    for step in run.steps:
        for charge in step.charges:
            charged[charge.id] += charge.useful_us
    return {
        arrival_id: charged[arrival_id]
        if trace.ended_us is not None
        else max(charged[arrival_id], trace.arrival.work_us(run.cost))
        for arrival_id, trace in run.requests.items()
    }
