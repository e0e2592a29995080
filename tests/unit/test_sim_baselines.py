"""What each baseline decides, on cases small enough to follow. Steps: 1 ms, 0.1 ms a prompt token, 0.2 ms an output."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from sim_kit import COST, arrival, machine, workload

from engine.errors import ConfigError
from engine.sim.simulator import Machine, simulate
from engine.sim.trace import Run
from engine.sim.workload import FIRST_SHARED_ID, Arrival, Segment


def _order(run: Run) -> list[int]:
    """Arrivals in the order of their first tokens."""
    return sorted(run.requests, key=lambda arrival_id: run.requests[arrival_id].token_us[0])


def _simulate(policy: str, *arrivals: Arrival, **more: Any) -> Run:
    return simulate(workload(*arrivals, **{"max_sequences": 1, **more}), policy, machine())


def test_priority_takes_the_higher_class_first_however_long_the_lower_waits() -> None:
    arrivals = [
        arrival(0, "red", 10, 1),
        arrival(1, "red", 10, 1, request_class="batch"),
        *(arrival(i, "red", 10, 1, at_us=1000 * i) for i in range(2, 9)),
        arrival(9, "red", 10, 1, at_us=500, request_class="standard"),
    ]

    assert _order(_simulate("priority", *arrivals)) == [0, 2, 3, 4, 5, 6, 7, 8, 9, 1]


def test_longest_prefix_lets_who_begins_like_others_overtake() -> None:
    shared = Segment(FIRST_SHARED_ID + 99, 64)
    arrivals = [
        arrival(0, "red", 0, 1, prompt=(shared,)),
        arrival(1, "red", 64, 1, at_us=1),
        arrival(2, "red", 0, 1, at_us=2, prompt=(shared, Segment(FIRST_SHARED_ID + 2, 40))),
        arrival(3, "blue", 0, 1, at_us=3, prompt=(shared,)),  # another team's cache
    ]
    run = _simulate("prefix", *arrivals)

    assert _order(run) == [0, 2, 1, 3]
    assert [run.requests[i].num_cached_tokens for i in range(4)] == [0, 0, 64, 0]


def test_longest_prefix_knows_answers_too() -> None:
    first = arrival(0, "red", 32, 33)
    longer = (*first.prompt, first.answer, Segment(FIRST_SHARED_ID + 5, 8))
    shorter = (*first.prompt, Segment(FIRST_SHARED_ID + 6, 8))
    arrivals = [
        first,
        arrival(1, "red", 0, 1, at_us=1, prompt=shorter),
        arrival(2, "red", 0, 1, at_us=2, prompt=longer),
    ]

    assert _order(_simulate("prefix", *arrivals)) == [0, 2, 1]


def test_vtc_serves_whose_team_has_had_the_least_by_weight() -> None:
    red = [arrival(i, "red", 20, 1) for i in range(4)]
    blue = [arrival(10 + i, "blue", 20, 1, weight=2) for i in range(6)]

    assert _order(_simulate("vtc", *red, *blue)) == [0, 10, 11, 1, 12, 13, 2, 14, 15, 3]


def test_vtc_gives_no_credit_for_having_been_away() -> None:
    red = [arrival(i, "red", 20, 1) for i in range(30)]
    blue = [arrival(40 + i, "blue", 20, 1, at_us=50_000) for i in range(4)]
    order = _order(_simulate("vtc", *red, *blue))

    first = order.index(40)
    assert {order[first + i] for i in (0, 2, 4, 6)} == {40, 41, 42, 43}, "by turns, not at once"


def test_vtc_does_not_take_back_a_slot() -> None:
    arrivals = [arrival(0, "red", 10, 200), arrival(1, "blue", 10, 1, at_us=100)]
    run = _simulate("vtc", *arrivals)

    assert run.requests[0].ended_us is not None
    assert run.requests[1].token_us[0] > run.requests[0].ended_us


def test_a_bucket_holds_a_lone_team_to_its_part_of_the_engine() -> None:
    """Two teams of equal weight, one of which never comes: half of the time is lost, after one burst."""
    red = [arrival(i, "red", 400, 1) for i in range(200)]
    away = arrival(900, "blue", 10, 1, at_us=9_999_999)
    run = simulate(workload(*red, away, max_sequences=1, until_us=9_000_000), "bucket", machine())

    served_us = sum(step.useful_us for step in run.steps)
    assert served_us == pytest.approx(1_000_000 + 9_000_000 / 2, rel=0.02)


def test_baselines_yield_blocks_by_arrival_and_come_back() -> None:
    arrivals = [arrival(0, "red", 16, 60), arrival(1, "blue", 16, 60)]
    for policy in ("priority", "prefix", "vtc", "bucket"):
        run = simulate(workload(*arrivals, max_sequences=2), policy, machine(kv_tokens=96))

        assert {trace.finish for trace in run.requests.values()} == {"length"}
        assert run.requests[0].held_us == 0
        assert run.requests[1].held_us > 0


@pytest.mark.parametrize(("request_class", "step_us"), [("interactive", 50_000), ("standard", 150_000)])
def test_steps_are_as_long_as_the_tightest_class_allows(request_class: str, step_us: int) -> None:
    arrivals = [
        arrival(0, "red", 3000, 1, request_class="batch"),
        arrival(1, "red", 3000, 1, request_class=request_class),
    ]
    run = _simulate("fcfs", *arrivals, max_sequences=2)
    times = [step.end_us - step.start_us for step in run.steps]

    assert set(times[:2]) == {step_us}
    assert max(times) == step_us


def test_steps_grow_when_the_promise_is_gone() -> None:
    arrivals = [arrival(0, "red", 100, 1), arrival(1, "red", 20_000, 1, request_class="batch")]
    run = simulate(workload(*arrivals, max_sequences=2), "fcfs", Machine(cost=COST, max_step_tokens=100_000))

    assert [step.end_us - step.start_us for step in run.steps] == [50_000, 500_000, 500_000, 500_000, 465_000]


def test_a_token_that_takes_longer_than_a_step_is_computed_all_the_same() -> None:
    slow = structs.replace(COST, fixed_us=60_000)
    run = simulate(workload(arrival(0, "red", 2, 3)), "fcfs", Machine(cost=slow))

    assert [step.num_tokens for step in run.steps] == [1, 1, 1, 1]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="lottery"):
        simulate(workload(arrival(0, "red", 1, 1)), "lottery", machine())
