"""Where a request stands, asked of the core: phases, times, who is ahead, under each policy."""

from __future__ import annotations

import random

import pytest
from core_harness import CoreHarness
from fake_runner import STEP_US

from engine.messages import PathNode, RequestClass
from engine.standing import MOST_NAMED, Standing


def path_of(team: str, org: str = "acme") -> tuple[PathNode, ...]:
    return PathNode(f"org:{org}"), PathNode(f"team:{team}"), PathNode("key")


def age_of(standing: Standing) -> int:
    return standing.queue_us + standing.prefill_us + standing.decode_us + standing.preempted_us + standing.parked_us


def test_nobody_stands_where_nothing_is_or_all_is_over() -> None:
    harness = CoreHarness()
    assert harness.core.standing("never") == Standing(phase="unknown")
    harness.submit([1, 2], 2, request_id="r")
    harness.drain()
    assert harness.core.standing("r") == Standing(phase="unknown")


def test_a_request_is_told_its_phase_class_team_and_where_its_time_went() -> None:
    harness = CoreHarness(max_step_tokens=8)
    harness.submit(list(range(1, 21)), 4, request_id="r", path=path_of("red"), request_class="batch")
    harness.now_us += 700
    before = harness.core.standing("r")
    assert (before.phase, before.team_id, before.request_class) == ("queue", "team:red", "batch")
    assert (before.queue_us, age_of(before)) == (700, 700)
    harness.step()
    prefill = harness.core.standing("r")
    assert (prefill.phase, prefill.resource, prefill.expected_wait_us) == ("prefill", "", 0)
    assert (prefill.queue_us, prefill.prefill_us) == (700, STEP_US)
    harness.step()
    harness.step()
    harness.now_us += 50
    decode = harness.core.standing("r")
    assert (decode.phase, decode.prefill_us, decode.decode_us) == ("decode", 3 * STEP_US, 50)
    assert age_of(decode) == 750 + 3 * STEP_US


def test_fcfs_has_those_ahead_that_came_before_and_names_only_its_own_team() -> None:
    harness = CoreHarness(max_sequences=2)
    teams: list[tuple[str, RequestClass]] = [
        ("red", "interactive"), ("red", "batch"), ("blue", "batch"), ("red", "interactive"), ("blue", "standard"),
        ("red", "batch"), ("blue", "interactive"),
    ]  # fmt: skip
    for i, (team, request_class) in enumerate(teams):
        harness.submit([i + 1] * 3, 20, request_id=f"r{i}", path=path_of(team), request_class=request_class)
    harness.step()  # r0 and r1 have the slots
    last = harness.core.standing("r6")
    assert (last.phase, last.resource, last.expected_wait_us) == ("queue", "slot", None)
    assert last.ahead == {"batch": 2, "interactive": 1, "standard": 1}
    assert last.ahead_of_team == ("r2", "r4")
    assert harness.core.standing("r2").ahead == {}
    assert harness.core.standing("r0").resource == ""


def test_the_same_team_name_under_another_organization_is_another_team() -> None:
    harness = CoreHarness(max_sequences=1)
    for i, org in enumerate(["acme", "acme", "other", "acme"]):
        harness.submit([i + 1] * 3, 20, request_id=f"r{i}", path=path_of("red", org))
    harness.step()
    assert harness.core.standing("r3").ahead == {"interactive": 2}
    assert harness.core.standing("r3").ahead_of_team == ("r1",)


def test_names_are_bounded_and_counts_are_not() -> None:
    harness = CoreHarness(max_sequences=1)
    for i in range(MOST_NAMED + 50):
        harness.submit([1, 2, 3], 20, request_id=f"r{i}")
    harness.step()
    standing = harness.core.standing(f"r{MOST_NAMED + 49}")
    assert standing.ahead == {"interactive": MOST_NAMED + 48}
    assert standing.ahead_of_team == tuple(f"r{i + 1}" for i in range(MOST_NAMED))


def test_a_static_batch_has_all_earlier_ones_ahead() -> None:
    harness = CoreHarness(max_sequences=2, policy="static")
    for i in range(5):
        harness.submit([i + 1] * 3, 20, request_id=f"r{i}")
    harness.step()
    assert harness.core.standing("r1").resource == ""
    assert harness.core.standing("r4").ahead_of_team == ("r2", "r3")


