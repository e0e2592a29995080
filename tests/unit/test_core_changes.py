"""The core while things change: caps that are raised, choices that wait for each other, steps planned ahead."""

from __future__ import annotations

import pytest
from core_harness import CoreHarness

BOTH_WAYS = pytest.mark.parametrize("plan_ahead", [False, True], ids=["in-turn", "ahead"])


def prompt_of(num_tokens: int, first: int = 1) -> list[int]:
    return [first + i % 500 for i in range(num_tokens)]


# --- caps -------------------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_a_choice_held_at_its_cap_goes_on_when_the_cap_is_raised(plan_ahead: bool) -> None:
    harness = CoreHarness(plan_ahead=plan_ahead)
    request_id = harness.submit([1, 2, 3], 3, seed=1, hold_at_cap=True)
    harness.drain()
    assert not harness.core.has_work
    assert harness.step() == []
    assert harness.core.stats().num_preemptions == 0
    assert harness.last(request_id).held_at_cap
    assert harness.last(request_id).token_ids == ()
    assert len(harness.tokens(request_id)) == 3
    assert sum(output.held_at_cap for output in harness.answers[request_id, 0].outputs) == 1
    harness.raise_cap(request_id, 7)
    harness.drain()
    assert len(harness.tokens(request_id)) == 7
    harness.raise_cap(request_id, 7)
    harness.drain()

    assert harness.finish(request_id) == "length"
    assert harness.last(request_id).token_ids == ()
    harness.check_ended()


@BOTH_WAYS
def test_a_cap_that_is_raised_in_time_never_holds(plan_ahead: bool) -> None:
    harness = CoreHarness(plan_ahead=plan_ahead)
    request_id = harness.submit([1, 2, 3], 3, hold_at_cap=True)
    harness.step()
    harness.raise_cap(request_id, 6)
    harness.step()
    harness.raise_cap(request_id, 6)  # the last word: no more
    harness.drain()

    assert harness.finish(request_id) == "length"
    assert len(harness.tokens(request_id)) == 6
    assert not any(output.held_at_cap for output in harness.answers[request_id, 0].outputs)
    harness.check_ended()


def test_nothing_is_held_at_the_end_of_window_or_pool() -> None:
    harness = CoreHarness(window=20)
    request_id = harness.submit(prompt_of(10), 4, hold_at_cap=True)
    harness.drain()
    harness.raise_cap(request_id, 1000)
    harness.drain()

    assert harness.finish(request_id) == "length"
    assert len(harness.tokens(request_id)) == 10
    harness.check_ended()


def test_a_request_without_hold_ignores_a_raised_cap() -> None:
    harness = CoreHarness()
    request_id = harness.submit([1, 2, 3], 4)
    harness.step()
    harness.raise_cap(request_id, 9)
    harness.raise_cap("unknown", 9)
    harness.drain()

    assert len(harness.tokens(request_id)) == 4
    harness.check_ended()


def test_a_held_choice_yields_its_blocks_rather_than_stop_everybody() -> None:
    harness = CoreHarness(num_blocks=6)
    held = harness.submit(prompt_of(60), 4, seed=1, hold_at_cap=True)
    harness.drain()
    other = harness.submit(prompt_of(60, 300), 20)
    harness.drain()

    assert harness.finish(other) == "length"
    assert harness.core.stats().num_preemptions == 1
    harness.raise_cap(held, 8)
    harness.drain()
    harness.raise_cap(held, 8)
    harness.drain()
    assert len(harness.tokens(held)) == 8
    harness.check_ended()


def test_a_held_choice_keeps_its_blocks_while_others_can_run() -> None:
    harness = CoreHarness(num_blocks=12)
    harness.submit(prompt_of(60), 4, hold_at_cap=True, request_id="held")
    harness.drain()
    for i in range(3):
        harness.submit(prompt_of(60, 100 + i * 100), 20)
    harness.drain()
    assert harness.core.stats().num_preemptions == 0
    harness.abort("held")
    harness.drain()
    harness.check_ended()


# --- choices ----------------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_choices_find_the_prompt_of_the_first_one(plan_ahead: bool) -> None:
    harness = CoreHarness(plan_ahead=plan_ahead, max_step_tokens=40)
    request_id = harness.submit(prompt_of(70), 5, num_choices=4)
    harness.drain()

    assert [harness.last(request_id, choice).num_cached_tokens for choice in range(4)] == [0, 64, 64, 64]
    assert len({tuple(harness.tokens(request_id, choice)) for choice in range(4)}) == 4
    harness.check_ended()


@BOTH_WAYS
def test_choices_run_without_a_prefix_cache(plan_ahead: bool) -> None:
    harness = CoreHarness(plan_ahead=plan_ahead, prefix_cache=False, max_step_tokens=400)
    request_id = harness.submit(prompt_of(70), 5, num_choices=4)
    harness.drain()

    assert [harness.last(request_id, choice).num_cached_tokens for choice in range(4)] == [0] * 4
    assert len(harness.runner.plans[0].new_rows) == 4  # nobody waits for nothing
    harness.check_ended()


def test_choices_share_a_drawn_seed_and_differ_by_their_number() -> None:
    harness = CoreHarness()
    harness.submit([1, 2, 3], 5, num_choices=3)
    harness.drain()
    rows = [row for plan in harness.runner.plans for row in plan.new_rows]

    assert {1} == {row.sampling.seed for row in rows}
    assert {0, 1, 2} == {row.choice for row in rows}


# --- planned ahead ----------------------------------------------------------------------------------------------------


def test_steps_are_in_flight_two_at_a_time_when_planned_ahead() -> None:
    harness = CoreHarness(plan_ahead=True)
    harness.submit([1, 2, 3], 10)
    harness.drain()

    assert harness.runner.most_in_flight == 2
    assert len(harness.runner.plans) == 10  # the last one is certain, so nothing is planned behind it


def test_a_row_that_ended_in_the_step_before_is_dropped_and_its_place_freed_a_step_later() -> None:
    harness = CoreHarness(plan_ahead=True, eos_every=4, max_sequences=2)
    request_id = harness.submit([1, 2, 3], 60, seed=1)
    while harness.finish(request_id) is None:
        harness.step()

    assert harness.core.has_work  # the step behind it is in flight, with the row in it
    assert harness.core.stats().num_running == 0
    assert harness.core.stats().num_free_blocks < 64
    assert harness.step() == []
    assert len(harness.runner.plans) == len(harness.tokens(request_id)) + 1
    harness.check_ended()


def test_after_an_arrival_the_step_in_flight_is_applied_before_the_next_is_planned() -> None:
    harness = CoreHarness(plan_ahead=True)
    harness.submit([1, 2, 3], 30)
    harness.step()
    harness.step()
    assert len(harness.runner.plans) == 3
    newcomer = harness.submit([4, 5, 6], 30)
    harness.step()
    assert len(harness.runner.plans) == 3
    harness.step()

    assert len(harness.runner.plans[3].chunks) == 2
    assert harness.tokens(newcomer)
    harness.drain()
    harness.check_ended()


def test_an_engine_that_waits_has_no_work_and_says_nothing() -> None:
    harness = CoreHarness()

    assert not harness.core.has_work
    assert harness.step() == []
    assert not harness.runner.plans


@BOTH_WAYS
def test_a_failure_of_the_runner_is_not_swallowed(plan_ahead: bool) -> None:
    harness = CoreHarness(plan_ahead=plan_ahead)
    harness.submit([1, 2, 3], 30)
    harness.step()
    harness.runner.fail_at = 2

    with pytest.raises(RuntimeError, match="the device is gone"):
        harness.step()
