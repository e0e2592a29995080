"""How far apart siblings get that both always want more: the figure that a fair order bounds.

Two children of one node are compared while both are backlogged without a break, that is while after every step each
has resident work that got less than it wanted. In that time the difference of their services, each divided by its
weight, may only move within a bound. Siblings are compared at every node above the key: organizations, the teams of
one, and the keys of one team's class. (What classes get of their team is set by the policy, not by a path.)

Whole numbers throughout: service a times weight b less service b times weight a.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from engine.sim.trace import Run
from engine.sim.workload import Arrival, nodes_of

Node = tuple[str, ...]
_KEY_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest gap of a run.

    Attributes:
        gap_us: service of the one with the smaller weight, in microseconds, rounded up.
        pair: whose it was; None if no two siblings were ever backlogged together.
        at_us: the end of the step in which it became so large.
    """

    gap_us: int = 0
    pair: tuple[Node, Node] | None = None
    at_us: int = 0


def compared_nodes(arrival: Arrival) -> Iterator[tuple[Node, int]]:
    """The nodes of an arrival that are compared with their siblings, with their weights."""
    for node, weight in nodes_of(arrival.path):
        if len(node) == _KEY_DEPTH:
            yield (*node[:-1], arrival.request_class, node[-1]), weight
        elif len(node) < _KEY_DEPTH:
            yield node, weight


def largest_gap(run: Run) -> Gap:
    places = {arrival.id: tuple(compared_nodes(arrival)) for arrival in run.workload.arrivals}
    weights = {node: weight for nodes in places.values() for node, weight in nodes}
    served: defaultdict[Node, int] = defaultdict(int)
    ranges: dict[tuple[Node, Node], tuple[int, int]] = {}
    largest = Gap()
    for step in run.steps:
        for charge in step.charges:
            for node, _ in places.get(charge.id, ()):
                served[node] += charge.useful_us
        still: dict[tuple[Node, Node], tuple[int, int]] = {}
        for pair in _siblings({node for arrival_id in step.backlog for node, _ in places[arrival_id]}):
            a, b = pair
            difference = served[a] * weights[b] - served[b] * weights[a]
            low, high = ranges.get(pair, (difference, difference))
            still[pair] = low, high = min(low, difference), max(high, difference)
            gap_us = -((low - high) // max(weights[a], weights[b]))
            if gap_us > largest.gap_us:
                largest = Gap(gap_us, pair, step.end_us)
        ranges = still
    return largest


def _siblings(nodes: Iterable[Node]) -> Iterator[tuple[Node, Node]]:
    children: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in sorted(nodes):
        children[node[:-1]].append(node)
    for siblings in children.values():
        yield from combinations(siblings, 2)
