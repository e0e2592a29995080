"""Each rule of fair share on a case made by hand."""

from __future__ import annotations

from functools import partial

import pytest
from fair_harness import COST, FairHarness, path_of

from engine.request import RequestState
from engine.sched.fair.claims import HeapClaims
from engine.sched.fair.policy import FairShare
from engine.sched.fair.tree import Entry, Node

FLOOD, QUIET = "acme/flood/k", "acme/quiet/k"
TARGET_US = 47_500


def served(harness: FairHarness, team: str) -> int:
    return harness.served_us.get(("acme", f"acme/{team}"), 0)


def test_a_lone_team_gets_every_slot_and_the_whole_step() -> None:
    harness = FairHarness(max_sequences=8)
    for _ in range(20):
        harness.submit(FLOOD, 400, 40)
    for _ in range(30):
        harness.step()
    assert sum(r.state is RequestState.RUNNING for r in map(harness.of, harness.seen)) == 8

    prompts = FairHarness()
    prompts.submit(FLOOD, 5000, 1)
    prompts.step()
    assert TARGET_US - 1000 < prompts.step_us[0] <= TARGET_US


def test_a_newcomer_has_its_first_token_after_one_short_step_in_which_borrowers_sit_out() -> None:
    harness = FairHarness(max_sequences=8)
    for _ in range(40):
        harness.submit(FLOOD, 100, 400)
    harness.run(30)
    newcomer = harness.submit(QUIET, 30, 5)
    granted = harness.step()

    assert list(granted) == [newcomer]
    assert len(harness.seen[newcomer].token_us) == 1
    work_us = COST.marginal_us(0, 30, 30)
    assert harness.step_us[-1] <= (COST.fixed_us + work_us) * 5 // 4


def test_a_claimant_below_its_share_parks_a_borrower_at_the_next_step_and_nothing_is_computed_again() -> None:
    harness = FairHarness(max_sequences=4)
    ids = [harness.submit(FLOOD, 60, 100) for _ in range(4)]
    harness.run(10)
    newcomer = harness.submit(QUIET, 30, 3)
    harness.step()

    parked = [r for r in ids if harness.of(r).state is RequestState.PARKED]
    assert parked == [ids[-1]]
    assert harness.of(newcomer).row is not None
    assert harness.of(parked[0]).table is not None
    harness.drain()
    assert harness.counters.num_parkings == 1
    assert harness.counters.num_preemptions == harness.counters.num_recomputed_tokens == 0
    harness.scheduler.check()


def test_slots_are_shared_by_weight_once_both_want_them() -> None:
    harness = FairHarness(max_sequences=8)
    for _ in range(20):
        harness.submit(path_of(FLOOD, 1, 1), 50, 300)
    harness.run(20)
    for _ in range(20):
        harness.submit(path_of(QUIET, 1, 3), 50, 300)
    harness.run(40)
    rows = [r.path[1].id for r in map(harness.of, harness.seen) if r.row is not None]

    assert (rows.count("acme/flood"), rows.count("acme/quiet")) == (2, 6)


@pytest.mark.parametrize("weights", [(1, 1), (1, 2), (3, 1)])
def test_backlogged_teams_are_served_by_weight(weights: tuple[int, int]) -> None:
    harness = FairHarness()
    for team, weight in zip(("red", "blue"), weights, strict=True):
        for i in range(60):
            harness.submit(path_of(f"acme/{team}/k", 1, weight), 3000 + 97 * i, 20 + i)
    harness.run(300)

    share = served(harness, "red") / (served(harness, "red") + served(harness, "blue"))
    assert share == pytest.approx(weights[0] / sum(weights), rel=0.05)


def test_a_weight_counts_from_the_next_step_on() -> None:
    harness = FairHarness()
    for team in ("red", "blue"):
        for i in range(80):
            harness.submit(f"acme/{team}/k", 3000 + 97 * i, 20)
    harness.run(100)
    harness.policy.set_weight("acme/red", 4)
    before = served(harness, "red"), served(harness, "blue")
    harness.run(200)
    red, blue = served(harness, "red") - before[0], served(harness, "blue") - before[1]

    assert red / (red + blue) == pytest.approx(0.8, rel=0.05)


def test_splitting_a_team_into_keys_and_sessions_gains_nothing() -> None:
    harness = FairHarness()
    for i in range(80):
        harness.submit("acme/honest/k", 3000 + 97 * i, 20)
        harness.submit(f"acme/split/k{i % 8}/s{i}", 3000 + 97 * i, 20)
    harness.run(300)

    share = served(harness, "split") / (served(harness, "split") + served(harness, "honest"))
    assert share <= 0.525


