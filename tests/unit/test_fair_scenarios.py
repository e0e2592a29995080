"""Faults of other schedulers that concern time and slots; one of each kind is shown on the policies that have it.

The engine here is one whose full step is 512 prompt tokens, as in the reports that the numbers are from.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fair_harness import COST as FAIR_COST
from fair_harness import FairHarness, path_of
from fair_peers import fcfs, vtc
from msgspec.structs import replace

from engine.request import RequestState
from engine.sched.cost import PROFILES, CostModel
from engine.sched.fair.parameters import FairParameters
from engine.sched.fair.policy import FairShare
from engine.sched.policy import Policy

MakePolicy = Callable[..., Policy]
COST = CostModel(
    fixed_us=5_000, prefill_token_ns=80_000, prefill_context_ps=0, decode_token_ns=200_000, decode_context_ps=0
)
BUDGET = 512


def engine(make_policy: MakePolicy = FairShare, **how: object) -> FairHarness:
    values = {"cost": COST, "max_step_tokens": BUDGET, **how}
    return FairHarness(make_policy=make_policy, **values)


def steps_to(harness: FairHarness, condition: Callable[[], bool], most_steps: int = 2000) -> int:
    """Steps until it holds; more than most_steps if it does not."""
    for i in range(most_steps):
        if condition():
            return i
        harness.step()
    return most_steps + 1


# --- one long prompt has the engine to itself -------------------------------------------------------------------------


def steps_of_short_and_long(
    make_policy: MakePolicy = FairShare, *, num_long: int = 1, num_tokens: int = 65_536, short_team: str = "short"
) -> tuple[int, int]:
    """A short prompt three steps after long ones of as many teams: when it has its first token, and the last of all."""
    harness = engine(make_policy)
    longs = [harness.submit(f"o/long{i}/k", num_tokens, 1) for i in range(num_long)]
    harness.run(3)
    short = harness.submit(f"o/{short_team}/own", 256, 1)
    first = 3 + steps_to(harness, lambda: bool(harness.seen[short].token_us))
    last = first + steps_to(harness, lambda: all(harness.seen[each].token_us for each in longs))
    return first, last


@pytest.mark.parametrize("num_long", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [8_192, 65_536])
def test_a_long_prompt_has_no_monopoly_and_loses_next_to_nothing(num_long: int, num_tokens: int) -> None:
    first, last = steps_of_short_and_long(num_long=num_long, num_tokens=num_tokens)

    assert first <= 5
    assert last <= num_long * num_tokens // BUDGET + 2


def test_a_long_prompt_has_no_monopoly_within_its_own_team_either() -> None:
    first, last = steps_of_short_and_long(short_team="long0")

    assert first <= 5
    assert last <= 130


@pytest.mark.parametrize("make_policy", [fcfs, vtc])
def test_fcfs_and_vtc_give_a_long_prompt_the_monopoly(make_policy: MakePolicy) -> None:
    first, _ = steps_of_short_and_long(make_policy)

    assert first >= 128


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 7)], ids=str)
def test_two_long_prompts_and_short_traffic_share_by_weight_meanwhile(weights: tuple[int, int]) -> None:
    """Two at once: whoever looks in the middle finds them as far as their weights say, and every short one quick."""
    harness = engine()
    longs = [harness.submit(path_of(f"o/long{i}/k", 1, weight), 65_536, 1) for i, weight in enumerate(weights)]
    waits = []
    for i in range(90):
        short = harness.submit("o/short/k", 100 + 10 * (i % 7), 1) if not i % 9 else None
        harness.step()
        if short:
            waits.append(harness.until_token(short, 50))
    done = [harness.of(each).num_computed for each in longs]

    assert max(waits) <= 1
    assert done[0] / sum(done) == pytest.approx(weights[0] / sum(weights), abs=0.03)


# --- all slots are taken ----------------------------------------------------------------------------------------------


def taken(num_slots: int, make_policy: MakePolicy = FairShare, **how: object) -> FairHarness:
    """Every slot is held by a team that will not end for 10,000 tokens."""
    harness = engine(make_policy, max_sequences=num_slots, **how)
    for i in range(num_slots):
        harness.submit("o/flood/k", 20 + i, 10_000)
    harness.run(10)
    return harness


@pytest.mark.parametrize("num_slots", [2, 4, 16])
def test_one_slot_is_given_back_at_once_and_only_once(num_slots: int) -> None:
    harness = taken(num_slots)
    newcomer = harness.submit("o/other/k", 30, 10_000)

    assert harness.until_token(newcomer) <= 1
    harness.run(500)
    assert len(harness.parkings) == 1
    assert harness.counters.num_recomputed_tokens == 0


@pytest.mark.parametrize("num_slots", [2, 4, 16])
def test_between_equals_that_both_want_all_slots_nothing_goes_to_and_fro(num_slots: int) -> None:
    harness = taken(num_slots)
    for _ in range(num_slots):
        harness.submit("o/other/k", 30, 10_000)
    harness.run(500)
    held = harness.num_rows()

    assert held["o", "o/flood"] == held["o", "o/other"] == num_slots // 2
    assert len(harness.parkings) == num_slots // 2


def test_sixteen_slots_are_divided_among_three_teams_of_unequal_weights() -> None:
    """8, 5 and 2 for certain; the sixteenth goes round, which takes a parking each time."""
    harness = engine(max_sequences=16)
    for _ in range(16):
        harness.submit(path_of("o/t0/k", 1, 3), 20, 10_000)
    harness.run(10)
    for team, weight in (("t1", 2), ("t2", 1)):
        for _ in range(16):
            harness.submit(path_of(f"o/{team}/k", 1, weight), 20, 10_000)
    harness.run(20)
    before = harness.served_us.copy()
    for _ in range(1000):
        harness.step()
        held = [harness.num_rows()["o", f"o/t{team}"] for team in range(3)]
        assert sum(held) == 16
        assert held[0] >= 7
        assert held[1] >= 4
        assert held[2] >= 2
    got = [harness.served_us["o", f"o/t{team}"] - before["o", f"o/t{team}"] for team in range(3)]
    assert [each / sum(got) for each in got] == pytest.approx([1 / 2, 1 / 3, 1 / 6], abs=0.03)
    assert len(harness.parkings) <= 60


@pytest.mark.parametrize("make_policy", [fcfs, vtc])
def test_fcfs_and_vtc_let_a_newcomer_wait_until_somebody_ends(make_policy: MakePolicy) -> None:
    harness = taken(4, make_policy)
    newcomer = harness.submit("o/other/k", 30, 100)

    assert harness.until_token(newcomer, 3000) == 3000


def test_who_is_parked_goes_on_as_soon_as_the_slot_is_free_again() -> None:
    harness = taken(4)
    guest = harness.submit("o/other/k", 30, 40)
    steps_to(harness, lambda: harness.seen[guest].ended_us is not None)
    harness.step()

    assert [seen.request.state for seen in harness.live.values()] == [RequestState.RUNNING] * 4


# --- suspended for ever -----------------------------------------------------------------------------------------------


def longest_pause(harness: FairHarness, request_id: str, num_steps: int) -> int:
    """The most steps in a row in which the request got nothing."""
    longest = pause = 0
    for _ in range(num_steps):
        pause = 0 if request_id in harness.step() else pause + 1
        longest = max(longest, pause)
    return longest


@pytest.mark.parametrize("num_decodes", [1, 100, 159, 160, 161, 210, 300])
def test_a_prompt_is_not_suspended_by_any_depth_of_decodes(num_decodes: int) -> None:
    """160 decodes are the 75 % of a step that they may have beside a prompt; 210 fill all of it. It goes on every Λ."""
    harness = engine(max_sequences=400)
    for i in range(num_decodes):
        harness.submit(f"o/flood/k{i % 5}", 5, 20_000)
    harness.run(30)
    prompt = harness.submit("o/other/k", 100_000, 1)

    assert longest_pause(harness, prompt, 60) <= harness.parameters.window_steps


@pytest.mark.parametrize("num_decodes", [16, 160, 220])
def test_decodes_are_not_suspended_by_prompts_that_always_fill_the_step(num_decodes: int) -> None:
    """Of another team with as much weight, whose prompts never end."""
    harness = engine(max_sequences=400)
    decodes = [harness.submit("o/talk/k", 5, 20_000) for _ in range(num_decodes)]
    harness.run(30)
    for i in range(3):
        harness.submit(f"o/read/k{i}", 200_000, 1)
    last = dict.fromkeys(decodes, 0)
    longest = 0
    for step in range(200):
        for request_id in harness.step():
            last[request_id] = step
        longest = max(longest, *(step - last[each] for each in decodes))

    lag_steps = harness.parameters.window_steps + harness.parameters.lag_steps
    assert longest <= 2 * lag_steps


def test_newcomers_without_an_end_suspend_nobody_for_long() -> None:
    """A new team with a short prompt before every step; decodes sit out for it, three steps in a row at most."""
    harness = engine(max_sequences=32)
    decodes = [harness.submit("o/flood/k", 20, 20_000) for _ in range(16)]
    harness.run(20)
    longest = dict.fromkeys(decodes, 0)
    pauses: dict[str, int] = dict.fromkeys(decodes, 0)
    for i in range(300):
        harness.submit(f"o/new{i}/k", 40, 1)
        granted = harness.step()
        for each in decodes:
            pauses[each] = 0 if each in granted else pauses[each] + 1
            longest[each] = max(longest[each], pauses[each])

    assert 1 <= max(longest.values()) <= harness.parameters.most_sat_out


def test_parked_ones_come_back_though_there_are_always_newcomers_for_the_slots() -> None:
    """One request a key, more keys than slots, and guests all the time: nobody is parked for more than a few Θ."""
    harness = engine(max_sequences=4)
    mine = [harness.submit(f"o/mine/k{i}", 20, 20_000) for i in range(4)]
    harness.run(10)
    progress = {each: harness.of(each).num_output_tokens for each in mine}
    for i in range(4_000):
        if not i % 3:
            harness.submit(f"o/guests/g{i % 7}", 20 + i % 11, 5)
        harness.step()
    gained = [harness.of(each).num_output_tokens - progress[each] for each in mine]

    assert min(gained) >= 0.5 * sum(gained) / len(gained)


@pytest.mark.parametrize(("num_slots", "num_floods"), [(16, 15), (2, 1), (4, 1)])
def test_who_returns_with_another_long_prompt_has_his_slot_at_once_though_he_is_ahead(
    num_slots: int, num_floods: int
) -> None:
    """A prompt at a time, a second apart, beside teams that only write and so never catch up with who reads."""
    harness = FairHarness(max_sequences=num_slots, cost=PROFILES["gpu8b"])
    for i in range(num_floods):
        for _ in range(2 * num_slots):
            harness.submit(f"o/t{i}/k", 200, 100_000)
    harness.run(50)
    waits_us = []
    for _ in range(4):
        prompt = harness.submit("o/quiet/k", 8_000, 5)
        while harness.seen[prompt].ended_us is None:
            harness.step()
        waits_us.append(harness.seen[prompt].ttft_us)
        harness.run(100)

    assert max(waits_us) <= 2 * min(waits_us)


@pytest.mark.parametrize("what", ["batch", "key"])
@pytest.mark.parametrize("num_others", [7, 15, 40])
def test_a_claim_is_asked_for_however_many_before_it_are_refused(num_others: int, what: str) -> None:
    """A team whose only slot one of its own holds, behind teams that have one slot each and want more."""
    harness = FairHarness(max_sequences=num_others + 1)
    for i in range(2 * num_others):
        harness.submit(f"o/t{i % num_others}/k", 20, 100_000)
    harness.submit("o/z/k1", 100, 100_000)
    harness.run(30)
    if what == "batch":
        second = harness.submit("o/z/k1", 20, 100, request_class="batch")
    else:
        second = harness.submit("o/z/k2", 20, 100_000)

    assert harness.until_token(second, 1500) < 600


def test_where_decodes_are_more_than_a_steps_tokens_they_take_turns() -> None:
    cheap = replace(FAIR_COST, decode_token_ns=20_000, decode_context_ps=0)
    harness = FairHarness(max_sequences=300, max_step_tokens=150, cost=cheap)
    for team, num in (("a", 151), ("b", 149)):
        for _ in range(num):
            harness.submit(f"o/{team}/k", 5, 100_000)
        harness.run(60)
    before = harness.served_us.copy()
    harness.run(2000)
    one, other = (harness.served_us["o", f"o/{team}"] - before["o", f"o/{team}"] for team in "ab")

    assert other == pytest.approx(one, rel=0.35)


@pytest.mark.parametrize(("num_slots", "weights"), [(4, (6, 1)), (5, (6, 1)), (4, (1, 1)), (4, (1, 6))])
def test_a_parked_decode_takes_the_slot_it_may_claim_though_the_decodes_in_the_slots_fill_the_step(
    num_slots: int, weights: tuple[int, int]
) -> None:
    """Two teams of an organization that has one slot of all, and the other organization's decodes in the others."""
    harness = FairHarness(
        max_sequences=num_slots,
        cost=replace(FAIR_COST, decode_token_ns=9_000_000),
        parameters=FairParameters(window_steps=1, lag_steps=4),
    )
    two = [harness.submit(path_of(f"small/{team}/k", 1, weight), 5, 20_000) for team, weight in enumerate(weights)]
    for i in range(num_slots):
        harness.submit(path_of(f"large/t{i}/k", num_slots - 1), 5, 20_000)
    harness.run(600)
    served_us = [harness.seen[each].served_us for each in two]
    share = served_us[0] * sum(weights) / (sum(served_us) * weights[0])

    assert share == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("make_policy", [fcfs, vtc])
def test_fcfs_and_vtc_suspend_a_prompt_as_long_as_decodes_fill_the_step(make_policy: MakePolicy) -> None:
    harness = engine(make_policy, max_sequences=400)
    for i in range(300):
        harness.submit(f"o/flood/k{i % 5}", 5, 20_000)
    harness.run(60)
    prompt = harness.submit("o/other/k", 100_000, 1)

    assert longest_pause(harness, prompt, 60) == 60
