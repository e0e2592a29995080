"""What the ledgers of fair share hold: work done, counted once; nothing for waiting, idling, leaving, a cancel."""

from __future__ import annotations

from fractions import Fraction

from examples import examples
from fair_days import (
    CLASSES,
    LONGEST,
    SEARCH_ONLY,
    Abort,
    Arrive,
    Day,
    Player,
    aborts,
    arrivals,
    days,
    everything,
    in_one_organization,
    raises,
    reweighs,
    tree_paths,
)
from fair_harness import FairHarness, path_of
from fair_measures import SCALE, distance_us, ledger_us
from fair_witness import NodePath, node_numbers, prefixes, virtual_times
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

forced_out = st.builds(
    lambda *arrivals: Day((1,), tuple((each,) for each in arrivals), 150, num_blocks=60),
    *[
        st.builds(
            Arrive,
            path=tree_paths(),
            request_class=st.sampled_from(CLASSES),
            num_tokens=st.integers(20, 300),
            output=st.integers(50, 300),
            num=st.integers(1, 3),
        )
    ]
    * 4,
)
"""Answers that grow until the blocks are short."""
crowded = days(
    arrivals(capped=True, most=6),
    aborts,
    raises,
    reweighs,
    num_blocks=(100_000, 300, 700),
    max_step_tokens=(100_000, 100_000, 150),
    quiet=60,
)
"""Pools that are too small among them, so that work is lost and done again."""
quick = settings(
    max_examples=examples(20),
    deadline=None,
    phases=SEARCH_ONLY,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@quick
@given(day=st.one_of(forced_out, crowded).map(in_one_organization))
def test_what_is_charged_is_the_cost_of_the_work_done_however_it_was_sliced_parked_and_done_again(day: Day) -> None:
    harness = Player(day).play()
    requests = [seen.request for seen in harness.seen.values()]
    worth_us = sum(harness.cost.marginal_us(r.num_cached_tokens, r.high_water, r.num_prompt_tokens) for r in requests)

    assert ledger_us(harness, "0") == worth_us


@quick
@given(day=crowded.map(in_one_organization))
def test_steps_planned_ahead_are_charged_once_and_those_dropped_are_not(day: Day) -> None:
    harness = Player(day, plan_ahead=True).play()

    assert ledger_us(harness, "0") == harness.charged_us


@quick
@given(sizes=st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 40)), min_size=1, max_size=6))
def test_a_charge_is_the_same_at_all_levels(sizes: list[tuple[int, int]]) -> None:
    """Of one lonely path: what its nodes are charged by a step, those that were there before and are there after it."""
    steps = tuple((Arrive((0, 0, 0, 0), "standard", num_tokens, output),) for num_tokens, output in sizes)
    last: dict[NodePath, int] = {}
    last_us = 0

    def look(harness: FairHarness) -> None:
        nonlocal last, last_us
        now = {names: v * harness.weights[names] for names, v in virtual_times(harness.policy).items()}
        charged = {now[names] - last[names] for names in now.keys() & last.keys()}
        assert not charged or len(now) < 5 or charged == {(harness.charged_us - last_us) * SCALE}
        last, last_us = now, harness.charged_us

    Player(Day((1,), steps, 60)).play(look)


@quick
@given(day=everything, plan_ahead=st.booleans())
def test_virtual_time_never_goes_back_neither_by_leaving_nor_by_another_weight(day: Day, plan_ahead: bool) -> None:
    last: dict[NodePath, tuple[list[int], int]] = {}

    def look(harness: FairHarness) -> None:
        now, numbers = virtual_times(harness.policy), node_numbers(harness.policy)
        for names, v in now.items():
            above = [numbers[each] for each in prefixes(names)[:-1]]
            was_above, was = last.get(names, (above, 0))
            # Where a whole family was gone and is another one now, its members' times are nobody's.
            assert v >= was or above != was_above, names
            last[names] = above, v
        for names in [names for names in last if names[:-1] and names[:-1] not in now]:
            del last[names]

    Player(day, plan_ahead=plan_ahead).play(look)


@quick
@given(day=everything, at=st.integers(0, 25), guests=st.lists(arrivals(most=6), min_size=1, max_size=3))
def test_who_is_canceled_before_it_ran_leaves_nothing_behind(day: Day, at: int, guests: list[Arrive]) -> None:
    """Not a trace in any later plan, for whatever teams came and went between two steps."""

    def plans(*, with_guests: bool) -> bytes:
        player = Player(day)
        for i, events in enumerate((*day.steps, *[()] * day.num_quiet_steps)):
            if i == at and with_guests:
                _visit(player, guests)
            for event in events:
                player.happen(event)
            player.harness.step()
        return player.harness.plan_bytes()

    assert plans(with_guests=True) == plans(with_guests=False)


def _visit(player: Player, guests: list[Arrive]) -> None:
    """Come, be canceled, and take the numbers that they had with them."""
    harness = player.harness
    before = list(harness.seen)
    for guest in guests:
        player.happen(guest)
    for request_id in [each for each in harness.seen if each not in before]:
        harness.abort(request_id)
        del harness.seen[request_id]


