from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec import structs
from sim_kit import COST, arrival, machine, workload

from engine.sched.cost import PROFILES
from engine.sim.policies import policy_names
from engine.sim.simulator import Machine, simulate
from engine.sim.workload import FIRST_SHARED_ID, Segment
from engine.sim.workloads import make_workload, workload_names


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    run = simulate(workload(arrival(0, "red", 20, 3)), "fcfs", machine())

    first = 1000 + 20 * 100
    assert run.requests[0].token_us == [first, first + 1200, first + 2400]
    assert run.requests[0].ttft_us == first
    assert run.requests[0].ended_us == run.ended_us == first + 2400
    assert [(step.start_us, step.end_us, step.useful_us) for step in run.steps] == [
        (0, 3000, 2000),
        (3000, 4200, 200),
        (4200, 5400, 200),
    ]


def test_time_to_the_first_token_counts_from_the_arrival_in_the_middle_of_a_step() -> None:
    run = simulate(workload(arrival(0, "red", 40, 1), arrival(1, "blue", 10, 1, at_us=700)), "fcfs", machine())

    late = run.requests[1]
    assert (late.arrived_us, late.submitted_us) == (700, 5000)
    assert late.ttft_us == 5000 + 2000 - 700


def test_the_clock_jumps_over_idle_time() -> None:
    run = simulate(workload(arrival(0, "red", 10, 1, at_us=3_000_000)), "fcfs", machine())

    assert [step.start_us for step in run.steps] == [3_000_000]


@pytest.mark.parametrize("policy", ["fcfs", "vtc"])
@pytest.mark.parametrize("plan_ahead", [False, True])
def test_charges_add_up_to_step_time_less_the_fixed_part_and_to_each_request_s_work(
    policy: str, plan_ahead: bool
) -> None:
    made = structs.replace(make_workload("on-off", 3, PROFILES["cpu"]), until_us=60_000_000)
    run = simulate(made, policy, Machine(cost=PROFILES["cpu"], plan_ahead=plan_ahead))

    useful: dict[int, int] = {}
    for step in run.steps:
        assert sum(charge.cost_us for charge in step.charges) == step.end_us - step.start_us - run.cost.fixed_us
        for charge in step.charges:
            useful[charge.id] = useful.get(charge.id, 0) + charge.useful_us
    finished = [trace for trace in run.requests.values() if trace.finish == "length"]
    assert len(finished) > 100
    for trace in finished:
        assert useful[trace.arrival.id] == trace.arrival.work_us(run.cost)
        assert len(trace.token_us) == trace.arrival.num_output_tokens
    assert all(a.end_us <= b.start_us for a, b in pairwise(run.steps))


def test_work_that_is_done_again_after_a_preemption_is_no_service() -> None:
    """Two answers of 60 tokens in a pool for 96: one has to yield."""
    arrivals = (arrival(0, "red", 16, 60), arrival(1, "blue", 16, 60))
    run = simulate(workload(*arrivals, max_sequences=2), "fcfs", machine(kv_tokens=96))

    total_us = sum(charge.cost_us for step in run.steps for charge in step.charges)
    useful_us = sum(step.useful_us for step in run.steps)
    assert useful_us == sum(a.work_us(COST) for a in arrivals)
    assert total_us > useful_us
    assert run.requests[1].held_us > 0
    assert run.requests[0].held_us == 0


def test_an_arrival_may_wait_for_the_end_of_another() -> None:
    first = arrival(0, "red", 10, 1)
    run = simulate(workload(first, arrival(1, "red", 10, 1, at_us=500, after=0)), "fcfs", machine())

    assert run.requests[0].ended_us == 2000
    assert run.requests[1].arrived_us == 2500


def test_a_conversation_finds_its_earlier_turns_in_the_cache() -> None:
    first = arrival(0, "red", 64, 33)
    second = arrival(1, "red", 0, 1, prompt=(*first.prompt, first.answer, Segment(FIRST_SHARED_ID + 9, 20)), after=0)
    other = arrival(2, "blue", 0, 1, prompt=first.prompt, at_us=5_000_000)
    run = simulate(workload(first, second, other), "fcfs", machine())

    assert run.requests[1].num_cached_tokens == 96  # all but the last of 97 tokens had their KV
    assert run.requests[2].num_cached_tokens == 0, "another team's"


def test_a_canceled_request_ends_when_it_is_canceled_and_starts_its_follower() -> None:
    arrivals = (
        arrival(0, "red", 10, 5000, cancel_after_us=4000),
        arrival(1, "red", 10, 1, after=0),
        arrival(2, "blue", 10, 1, cancel_after_us=9_000_000),
    )
    run = simulate(workload(*arrivals), "fcfs", machine())

    canceled = run.requests[0]
    assert (canceled.finish, canceled.held_us) == ("abort", 0)
    assert canceled.ended_us is not None
    assert 4000 <= canceled.ended_us <= 4000 + 1400
    assert run.requests[1].arrived_us == canceled.ended_us
    assert run.requests[2].finish == "length"


def test_a_request_that_can_never_run_is_noted() -> None:
    run = simulate(workload(arrival(0, "red", 5000, 1), arrival(1, "red", 5, 1)), "fcfs", machine(kv_tokens=1024))

    assert run.requests[0].refused == "over_capacity"
    assert run.requests[1].finish == "length"


def test_who_holds_a_slot_and_gets_less_than_it_wants_is_backlogged() -> None:
    arrivals = [arrival(i, "red", 30, 2) for i in range(3)]
    run = simulate(workload(*arrivals, max_sequences=2), "fcfs", machine(max_step_tokens=40))

    assert [step.backlog for step in run.steps[:2]] == [(1,), ()], "the third waits for a slot only"


@pytest.mark.parametrize("name", workload_names())
def test_a_seed_gives_the_same_workload_and_another_seed_another(name: str) -> None:
    cost = PROFILES["cpu"]

    assert make_workload(name, 1, cost) == make_workload(name, 1, cost)
    assert make_workload(name, 1, cost) != make_workload(name, 2, cost)


@pytest.mark.parametrize("policy", policy_names())
def test_the_same_seed_gives_the_same_plans_byte_for_byte(policy: str) -> None:
    cost = PROFILES["cpu"]
    first, other = [structs.replace(make_workload("flood", seed, cost), until_us=10_000_000) for seed in (1, 2)]
    digests = {simulate(first, policy, Machine(cost=cost)).plans_digest for _ in range(2)}

    assert len(digests) == 1
    assert simulate(other, policy, Machine(cost=cost)).plans_digest not in digests