def test_batch_is_never_left_with_nothing() -> None:
    harness = FairHarness()
    for i in range(60):
        harness.submit("acme/red/k", 3000 + 97 * i, 20)
        harness.submit("acme/red/k", 3000 + 97 * i, 20, request_class="batch")
    harness.run(300)
    of_class = {c: harness.served_us.get(("acme", "acme/red", c), 0) for c in ("interactive", "batch")}

    assert of_class["batch"] / sum(of_class.values()) == pytest.approx(0.2, rel=0.1)


def test_steps_follow_the_tightest_promise_and_a_promise_lingers() -> None:
    harness = FairHarness()
    harness.submit("acme/red/k", 60_000, 5, request_class="batch")
    harness.step()
    assert 450_000 < harness.step_us[-1] <= 475_000
    harness.submit("acme/red/k", 20, 1, request_class="standard")
    harness.run(3)
    last_ran_us = harness.seen["r1"].ended_us
    assert last_ran_us is not None
    while harness.now_us < last_ran_us + 9_500_000:
        harness.step()
        assert harness.step_us[-1] <= 142_500
    while harness.now_us < last_ran_us + 10_100_000:
        harness.step()
    harness.step()
    assert harness.step_us[-1] > 142_500


def test_an_eligible_decode_sits_out_for_newcomers_and_three_steps_in_a_row_at_most() -> None:
    harness = FairHarness(max_sequences=8)
    flood = [harness.submit(FLOOD, 100, 400) for _ in range(8)]
    harness.run(20)
    longest, pauses = dict.fromkeys(flood, 0), dict.fromkeys(flood, 0)
    for i in range(60):
        harness.submit(f"acme/new{i}/k", 30, 1)
        granted = harness.step()
        for each in flood:
            pauses[each] = 0 if each in granted or harness.of(each).row is None else pauses[each] + 1
            longest[each] = max(longest[each], pauses[each])

    assert max(longest.values()) == harness.parameters.most_sat_out == 3


def test_who_holds_one_slot_borrows_nothing_however_many_teams_there_are() -> None:
    """More teams than slots: each share is less than a slot, and all decodes go on beside a newcomer's prompt."""
    harness = FairHarness(max_sequences=4)
    decoding = [harness.submit(f"acme/t{i}/k", 20, 400) for i in range(3)]
    harness.run(5)
    for i in range(20):
        harness.submit(f"acme/new{i}/k", 400, 1)
    granted = harness.step()

    assert set(decoding) <= set(granted)
    assert len(granted) > len(decoding)


@pytest.mark.parametrize("num_waiting", [50, 2000])
def test_a_step_looks_at_no_more_of_those_who_wait_than_fit_into_it(num_waiting: int) -> None:
    """There are slots for all; the step is full after a few prompts, and has a hole at its end that nobody fits in."""
    claims = CountingClaims()
    harness = FairHarness(max_sequences=4000, make_policy=partial(FairShare, claims=claims))
    for i in range(num_waiting):
        harness.submit(f"acme/t{i % 40}/k", 90, 5)
    most = 0
    for _ in range(12):
        claims.num_dealt = 0
        harness.step()
        most = max(most, claims.num_dealt)

    assert 0 < most <= 3 * harness.parameters.look


class CountingClaims(HeapClaims):
    num_dealt = 0

    def deal(self, root: Node, num: int, look: int) -> list[Entry]:
        dealt = super().deal(root, num, look)
        self.num_dealt += len(dealt)
        return dealt


def test_external_work_counts_as_served_and_a_negative_one_does_not() -> None:
    harness = FairHarness()
    for team in ("red", "blue"):
        for i in range(80):
            harness.submit(f"acme/{team}/k", 3000 + 97 * i, 20)
    harness.run(50)
    harness.policy.charge_external("acme/red", -10_000_000)
    harness.policy.charge_external("acme/red", 1_000_000)
    before = served(harness, "red"), served(harness, "blue")
    harness.run(150)
    red, blue = served(harness, "red") - before[0], served(harness, "blue") - before[1]

    assert blue - red == pytest.approx(1_000_000, abs=8 * TARGET_US)


def test_a_long_prompt_beside_a_flood_takes_about_twice_its_time_alone() -> None:
    alone = FairHarness()
    prompt = alone.submit(QUIET, 6000, 1)
    alone.drain()
    beside = FairHarness()
    for _ in range(400):
        beside.submit(FLOOD, 200, 60)
    beside.run(30)
    slowed = beside.submit(QUIET, 6000, 1)
    while not beside.seen[slowed].token_us:
        beside.step()

    assert beside.seen[slowed].ttft_us <= 2.4 * alone.seen[prompt].ttft_us
