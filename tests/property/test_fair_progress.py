"""Who goes on, and when: no step is idle, nobody stands still for longer than can be computed, slots do not go to and
fro."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from examples import examples
from fair_days import (
    CLASSES,
    SEARCH_ONLY,
    Arrive,
    Day,
    Player,
    TreePath,
    aborts,
    arrivals,
    days,
    everything,
    raises,
    reweighs,
)
from fair_harness import FairHarness
from fair_measures import SCALE, distance_us, next_token_us
from fair_witness import NodePath, names_of, prefixes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.messages import RequestClass
from engine.request import Request
from engine.sched.cost import CostModel

quick = settings(
    max_examples=examples(20),
    deadline=None,
    phases=SEARCH_ONLY,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
roomy = days(arrivals(capped=True), aborts, raises, reweighs, max_step_tokens=(100_000, 100_000, 150), quiet=60)


@quick
@given(day=roomy.map(lambda day: replace(day, lag_steps=16, max_step_tokens=100_000)))
def test_a_step_leaves_out_nothing_that_fits_unless_it_was_cut_short_for_a_newcomer(day: Day) -> None:
    """And time lost in steps cut short is paid from the credit: one fixed cost each, 2 % of all time."""
    num_cut = 0
    parameters = day.parameters

    def look(harness: FairHarness) -> None:
        nonlocal num_cut
        if not harness.steps or not _leaves_out_what_fits(harness):
            return
        num_cut += 1
        if any(parking.step == len(harness.plans) - 1 for parking in harness.parkings):
            return  # for a newcomer that has lost its slot again in this very step
        assert _newcomers_served(harness)
        earned_us = sum(harness.step_us) * parameters.credit_percent // 100
        assert num_cut <= parameters.most_credit_steps + earned_us // harness.cost.fixed_us

    Player(day).play(look)


def _leaves_out_what_fits(harness: FairHarness) -> bool:
    """In the step planned last a resident, or somebody who waits while a row is free, could have had one more token,
    and that not from the last quantum of the step."""
    room_us = harness.limit_us(-1) - _spent_us(harness) - harness.targets_us[-1] // harness.parameters.quanta_per_step
    if harness.plans[-1].num_tokens >= harness.max_step_tokens:
        return False
    left = harness.left
    able = left.residents + (left.waiting if left.num_free_rows else [])
    return any(next_token_us(harness, request) <= room_us for request in able)


def _spent_us(harness: FairHarness) -> int:
    return harness.step_us[-1] - harness.cost.fixed_us


def _newcomers_served(harness: FairHarness) -> list[Request]:
    """Of the step planned last, those that had no token before it."""
    return [r for r in harness.steps[-1].requests if len(harness.seen[r.request_id].token_us) <= 1]


@settings(quick, max_examples=examples(12))
@given(day=everything)
def test_something_runs_in_every_step_and_everybody_ends(day: Day) -> None:
    player = Player(day)
    harness = player.harness
    for events in (*day.steps, *[()] * day.num_quiet_steps):
        for event in events:
            player.happen(event)
        num_runnable = harness.scheduler.num_runnable
        assert bool(harness.step()) == bool(num_runnable)
    # From here on nothing arrives: a step computes one token at least, and what is lost is lost to somebody older.
    num_steps = sum(len(seen.request.token_ids) + seen.request.output_limit for seen in harness.live.values())
    for _ in range(20 * (num_steps + 1)):
        if not harness.live:
            break
        if not harness.scheduler.num_runnable:
            for request_id in list(harness.live):
                harness.raise_cap(request_id, 100)
        assert harness.step()
    assert not harness.live
    harness.scheduler.check()


@quick
@given(day=roomy)
def test_a_slot_is_only_taken_from_who_holds_more_by_weight_and_not_twice_without_progress(day: Day) -> None:
    """Or who is ahead by a quarter of Θ, in service of the heavier one. Nobody parks his equal, nor one of his own."""
    harness = Player(day).play()
    computed: dict[Request, int] = {}
    for parking in harness.parkings:
        assert parking.num_computed > computed.get(parking.holder, -1)
        computed[parking.holder] = parking.num_computed
        if parking.was_paused:
            continue
        claimant, holder = _siblings_above_sessions(parking.claimant, parking.holder)
        weight, own = parking.weights[holder], parking.weights[claimant]
        holds_more = parking.num_rows[holder] * own > parking.num_rows[claimant] * weight
        lead = (parking.v[holder] - parking.v[claimant]) * max(weight, own)
        assert holds_more or 4 * lead > day.lag_steps * min(harness.targets_us) * SCALE


def _siblings_above_sessions(one: Request, other: Request) -> tuple[NodePath, NodePath]:
    """The two siblings below which the two requests are."""
    for pair in zip(prefixes(names_of(one)[:4]), prefixes(names_of(other)[:4]), strict=True):
        if pair[0] != pair[1]:
            return pair
    raise AssertionError("parked for another one of the same key")


COSTLY_DECODES = CostModel(
    fixed_us=5_000, prefill_token_ns=300_000, prefill_context_ps=0, decode_token_ns=9_000_000, decode_context_ps=0
)
"""So that a lead of Θ is a matter of few steps for decodes, too."""
Crowd = list[tuple[TreePath, RequestClass]]
crowds = st.lists(
    st.tuples(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 1)), st.sampled_from(CLASSES)),
    min_size=1,
    max_size=8,
    unique=True,
)
"""Where endless requests are, one for a key."""
weight_lists = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def longest_wait(crowd: Crowd, weights: tuple[int, ...], *, num_tokens: int, num_rows: int) -> Fraction:
    """What others got before some request went on, as a part of what they may get (`_allowed_us`); the largest."""
    steps = tuple((Arrive(path, where, num_tokens, 100_000),) for path, where in crowd)
    day = Day(weights, steps, 400, max_sequences=num_rows, window_steps=1, lag_steps=4)
    went_on_at: dict[str, int] = {}
    total_us, worst = 0, Fraction(0)

    def look(harness: FairHarness) -> None:
        nonlocal total_us, worst
        for request_id in harness.live:
            went_on_at.setdefault(request_id, total_us)
        total_us += _spent_us(harness)
        for request in harness.steps[-1].requests:
            went_on_at[request.request_id] = total_us
        for request_id, seen in harness.live.items():
            waited_us = total_us - went_on_at[request_id]
            worst = max(worst, waited_us / _allowed_us(harness, seen.request))

    Player(day, cost=COSTLY_DECODES).play(look)
    return worst


def _allowed_us(harness: FairHarness, request: Request) -> Fraction:
    """What all others may get, at like work, before the request goes on.

    While a node could run and gets nothing, a sibling comes from at most B by the node's weight behind it to at most B
    by its own weight ahead of it. What its family needs to get for that, the family's own siblings get by weight, too.
    """
    bound_us = distance_us(harness) + harness.parameters.lag_steps * max(harness.targets_us) // 4
    allowed = Fraction(max(harness.targets_us))
    for node in reversed(prefixes(names_of(request))):
        others = [w for other, w in harness.weights.items() if other != node and other[:-1] == node[:-1]]
        weight = harness.weights[node]
        allowed += sum((bound_us + (bound_us + allowed) * Fraction(other, weight) for other in others), Fraction(0))
    return allowed


@settings(quick, max_examples=examples(6))
@given(crowd=crowds, weights=weight_lists)
def test_every_prompt_goes_on_before_others_have_got_what_can_be_computed(
    crowd: Crowd, weights: tuple[int, ...]
) -> None:
    assert longest_wait(crowd, weights, num_tokens=100_000, num_rows=8) <= 1


@settings(quick, max_examples=examples(10))
@given(crowd=crowds, weights=weight_lists, num_rows=st.integers(1, 4))
def test_every_decode_gets_its_turn_in_the_slots_before_others_have_got_what_can_be_computed(
    crowd: Crowd, weights: tuple[int, ...], num_rows: int
) -> None:
    assert longest_wait(crowd, weights, num_tokens=5, num_rows=num_rows) <= 1


@quick
@given(day=roomy)
def test_where_nobody_waits_and_all_decodes_fit_into_the_step_each_gets_its_token(day: Day) -> None:
    def look(harness: FairHarness) -> None:
        left = harness.left
        if not harness.steps or left.waiting or not left.residents:
            return
        planned = zip(harness.steps[-1].requests, harness.plans[-1].chunks, strict=True)
        is_decoding = all(c.num_tokens == 1 and c.start >= r.num_prompt_tokens for r, c in planned)
        if is_decoding and all(r.num_wanted == 1 and r.num_output_tokens for r in left.residents):
            needed_us = _spent_us(harness) + sum(next_token_us(harness, r) for r in left.residents)
            is_full = harness.plans[-1].num_tokens >= harness.max_step_tokens
            assert is_full or needed_us > harness.limit_us(-1)

    Player(day).play(look)
