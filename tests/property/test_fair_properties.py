"""Fair share over random trees, weights, arrivals and cancels, demand-limited and greedy teams beside each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from examples import examples
from fair_harness import FairHarness, NodePath, path_of
from fair_reference import slow_fair_share
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.messages import PathNode
from engine.sched.fair.parameters import FairParameters
from engine.sched.fair.policy import FairShare
from engine.sched.policy import Policy

CLASSES = ("interactive", "standard", "batch")


@dataclass(frozen=True)
class Arrival:
    org: int
    team: int
    key: int
    request_class: str
    num_tokens: int
    output: int
    num: int


@dataclass(frozen=True)
class Day:
    """What happens: before each step, arrivals and the number of a request to be aborted (taken modulo)."""

    max_sequences: int
    weights: tuple[int, ...]
    events: tuple[tuple[tuple[Arrival, ...], int | None], ...]
    num_quiet_steps: int

    def weight(self, node_id: str) -> int:
        return self.weights[sum(node_id.encode()) % len(self.weights)]


arrivals = st.builds(
    Arrival,
    org=st.integers(0, 1),
    team=st.integers(0, 3),
    key=st.integers(0, 1),
    request_class=st.sampled_from(CLASSES),
    num_tokens=st.sampled_from([5, 40, 200, 1000, 4000]),
    output=st.sampled_from([1, 8, 60]),
    num=st.sampled_from([1, 1, 1, 6]),
)
days = st.builds(
    Day,
    max_sequences=st.sampled_from([1, 3, 8, 24]),
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple),
    events=st.lists(
        st.tuples(st.lists(arrivals, max_size=3).map(tuple), st.sampled_from([None, None, None, 0, 3, 7])),
        min_size=1,
        max_size=25,
    ).map(tuple),
    num_quiet_steps=st.integers(0, 60),
)
quick = settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def play(
    day: Day,
    make_policy: Callable[..., Policy] = FairShare,
    *,
    scale: int = 1,
    look: Callable[[FairHarness], None] = lambda _: None,
) -> FairHarness:
    harness = FairHarness(max_sequences=day.max_sequences, make_policy=make_policy)
    for batch, aborted in (*day.events, *[((), None)] * day.num_quiet_steps):
        for each in batch:
            nodes = path_of(f"o{each.org}/t{each.team}/k{each.key}")
            path = tuple(PathNode(node.id, day.weight(node.id) * scale) for node in nodes)
            for _ in range(each.num):
                harness.submit(path, each.num_tokens, each.output, request_class=each.request_class)
        if aborted is not None and harness.seen:
            harness.abort(f"r{aborted % len(harness.seen)}")
        harness.step()
        look(harness)
    return harness


class Gaps:
    """The largest difference of service by weight that two siblings saw while both were backlogged without a break."""

    def __init__(self, day: Day) -> None:
        self.worst = Fraction(0)
        self._day = day
        self._ranges: dict[tuple[NodePath, NodePath], tuple[Fraction, Fraction]] = {}

    def look(self, harness: FairHarness) -> None:
        ranges: dict[tuple[NodePath, NodePath], tuple[Fraction, Fraction]] = {}
        backlogged = sorted(harness.backlogged()) if harness.steps else []
        for one, other in combinations(backlogged, 2):
            if len(one) != len(other) or one[:-1] != other[:-1]:
                continue
            weights = self._weight(one), self._weight(other)
            gap = Fraction(harness.served_us.get(one, 0), weights[0]) - Fraction(
                harness.served_us.get(other, 0), weights[1]
            )
            low, high = self._ranges.get((one, other), (gap, gap))
            low, high = min(low, gap), max(high, gap)
            ranges[one, other] = low, high
            self.worst = max(self.worst, (high - low) * min(weights))
        self._ranges = ranges

    def _weight(self, names: NodePath) -> int:
        if len(names) == 3:
            return dict(FairParameters().class_weights)[names[2]]
        return self._day.weight(names[-1])


def bound_us(harness: FairHarness) -> int:
    """2 (Λ + Θ + q + one decode), T being the largest step."""
    target_us = max(harness.step_us, default=0)
    parameters = FairParameters()
    quantum_us = target_us // parameters.quanta_per_step + harness.cost.marginal_us(4000 - 16, 4000, 4000)
    decode_us = harness.cost.marginal_us(4100, 4101, 0)
    return 2 * ((parameters.window_steps + parameters.lag_steps) * target_us + quantum_us + decode_us)


@quick
@given(day=days)
def test_backlogged_siblings_are_never_further_apart_than_the_bound(day: Day) -> None:
    gaps = Gaps(day)
    harness = play(day, look=gaps.look)

    assert gaps.worst <= bound_us(harness)


@quick
@given(day=days)
def test_the_fast_version_makes_the_plans_of_the_slow_and_obvious_one(day: Day) -> None:
    assert play(day).plan_bytes() == play(day, slow_fair_share).plan_bytes()


@quick
@given(day=days)
def test_the_same_events_lead_to_the_same_plans_and_all_weights_times_anything_too(day: Day) -> None:
    plans = play(day).plan_bytes()

    assert plans == play(day).plan_bytes()
    assert plans == play(day, scale=6).plan_bytes()


@quick
@given(day=days)
def test_no_step_is_idle_while_somebody_could_run_and_everybody_ends(day: Day) -> None:
    """A step leaves work out only when it is full by its target, or was cut short for a newcomer."""

    def look(harness: FairHarness) -> None:
        if harness.scheduler.num_runnable:
            assert harness.steps

    harness = play(day, look=look)
    harness.drain(20_000)
    harness.scheduler.check()
    assert all(seen.ended_us is not None for seen in harness.seen.values())
    assert harness.counters.num_recomputed_tokens == 0
    assert not harness.policy.tree.root.num_requests
    assert not harness.policy.tree.root.num_rows


@quick
@given(day=days)
def test_what_is_charged_on_a_path_is_the_work_done(day: Day) -> None:
    """Useful work of a request costs the same however it was sliced and parked, and is never negative."""
    harness = play(day)
    for seen in harness.seen.values():
        request = seen.request
        num_own = min(request.high_water, len(request.token_ids))
        whole_us = harness.cost.marginal_us(0, num_own, request.num_prompt_tokens)
        cached_us = harness.cost.marginal_us(0, request.num_cached_tokens, request.num_prompt_tokens)
        assert seen.served_us == whole_us - cached_us