@quick
@given(day=crowded, victim=st.integers(0, 20), num_tokens=st.integers(1, 60))
def test_a_cancel_leaves_the_ledgers_as_an_ordinary_end_after_the_same_work(
    day: Day, victim: int, num_tokens: int
) -> None:
    request_id = f"r{victim}"

    def plans(*, canceled: bool) -> bytes:
        player = Player(day)
        ended = False
        for events in (*day.steps, *[()] * day.num_quiet_steps):
            for event in events:
                player.happen(event)
            request = player.harness.seen[request_id].request if request_id in player.harness.seen else None
            if request is not None and not canceled and not ended:
                request.output_limit = num_tokens
                request.output_cap = min(request.output_cap, num_tokens)
            player.harness.step()
            if request is not None and request.num_output_tokens >= num_tokens:
                ended = True
                player.harness.abort(request_id)
        return player.harness.plan_bytes()

    assert plans(canceled=True) == plans(canceled=False)


@quick
@given(day=everything)
def test_when_all_have_gone_nobody_is_counted_anywhere(day: Day) -> None:
    player = Player(day)
    harness = player.play()
    for request_id in list(harness.live):
        player.happen(Abort(int(request_id[1:])))
    root = harness.policy.tree.root

    assert (root.num_requests, root.num_seekers, root.num_rows, root.weight_present) == (0, 0, 0, 0)
    harness.scheduler.check()
    assert harness.kv.num_available == harness.kv.num_blocks


@settings(quick, max_examples=examples(8))
@given(
    debt_ms=st.integers(500, 3000), num_away=st.integers(0, 8), weights=st.tuples(st.integers(1, 9), st.integers(1, 9))
)
def test_leaving_and_coming_back_erases_no_debt(debt_ms: int, num_away: int, weights: tuple[int, int]) -> None:
    """All of a team's requests are canceled while it owes for work done elsewhere, and the same ones come again: it
    has no more by the end than one that has stayed."""

    def served(*, leaves: bool) -> tuple[int, int]:
        harness = FairHarness()
        paths = {team: path_of(f"o/{team}/k", 1, weight) for team, weight in zip(("red", "blue"), weights, strict=True)}
        ids = [harness.submit(paths[team], 40_000, 1) for team in ("red", "blue")]
        harness.run(20)
        harness.policy.charge_external("o/red", debt_ms * 1000)
        start = harness.served_us["o", "o/red"]
        if leaves:
            harness.abort(ids[0])
            harness.run(num_away)
            harness.submit(paths["red"], 40_000, 1)
            harness.run(80 - num_away)
        else:
            harness.run(80)
        return harness.served_us["o", "o/red"] - start, distance_us(harness)

    (came_back, bound_us), (stayed, _) = served(leaves=True), served(leaves=False)
    assert came_back <= stayed + bound_us // 4


def test_keys_of_a_team_that_leaves_as_a_whole_owe_each_other_what_they_owed() -> None:
    harness = FairHarness()
    ids = [harness.submit(f"o/team/{key}", 40_000, 1) for key in ("red", "blue")]
    harness.submit("o/other/k", 200_000, 1)
    harness.run(20)
    harness.policy.charge_external("o/team/red", 3_000_000)
    for each in ids:
        harness.abort(each)
    harness.run(100)  # until the team itself has paid for it
    start = harness.served_us.copy()
    for key in ("red", "blue"):
        harness.submit(f"o/team/{key}", 40_000, 1)
    harness.run(100)
    got = harness.served_us - start
    red, blue = (got["o", "o/team", "interactive", f"o/team/{key}"] for key in ("red", "blue"))

    assert blue - red > 1_000_000


def test_who_asked_for_little_is_paid_for_it_up_to_theta_and_no_more() -> None:
    """One decode at a time, for long beside a flood: it was never backlogged, and lags further behind than ever."""
    harness = FairHarness()
    harness.submit("o/modest/k", 20, 100_000)
    for i in range(100):
        harness.submit("o/busy/k", 1000 + 7 * i, 1)
    harness.run(400)
    start = harness.served_us.copy()
    for i in range(100):
        harness.submit("o/modest/k", 1000 + 7 * i, 1)
    lag_us = harness.parameters.lag_steps * max(harness.targets_us)
    for _ in range(150):
        harness.step()
        got = harness.served_us - start
        assert got["o", "o/modest"] - got["o", "o/busy"] <= distance_us(harness) + lag_us


@settings(quick, max_examples=examples(6))
@given(
    num_idle=st.integers(0, 400),
    weights=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    ran_before=st.booleans(),
    num_tokens=st.sampled_from([1000, LONGEST - 100]),
)
def test_who_was_idle_is_not_paid_for_it(
    num_idle: int, weights: tuple[int, int], ran_before: bool, num_tokens: int
) -> None:
    """The one that comes back gets ahead of the one that worked by no more than the bound, however long it was away."""
    harness = FairHarness()
    paths = {name: path_of(f"o/{name}/k", 1, weight) for name, weight in zip(("lazy", "busy"), weights, strict=True)}
    if ran_before:
        harness.submit(paths["lazy"], 50, 1)
    for i in range(90_000 // num_tokens):
        harness.submit(paths["busy"], num_tokens + 7 * i, 1)
    harness.run(num_idle)
    for i in range(30_000 // num_tokens):
        harness.submit(paths["lazy"], num_tokens + 7 * i, 1)
    start = harness.served_us.copy()
    for _ in range(100):
        harness.step()
        lazy, busy = (
            Fraction(harness.served_us["o", f"o/{name}"] - start["o", f"o/{name}"], weight)
            for name, weight in zip(("lazy", "busy"), weights, strict=True)
        )
        assert lazy - busy <= Fraction(distance_us(harness), weights[0])
