"""Who has the slots, where there are fewer than are wanted: by weight, the remainder in turn, and no ping-pong.

Here everybody decodes without an end, so what a slot is worth is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from examples import examples
from fair_days import SEARCH_ONLY
from fair_harness import FairHarness, path_of
from fair_peers import fcfs, vtc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.sched.fair.parameters import FairParameters
from engine.sched.fair.policy import FairShare
from engine.sched.policy import Policy

QUICKLY = FairParameters(window_steps=1, lag_steps=1)
"""So that the remainder changes hands many times in a short run."""
quick = settings(
    max_examples=examples(6), deadline=None, phases=SEARCH_ONLY, suppress_health_check=[HealthCheck.too_slow]
)
few_slots = st.integers(1, 12)
some_weights = st.lists(st.integers(1, 9), min_size=2, max_size=5)


def crowded(
    num_slots: int,
    weights: list[int],
    num_steps: int,
    *,
    late: int = 0,
    make_policy: Callable[..., Policy] = FairShare,
    parameters: FairParameters | None = QUICKLY,
) -> FairHarness:
    """Teams that want every slot, the first one from so many steps before the others on; then that many steps."""
    harness = FairHarness(max_sequences=num_slots, parameters=parameters, make_policy=make_policy)
    for team, weight in enumerate(weights):
        for i in range(num_slots):
            harness.submit(path_of(f"o/t{team}/k", 1, weight), 20 + 7 * i + team, 100_000)
        if not team:
            harness.run(late)
    harness.run(num_steps)
    return harness


def rows(harness: FairHarness, num_teams: int) -> list[int]:
    held = harness.num_rows()
    return [held["o", f"o/t{team}"] for team in range(num_teams)]


def served(harness: FairHarness, num_teams: int) -> list[int]:
    return [harness.served_us["o", f"o/t{team}"] for team in range(num_teams)]


def worst_share(harness: FairHarness, weights: list[int], before: list[int]) -> Fraction:
    """The smallest part of its share by weight that a team has got since then, less one Θ of service."""
    got = [now - then for now, then in zip(served(harness, len(weights)), before, strict=True)]
    lag_us = harness.parameters.lag_steps * max(harness.targets_us)
    return min(
        Fraction((each + 2 * lag_us) * sum(weights), sum(got) * weight)
        for each, weight in zip(got, weights, strict=True)
    )


@quick
@given(num_slots=few_slots, weights=some_weights, late=st.integers(0, 20))
def test_everybody_has_the_whole_slots_of_his_share(num_slots: int, weights: list[int], late: int) -> None:
    """Soon after he came, however long others had them all; later one less while he is ahead in service."""
    harness = crowded(num_slots, weights, 0, late=late, parameters=None)
    entitled = [num_slots * weight // sum(weights) for weight in weights]
    most = [0] * len(weights)
    for _ in range(2 * num_slots + 5):
        harness.step()
        most = [max(pair) for pair in zip(most, rows(harness, len(weights)), strict=True)]
    assert all(had >= floor for had, floor in zip(most, entitled, strict=True)), (most, entitled)
    for _ in range(100):
        harness.step()
        held = rows(harness, len(weights))
        assert sum(held) == num_slots
        assert all(have >= floor - 1 for have, floor in zip(held, entitled, strict=True)), (held, entitled)


@quick
@given(num_slots=few_slots, weights=some_weights)
def test_what_is_left_over_goes_round_by_weight(num_slots: int, weights: list[int]) -> None:
    harness = crowded(num_slots, weights, 100)
    before = served(harness, len(weights))
    harness.run(1500)

    assert worst_share(harness, weights, before) >= Fraction(95, 100)


@quick
@given(num_slots=few_slots, weights=some_weights)
def test_a_slot_does_not_go_to_and_fro(num_slots: int, weights: list[int]) -> None:
    """Whoever gets one of those left over keeps it for a good part of Θ, be he heavy or light."""
    harness = crowded(num_slots, weights, 100)
    num_before, us_before = len(harness.parkings), sum(served(harness, len(weights)))
    harness.run(600)
    lag_us = harness.parameters.lag_steps * max(harness.targets_us)
    num_turns = (sum(served(harness, len(weights))) - us_before) // lag_us

    assert len(harness.parkings) - num_before <= 4 * len(weights) * (num_turns + 1)


@pytest.mark.parametrize(
    ("num_slots", "weights"), [(8, [4, 1, 1, 1, 1]), (20, [10, *[1] * 10]), (16, [4, 1, 1])], ids=str
)
def test_a_heavy_team_of_dear_requests_keeps_its_slots_but_one(num_slots: int, weights: list[int]) -> None:
    """It is ahead of all others at once; each of them may take a slot by time, and together they would take all."""
    harness = FairHarness(max_sequences=num_slots)
    for team, weight in enumerate(weights):
        for i in range(num_slots):
            harness.submit(path_of(f"o/t{team}/k", 1, weight), (20 if team else 3000) + i, 100_000)
    harness.run(300)
    num_before = len(harness.parkings)
    for _ in range(300):
        harness.step()
        assert rows(harness, 1)[0] >= num_slots * weights[0] // sum(weights) - 1

    assert len(harness.parkings) - num_before <= 60


@pytest.mark.parametrize(
    ("num_slots", "weights"),
    [(4, [3, 2]), (6, [4, 3]), (5, [3, 2, 1]), (3, [1, 1]), (1, [1, 1, 1]), (1, [3, 1]), (4, [5, 3, 1])],
    ids=str,
)
def test_a_remainder_by_hand_goes_round(num_slots: int, weights: list[int]) -> None:
    harness = crowded(num_slots, weights, 100)
    before = served(harness, len(weights))
    harness.run(1500)

    assert worst_share(harness, weights, before) >= Fraction(95, 100)
    assert len(harness.parkings) <= 250


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (3, 1)], ids=str)
def test_a_long_prompt_in_the_only_slot_gives_way_after_its_lead(weights: tuple[int, int]) -> None:
    """A holder that has more to do in every step, beside somebody who only waits for the slot."""
    harness = FairHarness(max_sequences=1, parameters=QUICKLY)
    harness.submit(path_of("o/long/k", 1, weights[0]), 60_000, 1)
    harness.run(20)
    other = harness.submit(path_of("o/other/k", 1, weights[1]), 2_000, 1)
    got_us = harness.served_us["o", "o/long"]
    while not harness.of(other).num_computed:
        harness.step()
        lead_us = (harness.served_us["o", "o/long"] - got_us) * Fraction(max(weights), weights[0])
        assert lead_us <= 5 * max(harness.targets_us) * max(weights)


@pytest.mark.parametrize("make_path", ["o/t/k", "o/t/k/s{}"], ids=["one-session", "sessions"])
def test_requests_of_one_key_never_park_each_other(make_path: str) -> None:
    harness = FairHarness(max_sequences=4, parameters=QUICKLY)
    for i in range(12):
        harness.submit(make_path.format(i), 20, 100_000)
    harness.run(1000)

    assert not harness.parkings


@pytest.mark.parametrize("make_policy", [fcfs, vtc])
def test_fcfs_and_vtc_leave_all_slots_with_who_came_first(make_policy: Callable[..., Policy]) -> None:
    assert rows(crowded(4, [1, 1], 100, late=10), 2) == [2, 2]
    assert rows(crowded(4, [1, 1], 100, late=10, make_policy=make_policy), 2) == [4, 0]
