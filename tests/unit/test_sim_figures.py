"""Each figure against a trace made by hand."""

from __future__ import annotations

import pytest
from sim_kit import arrival, path, run_of, step, trace, workload

from engine.sim.figures import (
    Share,
    entitlements,
    hit_rate,
    jain_index,
    latency,
    longest_held_us,
    num_refused,
    percentile,
    shares,
    step_us,
    throughput,
)
from engine.sim.gaps import Gap, largest_gap


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile(range(1, 101), 50) == 50
    assert percentile(range(1, 101), 99) == 99
    assert percentile([7, 3], 50) == 3
    assert percentile([7, 3], 99) == 7
    assert percentile([], 50) is None


def test_jain_index() -> None:
    assert jain_index([3, 3, 3]) == 1.0
    assert jain_index([1, 0, 0, 0]) == 0.25
    assert jain_index([1, 2]) == pytest.approx(0.9)
    assert jain_index([]) == 1.0


def test_latency_of_a_team_counts_those_that_still_wait_and_not_those_of_others() -> None:
    arrivals = [
        arrival(0, "red", 10, 3, at_us=100),
        arrival(1, "red", 10, 3, at_us=200),
        arrival(2, "blue", 10, 3),
        arrival(3, "red", 10, 3, at_us=300),
    ]
    traces = [
        trace(arrivals[0], (500, 900, 1000)),
        trace(arrivals[1]),
        trace(arrivals[2], (9000,)),
        trace(arrivals[3], ended_us=400),  # canceled before its first token
    ]
    told = latency(run_of(workload(*arrivals), traces, [], 10_000), "red")

    assert (told.ttft_p50_us, told.ttft_p99_us) == (400, 9800)
    assert (told.inter_token_p50_us, told.inter_token_p99_us) == (100, 400)


def test_shares_count_from_where_it_is_measured_and_greedy_teams_want_all() -> None:
    arrivals = [arrival(0, "red", 10, 1), arrival(1, "blue", 10, 1, weight=3), arrival(2, "little", 1, 1, at_us=1000)]
    traces = [trace(arrivals[0], ended=False), trace(arrivals[1], ended=False), trace(arrivals[2], (2000,))]
    steps = [step(0, 1000, (0, 700)), step(1000, 2000, (0, 300), (1, 400), (2, 100)), step(2000, 3000, (1, 300))]
    made = workload(*arrivals, greedy=("red", "blue"), measure_from_us=1000)

    assert shares(run_of(made, traces, steps, 3000)) == {
        "red": Share(300, 250),
        "blue": Share(700, 750),
        "little": Share(100, 100),
    }


def test_who_comes_later_has_no_claim_to_what_was_served_before() -> None:
    """Two seconds; red is alone in the first."""
    arrivals = [arrival(0, "red", 10, 1), arrival(1, "blue", 20_000, 1, at_us=1_000_000)]
    traces = [trace(arrivals[0], ended=False), trace(arrivals[1], ended=False)]
    steps = [step(0, 1_000_000, (0, 800)), step(1_000_000, 2_000_000, (0, 100), (1, 700))]

    assert shares(run_of(workload(*arrivals, greedy=("red",)), traces, steps, 2_000_000)) == {
        "red": Share(900, 1200),
        "blue": Share(700, 400),
    }


def test_entitlements_go_down_the_tree_and_what_is_not_wanted_goes_to_siblings() -> None:
    weights = {("a",): 1, ("a", "x"): 1, ("a", "y"): 3, ("b",): 2, ("b", "z"): 5}
    plenty = {("a", "x"): 10**6, ("a", "y"): 10**6, ("b", "z"): 10**6}

    assert entitlements(weights, plenty, 1200) == {("a", "x"): 100, ("a", "y"): 300, ("b", "z"): 800}
    assert entitlements(weights, {**plenty, ("b", "z"): 200}, 1200) == {
        ("a", "x"): 250,
        ("a", "y"): 750,
        ("b", "z"): 200,
    }
    assert entitlements(weights, {**plenty, ("a", "y"): 10}, 1200) == {("a", "x"): 390, ("a", "y"): 10, ("b", "z"): 800}


def test_throughput_counts_what_the_cache_saved_in_the_measured_time() -> None:
    arrivals = [arrival(0, "red", 100, 1), arrival(1, "red", 100, 1)]
    traces = [trace(arrivals[0], (500,), num_cached_tokens=50), trace(arrivals[1], (3000,), num_cached_tokens=20)]
    steps = [step(0, 1000, (0, 900)), step(1000, 5000, (1, 2000))]

    run = run_of(workload(*arrivals, measure_from_us=1000), traces, steps, 6000)
    assert throughput(run) == (2000 + 20 * 100) / 5000
    assert hit_rate(run) == 70 / 200
    assert step_us(run, 50) == 1000
    assert step_us(run, 99) == 4000


def test_what_never_started_has_no_part_in_the_hit_rate() -> None:
    made = arrival(0, "red", 100, 1)

    assert hit_rate(run_of(workload(made), [trace(made)], [], 10)) == 0.0


def test_longest_hold_and_refusals() -> None:
    arrivals = [arrival(i, "red", 10, 1) for i in range(3)]
    traces = [
        trace(arrivals[0], (5,), held_us=70),
        trace(arrivals[1], (5,), held_us=90),
        trace(arrivals[2], refused="over_capacity"),
    ]
    run = run_of(workload(*arrivals), traces, [], 10)

    assert longest_held_us(run) == 90
    assert num_refused(run) == 1


def test_the_gap_is_how_far_services_by_weight_move_while_both_are_backlogged() -> None:
    arrivals = [arrival(0, "red", 10, 1), arrival(1, "blue", 10, 1, weight=2)]
    steps = [
        step(0, 1, (0, 9000), backlog=(0,)),  # blue is not there: does not count
        step(1, 2, (0, 100), backlog=(0, 1)),  # from here
        step(2, 3, (0, 300), backlog=(0, 1)),  # red gains 300, by weight
        step(3, 4, (1, 1000), backlog=(0, 1)),  # blue gains 500: the range is 500
        step(4, 5, (0, 5000), backlog=(1,)),  # red has all it wanted: does not count
        step(5, 6, (0, 5000), backlog=(0, 1)),
        step(6, 7, (0, 499), backlog=(0, 1)),
    ]
    run = run_of(workload(*arrivals), [trace(made) for made in arrivals], steps, 7)

    assert largest_gap(run) == Gap(500, (("org", "blue"), ("org", "red")), 4)


def test_gaps_are_taken_between_siblings_only_and_keys_of_one_class() -> None:
    arrivals = [
        arrival(0, "red", 10, 1, path=path("red", org="a")),
        arrival(1, "blue", 10, 1, path=path("blue", org="b")),
        arrival(2, "red", 10, 1, path=path("red", org="a"), request_class="batch"),
    ]
    steps = [step(0, 1, backlog=(0, 1, 2)), step(1, 2, (0, 10), (1, 3), (2, 50), backlog=(0, 1, 2))]
    run = run_of(workload(*arrivals), [trace(made) for made in arrivals], steps, 2)

    assert largest_gap(run) == Gap(57, (("a",), ("b",)), 2)


def test_nobody_backlogged_together_has_no_gap() -> None:
    made = arrival(0, "red", 10, 1)

    assert largest_gap(run_of(workload(made), [trace(made)], [step(0, 1, (0, 5), backlog=(0,))], 1)) == Gap()
