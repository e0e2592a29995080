"""Days to try fair share on: what happens before each step, over random trees; drawn by hypothesis, played as drawn.

A day is data, so the same one can be played with other weights, other names, another policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from fair_harness import COST, FairHarness
from hypothesis import Phase
from hypothesis import strategies as st

from engine.messages import PathNode, RequestClass
from engine.sched.cost import CostModel
from engine.sched.fair.parameters import FairParameters
from engine.sched.fair.policy import FairShare
from engine.sched.policy import Policy

CLASSES: tuple[RequestClass, ...] = ("interactive", "standard", "batch")
SEARCH_ONLY = (Phase.explicit, Phase.reuse, Phase.generate)
"""Phases of hypothesis: a day is played in up to a second, so making it smaller would take longer than a test may."""
LONGEST = 4000
"""Tokens of the longest prompt in a day."""

TreePath = tuple[int, ...]


@dataclass(frozen=True)
class Arrive:
    """num requests alike but for their lengths, which are jittered. A cap of 0 is none."""

    path: TreePath
    request_class: RequestClass
    num_tokens: int
    output: int
    num: int = 1
    cap: int = 0


@dataclass(frozen=True)
class Abort:
    """Of the requests so far (modulo)."""

    number: int


@dataclass(frozen=True)
class Reweigh:
    path: TreePath
    weight: int


@dataclass(frozen=True)
class External:
    path: TreePath
    cost_us: int


@dataclass(frozen=True)
class RaiseCap:
    """Of the requests so far (modulo)."""

    number: int
    more: int


Event = Arrive | Abort | Reweigh | External | RaiseCap


@dataclass(frozen=True)
class Day:
    """
    Attributes:
        weights: a node's weight is one of them, by its place in the tree.
        steps: what happens before each step.
        num_quiet_steps: after those.
    """

    weights: tuple[int, ...]
    steps: tuple[tuple[Event, ...], ...]
    num_quiet_steps: int
    max_sequences: int = 16
    max_step_tokens: int = 100_000
    num_blocks: int = 100_000
    window_steps: int = 4
    lag_steps: int = 16

    @property
    def parameters(self) -> FairParameters:
        return FairParameters(window_steps=self.window_steps, lag_steps=self.lag_steps)


class Player:
    """A day in progress.

    Args:
        scale: of all weights.
        rename: of all nodes.
    """

    def __init__(
        self,
        day: Day,
        make_policy: Callable[..., Policy] = FairShare,
        *,
        scale: int = 1,
        rename: Callable[[str], str] = lambda name: name,
        plan_ahead: bool = False,
        cost: CostModel = COST,
    ) -> None:
        self.harness = FairHarness(
            max_sequences=day.max_sequences,
            max_step_tokens=day.max_step_tokens,
            num_blocks=day.num_blocks,
            parameters=day.parameters,
            plan_ahead=plan_ahead,
            cost=cost,
            make_policy=make_policy,
        )
        self._day = day
        self._scale = scale
        self._rename = rename
        self._weights: dict[TreePath, int] = {}

    def play(self, look: Callable[[FairHarness], None] = lambda _: None) -> FairHarness:
        """
        Args:
            look: called after every step.
        """
        for events in (*self._day.steps, *[()] * self._day.num_quiet_steps):
            for event in events:
                self.happen(event)
            self.harness.step()
            look(self.harness)
        return self.harness

    def happen(self, event: Event) -> None:
        harness = self.harness
        match event:
            case Arrive():
                for i in range(event.num):
                    harness.submit(
                        self.path(event.path),
                        event.num_tokens + 13 * i % 97,
                        event.output + 7 * i % 11,
                        request_class=event.request_class,
                        cap=event.cap or None,
                    )
            case Abort():
                if harness.seen:
                    harness.abort(f"r{event.number % len(harness.seen)}")
            case Reweigh():
                self._weights[event.path] = event.weight
                harness.set_weight(self._name(event.path), event.weight * self._scale)
            case External():
                harness.policy.charge_external(self._name(event.path), event.cost_us)
            case RaiseCap():
                if harness.seen:
                    harness.raise_cap(f"r{event.number % len(harness.seen)}", event.more)
            case unknown:
                assert_never(unknown)

    def path(self, path: TreePath) -> tuple[PathNode, ...]:
        places = [path[: i + 1] for i in range(len(path))]
        return tuple(PathNode(self._name(place), self._weight(place)) for place in places)

    def _name(self, path: TreePath) -> str:
        return self._rename("/".join(map(str, path)))

    def _weight(self, path: TreePath) -> int:
        weights = self._day.weights
        return self._weights.get(path, weights[(31 * sum(path) + 7 * len(path)) % len(weights)]) * self._scale


def play(day: Day, make_policy: Callable[..., Policy] = FairShare, **how: object) -> FairHarness:
    return Player(day, make_policy, **how).play()


@st.composite
def tree_paths(draw: st.DrawFn, deepest: int = 5) -> TreePath:
    """Two organizations of up to four teams of two keys; sessions below some, and some paths that end early."""
    depth = draw(st.sampled_from([3, 3, 3, 3, 4, 1, 2, 5]))
    return tuple(draw(st.integers(0, most)) for most in (1, 3, 1, 2, 1)[: min(depth, deepest)])


def arrivals(*, capped: bool = False, most: int = 40) -> st.SearchStrategy[Arrive]:
    return st.builds(
        Arrive,
        path=tree_paths(),
        request_class=st.sampled_from(CLASSES),
        num_tokens=st.sampled_from([5, 40, 200, 1000, LONGEST - 100]),
        output=st.sampled_from([1, 8, 60, 300]),
        num=st.sampled_from([1, 1, 1, min(6, most), most]),
        cap=st.sampled_from([0, 0, 2]) if capped else st.just(0),
    )


aborts = st.builds(Abort, number=st.integers(0, 40))
raises = st.builds(RaiseCap, number=st.integers(0, 40), more=st.integers(1, 40))
WEIGHTS = (1, 2, 3, 5, 7, 10, 32, 259, 1000)
reweighs = st.builds(Reweigh, path=tree_paths(), weight=st.sampled_from(WEIGHTS))
externals = st.builds(External, path=tree_paths(3), cost_us=st.integers(0, 1_000_000))
"""The last three only change something where they fall on a node that is there."""


def days(
    *events: st.SearchStrategy[Event],
    weights: tuple[int, ...] = WEIGHTS,
    num_blocks: tuple[int, ...] = (100_000,),
    max_step_tokens: tuple[int, ...] = (100_000,),
    quiet: int = 300,
) -> st.SearchStrategy[Day]:
    """Arrivals, and events of the other kinds among them."""
    event = st.one_of(arrivals(), arrivals(), *events)
    return st.builds(
        Day,
        weights=st.lists(st.sampled_from(weights), min_size=1, max_size=5).map(tuple),
        steps=st.lists(st.lists(event, max_size=3).map(tuple), min_size=1, max_size=25).map(tuple),
        num_quiet_steps=st.integers(0, quiet),
        max_sequences=st.sampled_from([1, 3, 8, 24]),
        max_step_tokens=st.sampled_from(max_step_tokens),
        num_blocks=st.sampled_from(num_blocks),
        window_steps=st.sampled_from([4, 1, 2]),
        lag_steps=st.sampled_from([16, 2, 1]),
    )


def of_depth(day: Day, depth: int) -> Day:
    """The same with all paths of arrivals and weights made so long, so that no sibling lacks a name and a weight."""
    return _with_paths(day, lambda path: (*path, *[0] * depth)[:depth])


def with_usual_weights(day: Day) -> Day:
    """The same with weights of 8 and less."""
    steps = tuple(
        tuple(replace(e, weight=1 + e.weight % 8) if isinstance(e, Reweigh) else e for e in events)
        for events in day.steps
    )
    return replace(day, weights=tuple(1 + weight % 8 for weight in day.weights), steps=steps)


def in_one_organization(day: Day) -> Day:
    """The same with one organization alone, of weight 1."""
    weights = list(day.weights)
    weights[7 % len(weights)] = 1
    moved = _with_paths(day, lambda path: (0, *path[1:]))
    steps = tuple(
        tuple(e for e in events if not (isinstance(e, Reweigh) and len(e.path) == 1)) for events in moved.steps
    )
    return replace(moved, weights=tuple(weights), steps=steps)


def _with_paths(day: Day, change: Callable[[TreePath], TreePath]) -> Day:
    steps = tuple(
        tuple(replace(e, path=change(e.path)) if isinstance(e, Arrive | Reweigh) else e for e in events)
        for events in day.steps
    )
    return replace(day, steps=steps)


contended = days(
    st.builds(
        Arrive,
        path=tree_paths(),
        request_class=st.sampled_from(CLASSES),
        num_tokens=st.just(1000),
        output=st.integers(1, 20),
        num=st.integers(1, 4),
    ),
    aborts,
    quiet=60,
)
"""So much to do that windows and weights decide in most steps."""

everything = days(
    arrivals(capped=True, most=6),
    aborts,
    raises,
    reweighs,
    externals,
    num_blocks=(100_000, 300, 700),
    max_step_tokens=(100_000, 100_000, 150),
    quiet=100,
)
"""All that can happen, pools that are too small among it."""
