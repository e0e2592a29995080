"""The ideal against cases worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from sim_kit import arrival, run_of, step, trace, workload

from engine.sim.fluid import MAX_EVENTS, MAX_LEAVES, Fluid, Lag, TooLargeError, largest_lag

A, B, C = ("org", "a"), ("org", "b"), ("org", "c")
FLAT = {("org",): 1, A: 1, B: 2, C: 4}


def test_work_is_shared_by_weight_among_those_that_have_some() -> None:
    fluid = Fluid(FLAT)
    fluid.arrive(A, 100)
    fluid.arrive(C, 100)
    fluid.serve(50)

    assert (fluid.served[A], fluid.served[B], fluid.served[C]) == (10, 0, 40)
    assert fluid.served[("org",)] == 50


def test_who_has_enough_leaves_the_rest_to_the_others_at_that_moment() -> None:
    fluid = Fluid(FLAT)
    fluid.arrive(A, 100)
    fluid.arrive(B, 10)
    fluid.serve(30)

    assert (fluid.served[A], fluid.served[B]) == (20, 10)  # 15 at 1:2, then 15 more for a alone
    assert fluid.backlog == {A: 80, B: 0, C: 0}


def test_fractions_are_exact() -> None:
    fluid = Fluid(FLAT)
    for leaf in (A, B, C):
        fluid.arrive(leaf, 1)
    fluid.serve(1)

    assert fluid.served[A] == Fraction(1, 7)
    assert sum(fluid.served[leaf] for leaf in (A, B, C)) == 1


def test_a_sibling_s_share_stays_in_its_organization() -> None:
    weights = {("x",): 1, ("y",): 1, ("x", "1"): 1, ("x", "2"): 3, ("y", "3"): 1}
    fluid = Fluid(weights)
    fluid.arrive(("x", "1"), 100)
    fluid.arrive(("y", "3"), 100)
    fluid.serve(40)
    fluid.arrive(("x", "2"), 100)
    fluid.serve(40)

    assert fluid.served == {("x",): 40, ("y",): 40, ("x", "1"): 25, ("x", "2"): 15, ("y", "3"): 40}


def test_it_serves_no_more_than_there_is() -> None:
    fluid = Fluid(FLAT)
    fluid.arrive(A, 5)
    fluid.serve(50)

    assert fluid.served[A] == 5


def test_it_says_when_a_case_is_too_large_for_exact_numbers() -> None:
    with pytest.raises(TooLargeError, match="leaves"):
        Fluid({("org",): 1, **{("org", str(i)): 1 for i in range(MAX_LEAVES + 1)}})
    fluid = Fluid(FLAT)
    for _ in range(MAX_EVENTS):
        fluid.arrive(A, 1)
    with pytest.raises(TooLargeError, match="events"):
        fluid.serve(1)


def test_lag_is_how_far_a_node_falls_behind_the_ideal() -> None:
    arrivals = [arrival(0, "red", 10, 1), arrival(1, "blue", 10, 1), arrival(2, "late", 10, 1, at_us=2)]
    steps = [step(0, 1, (0, 300)), step(1, 2, (0, 101)), step(2, 3, (1, 401)), step(3, 4, (2, 500))]
    traces = [trace(arrivals[0], (2,)), trace(arrivals[1], (3,)), trace(arrivals[2], (4,))]
    run = run_of(workload(*arrivals), traces, steps, 4)

    # In the ideal red and blue have half of 401 each by the second step; blue was given nothing until then.
    assert largest_lag(run) == Lag(201, ("org", "blue"), 2)


def test_a_lone_team_is_never_behind() -> None:
    made = arrival(0, "red", 10, 1)

    assert largest_lag(run_of(workload(made), [trace(made, (1,))], [step(0, 1, (0, 1000))], 1)) == Lag()
