"""What a request waits for under fair share, and how long it is told that this will take."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fair_harness import FairHarness, path_of

from engine.messages import RequestClass
from engine.request import RequestState
from engine.standing import Standing


def standing_of(harness: FairHarness, request_id: str) -> Standing:
    return harness.policy.standing(harness.of(request_id), harness.now_us)


def flooded(num: int = 40, *, max_sequences: int = 8) -> FairHarness:
    """All slots are one team's, which has more to do than it will get done."""
    harness = FairHarness(max_sequences=max_sequences)
    for _ in range(num):
        harness.submit("acme/flood/k", 50, 400)
    harness.run(10)
    return harness


def test_who_runs_waits_for_nothing() -> None:
    harness = flooded()
    assert standing_of(harness, "r0") == Standing(expected_wait_us=0)


def test_a_flood_waits_behind_itself() -> None:
    harness = flooded()
    standing = standing_of(harness, "r39")
    assert standing.resource == "slot"
    assert standing.ahead == {"interactive": 31}
    assert standing.ahead_of_team == tuple(f"r{i}" for i in range(8, 39))


def test_a_quiet_team_has_nobody_ahead_and_its_slot_within_a_step() -> None:
    harness = flooded()
    quiet = harness.submit("acme/quiet/k", 50, 5)
    standing = standing_of(harness, quiet)
    assert (standing.resource, standing.ahead, standing.ahead_of_team) == ("slot", {}, ())
    assert standing.expected_wait_us == 47_500, "the promise of its class, less the margin: a step at most"
    harness.step()
    assert harness.of(quiet).row is not None


def test_the_flood_is_told_of_the_quiet_team_by_number_alone() -> None:
    harness = flooded()
    quiet = [harness.submit("acme/quiet/k", 50, 5, request_class="batch") for _ in range(20)]
    standing = standing_of(harness, "r8")
    # The flood holds 8 slots: the quiet team would get as many and one more before it.
    assert standing.ahead == {"batch": 8}
    assert standing.ahead_of_team == ()
    assert standing_of(harness, quiet[3]).ahead_of_team == tuple(quiet[:3])


@pytest.mark.parametrize("weight", [1, 2, 3])
def test_a_weight_lets_so_many_more_pass(weight: int) -> None:
    """Until both hold as much by weight as the flood will with its ninth slot; that one goes to who is behind."""
    harness = flooded()
    for _ in range(40):
        harness.submit(path_of("acme/quiet/k", 1, weight), 50, 5)
    assert 8 * weight <= standing_of(harness, "r8").ahead["interactive"] <= 9 * weight


def test_who_is_parked_waits_for_a_slot_before_the_rest_of_its_own() -> None:
    harness = flooded()
    for _ in range(4):
        harness.submit("acme/quiet/k", 50, 100)
    harness.run(5)
    parked = [r for r in harness.seen if harness.of(r).state is RequestState.PARKED]
    assert len(parked) == 4
    for i, request_id in enumerate(parked):
        standing = standing_of(harness, request_id)
        assert (standing.resource, standing.ahead_of_team) == ("slot", tuple(parked[:i]))
    assert standing_of(harness, "r8").ahead_of_team == tuple(parked)


def test_short_blocks_are_named_and_nothing_is_said_of_the_wait() -> None:
    harness = FairHarness(max_sequences=8, num_blocks=20)
    harness.submit("acme/large/k", 250, 40)
    harness.run(2)
    first, second = (harness.submit("acme/other/k", 200, 5) for _ in range(2))
    harness.run(2)
    for request_id in (first, second):
        standing = standing_of(harness, request_id)
        assert (standing.resource, standing.expected_wait_us) == ("blocks", None)
    assert standing_of(harness, second).ahead_of_team == (first,)


def test_a_prompt_that_is_left_out_waits_for_its_turn_until_its_siblings_have_caught_up() -> None:
    harness = FairHarness(max_sequences=8)
    ahead = harness.submit("acme/ahead/k", 20_000, 5)
    harness.run(120)
    for _ in range(3):
        harness.submit(path_of("acme/behind/k", 1, 20), 20_000, 5)
    told: list[tuple[int, Standing]] = []
    for _ in range(400):
        harness.step()
        standing = standing_of(harness, ahead)
        if standing.resource:
            told.append((harness.now_us, standing))
        elif told:
            break
    assert told, "it never was left out"
    since_us, first = told[0]
    assert first.resource == "step"
    assert first.ahead == {"interactive": 1}
    assert first.ahead_of_team == (), "no names of another team"
    assert first.expected_wait_us is not None
    waited_us = harness.now_us - since_us
    assert waited_us / 3 <= first.expected_wait_us <= 3 * waited_us


@pytest.mark.parametrize("num_teams", [1, 3])
@pytest.mark.parametrize("lengths", ["alike", "spread", "long tail"])
def test_the_wait_that_was_told_is_about_the_wait_that_came(num_teams: int, lengths: str) -> None:
    """Answers end long before their caps, so how long they get can only be told from others."""
    dice = random.Random(3)
    draws: dict[str, Callable[[], int]] = {
        "alike": lambda: 70,
        "spread": lambda: dice.randint(20, 120),
        "long tail": lambda: 1 + int(dice.expovariate(1 / 70)),
    }
    harness = FairHarness(max_sequences=16)
    num_outputs: dict[str, int] = {}
    for i in range(300):
        request_class: RequestClass = "interactive" if i % 4 else "batch"
        path = f"acme/t{i % num_teams}/k"
        request_id = harness.submit(path, dice.randint(50, 300), 3000, request_class=request_class)
        num_outputs[request_id] = draws[lengths]()

    def step() -> None:
        harness.step()
        for request_id, num in num_outputs.items():
            if harness.of(request_id).num_output_tokens >= num:
                harness.abort(request_id)

    for _ in range(250):
        step()
    told = {
        request_id: (harness.now_us, standing_of(harness, request_id))
        for request_id, seen in harness.seen.items()
        if seen.request.state is RequestState.WAITING
    }
    waited: dict[str, int] = {}
    while len(waited) < len(told):
        before_us = harness.now_us
        step()
        for request_id in told.keys() - waited.keys():
            if harness.of(request_id).state is not RequestState.WAITING:
                waited[request_id] = before_us - told[request_id][0]
    far = [request_id for request_id in told if sum(told[request_id][1].ahead.values()) >= 60]
    assert len(far) > 100
    ratios = sorted((told[request_id][1].expected_wait_us or 0) / waited[request_id] for request_id in far)
    assert 1 / 2.2 <= ratios[len(ratios) // 2] <= 2.2
    assert ratios[0] >= 1 / 4.5, "16 residents are a small sample of how long answers get"
    assert ratios[-1] <= 4.5


def test_nothing_is_said_of_the_wait_before_anybody_has_written_anything() -> None:
    harness = FairHarness(max_sequences=2)
    for _ in range(5):
        harness.submit("acme/a/k", 3000, 50)
    harness.run(1)
    assert standing_of(harness, "r4").expected_wait_us is None
    harness.run(80)
    assert standing_of(harness, "r4").expected_wait_us is not None
