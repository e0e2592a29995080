"""The figures of one run, each taken from its trace alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from engine.messages import RequestClass
from engine.sim.fluid import work_by_arrival
from engine.sim.trace import RequestTrace, Run
from engine.sim.workload import TEAM_DEPTH, nodes_of

Node = tuple[str, ...]
_SPAN_US = 1_000_000
"""Ideal shares are reckoned for one such span after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Of one team, in microseconds; None where nothing was measured."""

    ttft_p50_us: int | None
    ttft_p99_us: int | None
    inter_token_p50_us: int | None
    inter_token_p99_us: int | None


@dataclass(frozen=True, slots=True)
class Share:
    """What a team was given and what it was entitled to, in microseconds of service in the measured time."""

    served_us: int
    entitled_us: int

    @property
    def ratio(self) -> float:
        """Served over entitled; 1.0 if it wanted nothing and got nothing."""
        return self.served_us / self.entitled_us if self.entitled_us else 1.0


def percentile(values: Iterable[int], percent: int) -> int | None:
    """The smallest value that at least so many in a hundred do not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)] if ordered else None


def jain_index(values: Sequence[float]) -> float:
    """1.0 if all are equal, one over their number if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def latency(run: Run, team: str) -> Latency:
    """Of requests that came in the measured time. Those that had no first token when the run was cut off count with the
    time they had waited."""
    since_us = run.workload.measure_from_us
    traces = [
        trace
        for trace in run.requests.values()
        if trace.arrival.team == team and trace.refused is None and trace.arrived_us >= since_us
    ]
    waits = [wait for trace in traces if (wait := _wait_us(trace, run.ended_us)) is not None]
    gaps = [b - a for trace in traces for a, b in pairwise(trace.token_us)]
    return Latency(
        ttft_p50_us=percentile(waits, 50),
        ttft_p99_us=percentile(waits, 99),
        inter_token_p50_us=percentile(gaps, 50),
        inter_token_p99_us=percentile(gaps, 99),
    )


def shares(run: Run) -> dict[str, Share]:
    """By team. Entitled is what ideal sharing would have given it of what the engine served, second by second: the
    max-min share by weight at each level of the tree among those that had work left in the ideal. Nobody gets more than
    it wants, what it does not want goes to its siblings, and who comes later has no claim to what went before."""
    teams = {arrival_id: _team_node(trace) for arrival_id, trace in run.requests.items()}
    weights = run.workload.weights()
    spans = _spans(run, teams)
    pending: defaultdict[Node, int] = defaultdict(int)
    served: dict[Node, int] = dict.fromkeys(teams.values(), 0)
    entitled = dict(served)
    for number in sorted(spans):
        span = spans[number]
        for node, work_us in span.arrived.items():
            pending[node] += work_us
        capacity = sum(span.served.values())
        demands = {
            node: capacity if node[-1] in run.workload.greedy else left for node, left in pending.items() if left > 0
        }
        for node, given in entitlements(weights, demands, capacity).items():
            if node[-1] not in run.workload.greedy:
                pending[node] -= int(given)
            entitled[node] += int(given) if number >= 0 else 0
        for node, served_us in span.served.items():
            served[node] += served_us if number >= 0 else 0
    return {node[-1]: Share(served[node], entitled[node]) for node in served}


@dataclass(slots=True)
class _Span:
    """What arrived and what was served in a second, by team."""

    arrived: defaultdict[Node, int] = field(default_factory=lambda: defaultdict(int))
    served: defaultdict[Node, int] = field(default_factory=lambda: defaultdict(int))


def _spans(run: Run, teams: Mapping[int, Node]) -> dict[int, _Span]:
    """By number; 0 begins where it is measured from."""
    since_us = run.workload.measure_from_us
    spans: defaultdict[int, _Span] = defaultdict(_Span)
    for arrival_id, work_us in work_by_arrival(run).items():
        spans[(run.requests[arrival_id].submitted_us - since_us) // _SPAN_US].arrived[teams[arrival_id]] += work_us
    for step in run.steps:
        served = spans[(step.start_us - since_us) // _SPAN_US].served
        for charge in step.charges:
            if charge.id in teams:
                served[teams[charge.id]] += charge.useful_us
    return spans


def served_by_class(run: Run) -> dict[RequestClass, int]:
    """Microseconds of service in the measured time, of the classes that arrived."""
    classes = {arrival_id: trace.arrival.request_class for arrival_id, trace in run.requests.items()}
    served: dict[RequestClass, int] = dict.fromkeys(classes.values(), 0)
    for step in run.steps:
        if step.start_us >= run.workload.measure_from_us:
            for charge in step.charges:
                if charge.id in classes:
                    served[classes[charge.id]] += charge.useful_us
    return served


def entitlements(weights: Mapping[Node, int], demands: Mapping[Node, int], capacity: int) -> dict[Node, Fraction]:
    """Hierarchical max-min by weight, exactly.

    Args:
        weights: at least of the nodes that have demands and of all above them.
        demands: of the nodes that capacity is divided among in the end.
    """
    totals: defaultdict[Node, int] = defaultdict(int)
    children: defaultdict[Node, set[Node]] = defaultdict(set)
    for leaf, demand in demands.items():
        for depth in range(len(leaf)):
            totals[leaf[:depth]] += demand
            children[leaf[:depth]].add(leaf[: depth + 1])
        totals[leaf] += demand
    given: dict[Node, Fraction] = {(): Fraction(capacity)}
    open_nodes: list[Node] = [()]
    while open_nodes:
        node = open_nodes.pop()
        below = sorted(children[node]) if node in children else []
        given.update(_fill(given[node], {child: (weights[child], totals[child]) for child in below}))
        open_nodes.extend(below)
    return {leaf: given[leaf] for leaf in demands}


def _fill(capacity: Fraction, claims: Mapping[Node, tuple[int, int]]) -> dict[Node, Fraction]:
    """Max-min over (weight, demand)."""
    given: dict[Node, Fraction] = {}
    left, weight_left = capacity, sum(weight for weight, _ in claims.values())
    for node, (weight, demand) in sorted(claims.items(), key=lambda item: (Fraction(item[1][1], item[1][0]), item[0])):
        given[node] = min(Fraction(demand), left * weight / weight_left)
        left -= given[node]
        weight_left -= weight
    return given


def throughput(run: Run) -> float:
    """Work done per time in the measured part: microseconds of marginal cost per microsecond, with what the prefix
    cache saved counted as done. Above what the fixed part of a step leaves only if the cache helps."""
    since_us = run.workload.measure_from_us
    useful_us = sum(step.useful_us for step in run.steps if step.start_us >= since_us)
    saved_us = sum(
        run.cost.marginal_us(0, trace.num_cached_tokens, trace.arrival.num_prompt_tokens)
        for trace in run.requests.values()
        if trace.token_us and trace.token_us[0] >= since_us
    )
    return (useful_us + saved_us) / max(1, run.ended_us - since_us)


def hit_rate(run: Run) -> float:
    """Prompt tokens found in the prefix cache, of all prompt tokens of requests that came to their first token."""
    started = [trace for trace in run.requests.values() if trace.token_us]
    num_prompt = sum(trace.arrival.num_prompt_tokens for trace in started)
    return sum(trace.num_cached_tokens for trace in started) / num_prompt if num_prompt else 0.0


def longest_held_us(run: Run) -> int:
    """The most that a request spent parked or preempted, all its times together."""
    return max((trace.held_us for trace in run.requests.values()), default=0)


def num_refused(run: Run) -> int:
    return sum(trace.refused is not None for trace in run.requests.values())


def step_us(run: Run, percent: int) -> int:
    """A percentile of the time of a step."""
    return percentile((step.end_us - step.start_us for step in run.steps), percent) or 0


def _wait_us(trace: RequestTrace, now_us: int) -> int | None:
    if trace.token_us or trace.ended_us is not None:
        return trace.ttft_us
    return now_us - trace.arrived_us


def _team_node(trace: RequestTrace) -> Node:
    return [node for node, _ in nodes_of(trace.arrival.path)][TEAM_DEPTH - 1]
