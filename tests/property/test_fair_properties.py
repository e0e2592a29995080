"""Fair share over random trees, weights, arrivals and cancels: how far apart siblings get, and the same plans again.

What the ledgers hold is in `test_fair_ledgers.py`, who goes on when in `test_fair_progress.py`, what shares come to in
`test_fair_shares.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from examples import examples
from fair_days import (
    SEARCH_ONLY,
    Day,
    Player,
    aborts,
    contended,
    days,
    everything,
    of_depth,
    play,
    reweighs,
    with_usual_weights,
)
from fair_harness import COST, FairHarness
from fair_measures import Gaps
from fair_reference import slow_fair_share
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.sched.fair.policy import FairShare
from engine.sched.policy import Policy


def quick(num: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=examples(num),
        deadline=None,
        phases=SEARCH_ONLY,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


factors = st.integers(2, 4)


def gaps_of(day: Day, make_policy: Callable[..., Policy] = FairShare) -> Gaps:
    gaps = Gaps()
    Player(day, make_policy).play(gaps.look)
    return gaps


@quick(50)
@given(day=st.one_of(days(aborts), days(aborts, reweighs)))
def test_backlogged_siblings_are_never_further_apart_than_the_bound(day: Day) -> None:
    """At every node above the key: organizations, teams, classes, keys."""
    assert not gaps_of(day).breaches


def test_who_paused_with_a_lag_and_returns_when_all_others_go_is_within_the_bound() -> None:
    """The one day on which a lag of Θ and a lead of Λ + Θ come together: b is paused at its caps and lags, c reads, a
    has decodes beyond the window; then c and the decodes go, and all of b wakes."""
    harness = FairHarness(max_sequences=300, cost=replace(COST, prefill_context_ps=0, decode_context_ps=0))
    gaps = Gaps()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            harness.step()
            gaps.look(harness)

    paused = [harness.submit("o/b/k", 5, 100_000, cap=2) for _ in range(120)]
    run(30)
    leading = [harness.submit("o/a/k", 5, 100_000) for _ in range(100)]
    run(40)
    harness.submit("o/a/k", 60_000, 1)
    run(10)
    reader = harness.submit("o/c/k", 60_000, 1)
    run(200)
    for request_id in (reader, *leading):
        harness.abort(request_id)
    for request_id in paused:
        harness.raise_cap(request_id, 50_000)
    run(100)

    assert not gaps.breaches
    assert gaps.worst > Fraction(9, 10), "it does not test what it is made for any more"


@quick(30)
@given(day=everything)
def test_the_fast_version_makes_the_plans_of_the_slow_and_obvious_one(day: Day) -> None:
    assert play(day).plan_bytes() == play(day, slow_fair_share).plan_bytes()


@quick(15)
@given(day=everything, plan_ahead=st.booleans())
def test_the_same_events_lead_to_the_same_plans(day: Day, plan_ahead: bool) -> None:
    assert play(day, plan_ahead=plan_ahead).plan_bytes() == play(day, plan_ahead=plan_ahead).plan_bytes()


@quick(30)
@given(day=st.builds(of_depth, (contended | everything).map(with_usual_weights), st.integers(3, 5)), scale=factors)
def test_all_weights_times_anything_give_the_same_plans(day: Day, scale: int) -> None:
    """Exactly, as far as `SCALE` is divided by the weights."""
    assert play(day).plan_bytes() == play(day, scale=scale).plan_bytes()


@quick(15)
@given(day=everything)
def test_what_tenants_are_called_makes_no_difference(day: Day) -> None:
    """Names whose order is the other way round, and in which no two nodes share a part."""

    def rename(name: str) -> str:
        return "".join(chr(ord("z") - ord(letter) + ord("/")) for letter in name)

    assert play(day).plan_bytes() == play(day, rename=rename).plan_bytes()
