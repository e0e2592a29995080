"""What shares come to in the long run: by weight at every level, whoever splits himself up, whoever else is there.

A gap that is only measured while both are backlogged begins anew whenever one is not, so a rule that drifts could pass
there. Here everybody always has more to do, and all that was ever served counts.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from examples import examples
from fair_days import CLASSES, aborts, days, play
from fair_harness import FairHarness, NodePath, path_of
from fair_measures import distance_us
from fair_peers import fcfs, vtc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.messages import PathNode
from engine.sched.fair.parameters import FairParameters

quick = settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TIGHT = FairParameters(window_steps=1, lag_steps=2)
GREEDY_TOKENS = 40_000
"""Of prompts that wait from the start: more than any run below gets through in one leaf."""


def fill(harness: FairHarness, path: tuple[PathNode, ...], salt: int = 0, **how: object) -> None:
    """Prompts of jittered lengths, so that nobody runs in lockstep."""
    num_tokens = 0
    for i in range(100):
        if num_tokens >= GREEDY_TOKENS:
            return
        length = 400 + (311 * (i + salt)) % 900
        num_tokens += length
        harness.submit(path, length, 1, **how)


def worst_drift(harness: FairHarness) -> Fraction:
    """The largest difference of two siblings by weight since the beginning, as a part of what they may differ."""
    bound_us, worst = distance_us(harness), Fraction(0)
    for one, other in combinations(sorted(harness.weights), 2):
        if len(one) != len(other) or one[:-1] != other[:-1]:
            continue
        v = [Fraction(harness.served_us[node], harness.weights[node]) for node in (one, other)]
        allowed = sum(Fraction(bound_us, harness.weights[node]) for node in (one, other))
        worst = max(worst, abs(v[0] - v[1]) / allowed)
    return worst


def drift_of(places: list[tuple[int, int, int, str]], weights: dict[NodePath, int], **how: object) -> Fraction:
    """Everybody arrives at once and is greedy."""
    harness = FairHarness(parameters=TIGHT, max_sequences=64, **how)
    for i, (org, team, key, request_class) in enumerate(places):
        names = [(f"o{org}",), (f"o{org}", f"t{team}"), (f"o{org}", f"t{team}", f"k{key}")]
        path = tuple(PathNode("/".join(name), weights[name]) for name in names)
        fill(harness, path, i, request_class=request_class)
    worst = Fraction(0)
    for _ in range(200):
        harness.step()
        worst = max(worst, worst_drift(harness))
    return worst


places = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 1), st.sampled_from(CLASSES)),
    min_size=2,
    max_size=7,
    unique=True,
)


class Weights(dict[NodePath, int]):
    """Of every node, by its names; from a few that are dealt out in turn."""

    def __init__(self, some: list[int]) -> None:
        super().__init__()
        self._some = some

    def __missing__(self, names: NodePath) -> int:
        self[names] = self._some[len(self) % len(self._some)]
        return self[names]


@quick
@given(places=places, weights=st.lists(st.sampled_from([1, 2, 3, 5, 8, 31, 1000]), min_size=1, max_size=6))
def test_all_that_was_ever_served_is_by_weight_at_every_level(
    places: list[tuple[int, int, int, str]], weights: list[int]
) -> None:
    """Organizations, teams, classes and keys, each within the bound; it does not grow with time."""
    assert drift_of(places, Weights(weights)) <= 1


@pytest.mark.parametrize("level", [0, 1, 2, 3], ids=["organizations", "teams", "keys", "sessions"])
def test_three_to_one_is_three_to_one_at_every_level(level: int) -> None:
    harness = FairHarness(parameters=TIGHT)
    for name, weight in (("red", 3), ("blue", 1)):
        weights = [1] * level + [weight]
        fill(harness, path_of("/".join([*"otk"[:level], name, *"123"[level:]]), *weights), weight)
    for _ in range(150):
        harness.step()
        assert worst_drift(harness) <= 1
    served = sorted(us for names, us in harness.served_us.items() if names[-1].rpartition("/")[2] in ("red", "blue"))
    red, blue = served[-1], served[0]

    assert red / (red + blue) == pytest.approx(0.75, abs=0.02)


def test_fcfs_and_vtc_miss_the_shares_that_fair_share_keeps() -> None:
    """VTC knows teams, and neither organizations nor keys."""
    of_teams = [(0, 0, 0, "interactive"), (0, 1, 0, "interactive")]
    of_keys = [(0, 0, 0, "interactive"), (0, 0, 1, "interactive")]
    weights = Weights([1, 3, 1])
    assert drift_of(of_teams, weights) <= 1
    assert drift_of(of_teams, weights, make_policy=fcfs) > 1
    assert drift_of(of_keys, Weights([1, 1, 3, 1])) <= 1
    assert drift_of(of_keys, Weights([1, 1, 3, 1]), make_policy=vtc) > 1


def served_of_split(num_parts: int, kind: str, weight: int, num_tokens: int, **how: object) -> Fraction:
    """Part of all service that a team gets beside an honest one, with its work in so many keys or sessions."""
    harness = FairHarness(parameters=TIGHT, **how)
    fill(harness, path_of("o/honest/k", 1, 2))
    for i in range(GREEDY_TOKENS // num_tokens):
        part = i % num_parts
        path = f"o/split/k{part}" if kind == "keys" else f"o/split/k/s{part}"
        harness.submit(path_of(path, 1, weight), num_tokens + 17 * i % 31, 1)
    for i in range(150):
        # New ones all the time, so that there is always a place where nobody waits.
        part = f"more{i}" if num_parts > 1 else "0"
        path = f"o/split/k{part}" if kind == "keys" else f"o/split/k/s{part}"
        harness.submit(path_of(path, 1, weight), 20, 1)
        harness.step()
    bound_us = distance_us(harness)
    entitled = Fraction(weight, weight + 2) * harness.served_us["o",]
    assert harness.served_us["o", "o/split"] <= entitled + 2 * bound_us
    return Fraction(harness.served_us["o", "o/split"], harness.served_us["o",])


@quick
@given(
    num_parts=st.integers(2, 40),
    kind=st.sampled_from(["keys", "sessions"]),
    weight=st.integers(1, 6),
    num_tokens=st.sampled_from([100, 600, 2000]),
)
def test_splitting_a_team_does_not_raise_its_share(num_parts: int, kind: str, weight: int, num_tokens: int) -> None:
    split = served_of_split(num_parts, kind, weight, num_tokens)
    whole = served_of_split(1, kind, weight, num_tokens)

    assert split <= whole + Fraction(3, 100)


@quick
@given(day=days(aborts, quiet=20), weights=st.tuples(st.integers(1, 1000), st.integers(1, 1000)))
def test_a_lone_team_gets_every_row_and_the_whole_step_whoever_was_there_before(
    day: object, weights: tuple[int, int]
) -> None:
    harness = play(day)
    for request_id in list(harness.live):
        harness.abort(request_id)
    harness.now_us += harness.parameters.linger_us
    first = len(harness.seen)
    for i in range(30):
        harness.submit(path_of("0/0/k", *weights), 300 + i, 40)
    while len(harness.seen) - first > 2 * harness.max_sequences and not harness.left.num_free_rows:
        harness.step()
        waiting = len(harness.left.waiting)
        if waiting < 3:
            break
        assert harness.num_rows()[()] in (harness.max_sequences, harness.max_sequences - harness.left.num_free_rows)
        if harness.left.residents:
            assert harness.step_us[-1] >= harness.targets_us[-1] - 1000


@quick
@given(
    day=days(aborts, quiet=150, weights=(1, 2, 3, 5, 8)),
    lighter=st.integers(1, 8),
    heavier=st.integers(1, 8),
)
def test_a_higher_weight_never_gets_less(day: object, lighter: int, heavier: int) -> None:
    """Of the same greedy crowd, beyond the bound; the weight of the first team is what differs."""
    lighter, heavier = sorted((lighter, heavier))

    def served(weight: int) -> tuple[int, int]:
        harness = FairHarness(parameters=TIGHT)
        for i, (team, own) in enumerate((("one", weight), ("two", 3), ("three", 1))):
            fill(harness, path_of(f"o/{team}/k", 1, own), i)
        harness.run(120)
        return harness.served_us["o", "o/one"], distance_us(harness)

    (less, bound_us), (more, _) = served(lighter), served(heavier)
    assert more >= less - 2 * bound_us
    if heavier > lighter:
        assert more > less
