"""What shares come to in the long run: by weight at every level, whoever splits himself up, whoever else is there.

A gap that is only measured while both are backlogged begins anew whenever one is not, so a rule that drifts could pass
there. Here everybody always has more to do, and all that was ever served counts.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from examples import examples
from fair_days import CLASSES, SEARCH_ONLY, Day, aborts, days, play
from fair_harness import FairHarness, path_of
from fair_measures import KEY_LEVELS, distance_us
from fair_peers import fcfs, vtc
from fair_witness import NodePath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.messages import PathNode
from engine.sched.fair.parameters import FairParameters

quick = settings(
    max_examples=examples(6),
    deadline=None,
    phases=SEARCH_ONLY,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TIGHT = FairParameters(window_steps=1, lag_steps=2)
GREEDY_TOKENS = 36_000
"""Of prompts that wait from the start: more than any run below gets through."""


def fill(harness: FairHarness, path: tuple[PathNode, ...], salt: int = 0, num: int = 40, **how: object) -> None:
    """So many prompts of jittered lengths, so that nobody runs in lockstep."""
    mean = GREEDY_TOKENS // num
    for i in range(num):
        harness.submit(path, mean + (311 * (i + salt)) % mean - mean // 2, 1, **how)


def worst_drift(harness: FairHarness, start: Counter[NodePath] | None = None) -> Fraction:
    """The largest difference of two siblings by weight since then, as a part of what they may differ."""
    bound_us, worst = distance_us(harness), Fraction(0)
    served = harness.served_us - (start or Counter())
    for one, other in combinations(sorted(harness.weights), 2):
        if len(one) > KEY_LEVELS or one[:-1] != other[:-1]:
            continue
        v = [Fraction(served[node], harness.weights[node]) for node in (one, other)]
        allowed = sum(Fraction(bound_us, harness.weights[node]) for node in (one, other))
        worst = max(worst, abs(v[0] - v[1]) / allowed)
    return worst


def drift_of(places: list[tuple[int, int, int, str]], weights: dict[NodePath, int], **how: object) -> Fraction:
    """Everybody has one prompt without an end and a slot; counted from when all have begun."""
    harness = FairHarness(parameters=TIGHT, max_sequences=64, **how)
    for i, (org, team, key, request_class) in enumerate(places):
        names = [(f"o{org}",), (f"o{org}", f"t{team}"), (f"o{org}", f"t{team}", f"k{key}")]
        path = tuple(PathNode("/".join(name), weights[name]) for name in names)
        fill(harness, path, i, num=1, request_class=request_class)
    harness.run(20)
    start, worst = harness.served_us.copy(), Fraction(0)
    while harness.charged_us < 7_000_000:  # nobody has had all he wants by then
        harness.step()
        worst = max(worst, worst_drift(harness, start))
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


@pytest.mark.parametrize("level", [0, 1, 2], ids=["organizations", "teams", "keys"])
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


@pytest.mark.parametrize("num_tokens", [300, 900, 3000])
@pytest.mark.parametrize("weight", [2, 8, 20])
def test_a_heavy_team_keeps_its_share_from_one_prompt_to_the_next(weight: int, num_tokens: int) -> None:
    """Its next prompt finds a free row: what it waits for is its turn in the step."""
    harness = FairHarness()
    for team, own in (("heavy", weight), ("light", 1)):
        for i in range(120_000 // num_tokens):
            harness.submit(path_of(f"o/{team}/k", 1, own), num_tokens // 2 + (311 * i) % num_tokens, 1)
    harness.run(100)  # until the light one has paid for having been new
    start = harness.served_us.copy()
    harness.run(350)

    got = harness.served_us - start
    light = Fraction(got["o", "o/light"], got["o",])
    assert light * (weight + 1) <= Fraction(115, 100)


def test_fcfs_and_vtc_miss_the_shares_that_fair_share_keeps() -> None:
    """VTC knows teams, and neither organizations nor keys."""
    of_teams = [(0, 0, 0, "interactive"), (0, 1, 0, "interactive")]
    of_keys = [(0, 0, 0, "interactive"), (0, 0, 1, "interactive")]
    weights = Weights([1, 3, 1])
    assert drift_of(of_teams, weights) <= 1
    assert drift_of(of_teams, weights, make_policy=fcfs) > 1
    assert drift_of(of_keys, Weights([1, 1, 3, 1])) <= 1
    assert drift_of(of_keys, Weights([1, 1, 3, 1]), make_policy=vtc) > 1


def served_of_split(num_parts: int, kind: str, weight: int, num_tokens: int) -> Fraction:
    """Part of all service that a team gets beside an honest one, with its work in so many keys or sessions."""
    harness = FairHarness(parameters=TIGHT)
    fill(harness, path_of("o/honest/k", 1, 2), num=1)
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
    day: Day, weights: tuple[int, int]
) -> None:
    harness = play(day)
    for request_id in list(harness.live):
        harness.abort(request_id)
    prompt = harness.submit(path_of("0/0/k", *weights), 2000, 1)
    while not harness.seen[prompt].token_us:
        harness.step()
        assert harness.step_us[-1] > harness.targets_us[-1] - 400 or harness.seen[prompt].token_us
    for _ in range(2 * harness.max_sequences):
        harness.submit(path_of("0/0/k", *weights), 20, 300)
    harness.run(harness.max_sequences)

    assert harness.num_rows()[()] == harness.max_sequences
    before = harness.served_us["0", "0/0"]
    harness.run(50)
    decode_us = harness.cost.marginal_us(20, 21, 20)
    assert harness.served_us["0", "0/0"] - before >= 50 * harness.max_sequences * decode_us


@quick
@given(
    weights=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    heavier=st.integers(2, 20),
    demands=st.lists(st.sampled_from([1, 4, 40]), min_size=5, max_size=5),
)
def test_a_higher_weight_never_gets_less(weights: list[int], heavier: int, demands: list[int]) -> None:
    """Beyond the bound, at any time, with greedy others and such as soon have had all they want."""

    def served(own: int) -> tuple[list[int], int]:
        harness = FairHarness(parameters=TIGHT)
        for i, weight in enumerate([own, *weights[1:]]):
            fill(harness, path_of(f"o/t{i}/k", 1, weight), i, num=1 if not i else demands[i])
        got = []
        for _ in range(100):
            harness.step()
            got.append(harness.served_us["o", "o/t0"])
        return got, distance_us(harness)

    (less, bound_us), (more, _) = served(weights[0]), served(weights[0] * heavier)
    assert all(high >= low - 2 * bound_us for low, high in zip(less, more, strict=True))


@pytest.mark.parametrize(("lighter", "heavier"), [(1, 2), (2, 3), (3, 8), (1, 1000)])
def test_of_a_greedy_crowd_a_higher_weight_gets_more(lighter: int, heavier: int) -> None:
    def served(weight: int) -> int:
        harness = FairHarness(parameters=TIGHT)
        for i, (team, own) in enumerate((("one", weight), ("two", 3), ("three", 1))):
            fill(harness, path_of(f"o/{team}/k", 1, own), i)
        harness.run(120)
        return harness.served_us["o", "o/one"]

    assert served(heavier) > 1.15 * served(lighter)