def test_of_several_choices_and_requests_the_one_furthest_behind_is_told_of() -> None:
    harness = CoreHarness(max_sequences=2, prefix_cache=False)
    harness.submit([1, 2, 3], 20, request_id="a-0", num_choices=3)
    harness.submit([4, 5, 6], 20, request_id="a-1")
    harness.step()
    standing = harness.core.standing("a", "a-0", "a-1", "a-2")
    assert (standing.phase, standing.ahead) == ("queue", {"interactive": 1}), "the one without a slot before it"
    assert harness.core.standing("a-0").ahead == {}, "its own choices are not ahead of it"


def test_choices_that_wait_for_the_prompt_of_the_first_are_where_that_one_is() -> None:
    harness = CoreHarness(max_step_tokens=8)
    harness.submit(list(range(1, 21)), 4, request_id="r", num_choices=3)
    harness.step()
    assert harness.core.standing("r").phase == "prefill"


def test_at_its_cap_a_request_waits_for_nothing_here() -> None:
    harness = CoreHarness()
    harness.submit([1, 2, 3], 2, request_id="r", hold_at_cap=True)
    harness.drain()
    standing = harness.core.standing("r")
    assert (standing.phase, standing.resource, standing.expected_wait_us) == ("at_cap", "", None)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_with_slots_free_it_is_blocks_or_its_turn_that_a_request_waits_for(policy: str) -> None:
    harness = CoreHarness(num_blocks=8, max_sequences=4, policy=policy, prefix_cache=False)
    harness.submit([1] * 40, 60, request_id="large")
    harness.step()
    assert harness.core.standing("large").resource == ""
    harness.submit([2] * 100, 4, request_id="waits")
    assert harness.core.standing("waits").resource == ("blocks" if policy == "fcfs" else "step")
    harness.step()
    assert harness.core.standing("waits").resource == "blocks"


def test_who_lost_its_blocks_says_so() -> None:
    harness = CoreHarness(num_blocks=8, max_sequences=4, prefix_cache=False)
    harness.submit([1] * 40, 60, request_id="old")
    harness.submit([2] * 40, 60, request_id="young")
    while harness.core.standing("young").phase != "preempted":
        harness.step()
    harness.step()
    standing = harness.core.standing("young")
    assert (standing.resource, standing.preempted_us > 0) == ("blocks", True)
    assert age_of(standing) == harness.now_us - harness.answers["young", 0].arrival_us


def test_whatever_happens_times_sum_to_the_age_and_asking_changes_nothing() -> None:
    phases: set[str] = set()
    for policy in ("fcfs", "static", "fair"):
        for plan_ahead in (False, True):
            for seed in (5, 6, 7):
                told = [_day(policy, plan_ahead, seed, phases, asks=asks) for asks in (True, False)]
                assert told[0] == told[1]
    assert phases == {"queue", "prefill", "decode", "preempted", "parked", "at_cap"}


def _day(policy: str, plan_ahead: bool, seed: int, phases: set[str], *, asks: bool) -> list[object]:
    """The plans that were made."""
    dice = random.Random(seed)
    harness = CoreHarness(num_blocks=12, max_sequences=3, max_step_tokens=24, policy=policy, plan_ahead=plan_ahead)
    for i in range(150):
        if dice.random() < 0.2:
            harness.submit(
                [dice.randrange(1, 30) for _ in range(dice.randrange(1, 60))],
                dice.randrange(1, 40),
                request_id=f"r{i}",
                num_choices=dice.choice([1, 1, 3]),
                hold_at_cap=dice.random() < 0.2,
                path=path_of(dice.choice(["red", "blue", "green"])),
                request_class=dice.choice(["interactive", "standard", "batch"]),
            )
        if dice.random() < 0.1 and harness.core._live:
            harness.raise_cap(dice.choice(list(harness.core._live)), 60)
        harness.step()
        for request_id in list(harness.core._live) if asks else []:
            standing = harness.core.standing(request_id)
            phases.add(standing.phase)
            assert age_of(standing) == harness.now_us - harness.answers[request_id, 0].arrival_us
            assert (standing.resource == "") == (standing.phase == "at_cap" or standing.expected_wait_us == 0)
            assert request_id not in standing.ahead_of_team
            if standing.phase in ("queue", "preempted", "parked"):
                assert standing.resource
    return [plan.chunks for plan in harness.runner.plans]
