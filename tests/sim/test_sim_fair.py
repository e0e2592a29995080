"""What fair share promises, on the named workloads and both kinds of machine: every figure of the comparison."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec import structs

from engine.sim import figures
from engine.sim.comparison import gap_bound_us
from engine.sim.fluid import largest_lag
from engine.sim.gaps import largest_gap
from engine.sim.simulator import Machine, simulate
from engine.sim.trace import Run
from engine.sim.workload import Arrival
from engine.sim.workloads import make_workload, workload_names

pytestmark = pytest.mark.slow

FIRST_US = {"cpu": 15_000_000, "gpu8b": 8_000_000}

PROFILES = ("cpu", "gpu8b")
PROMISE_US = 50_000
"""Of the class that all of them have."""


@cache
def run_of(workload: str, profile: str, policy: str = "fair", alone: str = "", step_us: int = 0) -> Run:
    """
    Args:
        alone: only this team's requests.
        step_us: what a step may take, instead of what the classes promise.
    """
    machine = Machine.of_profile(profile)
    made = make_workload(workload, 1, machine.cost)
    return simulate(made.only(alone) if alone else made, policy, machine)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("workload", workload_names())
def test_no_gap_is_above_the_bound_nobody_is_refused_and_little_throughput_is_lost(workload: str, profile: str) -> None:
    run = run_of(workload, profile)

    assert largest_gap(run).gap_us <= gap_bound_us(run)
    assert figures.num_refused(run) == 0
    assert figures.throughput(run) >= 0.97 * figures.throughput(run_of(workload, profile, "fcfs"))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("workload", ["shares", "nested", "equal", "vtc-overload"])
def test_teams_that_always_want_more_are_served_by_weight(workload: str, profile: str) -> None:
    run = run_of(workload, profile)
    shares = figures.shares(run)
    ratios = [shares[team].ratio for team in run.workload.greedy]

    assert figures.jain_index(ratios) >= 0.99
    assert max(abs(ratio - 1) for ratio in ratios) <= 0.01


@pytest.mark.parametrize("profile", PROFILES)
def test_who_splits_into_keys_or_sessions_gains_nothing(profile: str) -> None:
    run = run_of("split", profile)
    shares = figures.shares(run)

    assert shares["keys"].ratio <= 1.01
    assert shares["sessions"].ratio <= 1.01


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_quiet_team_beside_a_flood_waits_little_longer_than_alone(profile: str, seed: int) -> None:
    machine = Machine.of_profile(profile)
    made = make_workload("flood", seed, machine.cost)
    run = simulate(made, "fair", machine)
    alone = figures.latency(simulate(made.only("quiet"), "fair", machine), "quiet").ttft_p99_us
    together = figures.latency(run, "quiet").ttft_p99_us

    assert alone is not None
    assert together is not None
    assert together <= 1.25 * alone + figures.step_us(run, 99)


@pytest.mark.parametrize("profile", PROFILES)
def test_streams_beside_three_long_prompts_keep_their_promise(profile: str) -> None:
    together = figures.latency(run_of("three-long", profile), "stream").inter_token_p99_us
    alone = figures.latency(run_of("three-long", profile, alone="stream"), "stream").inter_token_p99_us

    assert together is not None
    assert alone is not None
    assert together <= max(PROMISE_US, 1.5 * alone)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_long_prompt_under_a_flood_takes_little_more_than_twice_as_long_as_alone(profile: str) -> None:
    together = figures.latency(run_of("long-prompt", profile), "long").ttft_p99_us
    alone = figures.latency(run_of("long-prompt", profile, alone="long"), "long").ttft_p99_us

    assert together is not None
    assert alone is not None
    assert together <= 1.2 * 2 * alone


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("weight", "flood_weight"), [(3, 1), (8, 1), (1, 2)])
def test_a_long_prompt_under_a_flood_takes_as_long_as_its_weight_says(
    profile: str, weight: int, flood_weight: int
) -> None:
    machine = Machine.of_profile(profile)
    made = make_workload("long-prompt", 1, machine.cost)
    weighed = structs.replace(
        made, arrivals=tuple(_weighed(each, weight if each.team == "long" else flood_weight) for each in made.arrivals)
    )
    together = figures.latency(simulate(weighed, "fair", machine), "long").ttft_p99_us
    alone = figures.latency(run_of("long-prompt", profile, alone="long"), "long").ttft_p99_us

    assert together is not None
    assert alone is not None
    assert together <= 1.2 * (weight + flood_weight) / weight * alone


def _weighed(arrival: Arrival, weight: int) -> Arrival:
    """With another weight of its team."""
    org, team, *below = arrival.path
    return structs.replace(arrival, path=(org, structs.replace(team, weight=weight), *below))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("workload", ["flood", "shares", "nested", "equal", "on-off", "vtc-overload"])
def test_no_node_is_further_behind_the_exact_ideal_than_the_bound(workload: str, profile: str) -> None:
    """The beginnings of workloads, as long as rational numbers can follow."""
    machine = Machine.of_profile(profile)
    made = make_workload(workload, 1, machine.cost)
    run = simulate(structs.replace(made, until_us=FIRST_US[profile]), "fair", machine)

    assert len(run.steps) > 150
    assert 0 < largest_lag(run).lag_us <= gap_bound_us(run)


@pytest.mark.parametrize("profile", PROFILES)
def test_prefixes_are_found_as_often_as_by_the_order_made_for_it(profile: str) -> None:
    assert figures.hit_rate(run_of("agents", profile)) >= 0.95 * figures.hit_rate(run_of("agents", profile, "prefix"))


@pytest.mark.parametrize("profile", PROFILES)
def test_batch_gets_its_part_of_its_own_team_at_all_times(profile: str) -> None:
    run = run_of("classes", profile)
    served = figures.served_by_class(run)

    assert served["batch"] / sum(served.values()) == pytest.approx(1 / 7, rel=0.05)
    second_us = 5_000_000
    for from_us in range(run.workload.measure_from_us, run.ended_us - second_us, second_us):
        window = structs.replace(run.workload, measure_from_us=from_us)
        part = Run(
            workload=window,
            policy=run.policy,
            cost=run.cost,
            requests=run.requests,
            steps=[step for step in run.steps if from_us <= step.start_us < from_us + second_us],
            ended_us=from_us + second_us,
            plans_digest="",
        )
        assert figures.served_by_class(part)["batch"] > 0


@pytest.mark.parametrize("profile", PROFILES)
def test_a_lone_team_gets_all(profile: str) -> None:
    alone = run_of("shares", profile, alone="one")

    assert figures.throughput(alone) >= 0.99 * figures.throughput(run_of("shares", profile, "fcfs", alone="one"))
