"""What each team is told to have: figures on cases made by hand, and sums that must hold on any."""

from __future__ import annotations

import random

import pytest
from fair_harness import FairHarness, path_of

from engine.messages import Stats, decode_from_engine, encode
from engine.request import RequestState
from engine.sched.fair.teams import RECENT_US
from engine.standing import TeamShare

TARGET_US = 47_500
LAG_US = 16 * TARGET_US


def teams_of(harness: FairHarness) -> dict[str, TeamShare]:
    return {share.team_id: share for share in harness.policy.teams()}


def test_a_share_is_the_product_of_weight_by_weight_present_over_the_levels() -> None:
    harness = FairHarness()
    for path in (path_of("a/a1/k", 1, 3), path_of("a/a2/k", 1, 1), path_of("b/b1/k", 2, 7)):
        harness.submit(path, 5000, 5)
    shares = teams_of(harness)

    assert {team: share.org_id for team, share in shares.items()} == {"a/a1": "a", "a/a2": "a", "b/b1": "b"}
    assert [shares[team].entitled_ppm for team in ("a/a1", "a/a2", "b/b1")] == [250_000, 83_333, 666_666]


def test_who_has_no_requests_takes_no_part_in_the_shares_of_others() -> None:
    harness = FairHarness()
    quiet = harness.submit(path_of("a/quiet/k", 1, 3), 50, 1)
    busy = harness.submit(path_of("a/busy/k", 1, 1), 50, 500)
    assert teams_of(harness)["a/busy"].entitled_ppm == 250_000
    while harness.seen[quiet].ended_us is None:
        harness.step()

    assert harness.seen[busy].ended_us is None
    assert teams_of(harness)["a/busy"].entitled_ppm == 1_000_000
    assert teams_of(harness)["a/quiet"].entitled_ppm == 0


def test_a_weight_that_is_set_shows_at_once() -> None:
    harness = FairHarness()
    for team in ("red", "blue"):
        harness.submit(f"acme/{team}/k", 5000, 5)
    harness.policy.set_weight("acme/red", 4)

    assert [share.entitled_ppm for share in harness.policy.teams()] == [800_000, 200_000]


def test_slots_waiting_and_parked_are_counted_by_team() -> None:
    harness = FairHarness(max_sequences=4)
    for _ in range(6):
        harness.submit("acme/flood/k", 60, 100)
    harness.run(10)
    flood = teams_of(harness)["acme/flood"]
    assert (flood.num_slots, flood.num_waiting, flood.num_parked) == (4, 2, 0)
    harness.submit("acme/quiet/k", 30, 50)
    harness.step()

    flood, quiet = (teams_of(harness)[team] for team in ("acme/flood", "acme/quiet"))
    assert (flood.num_slots, flood.num_waiting, flood.num_parked) == (3, 3, 1)
    assert (quiet.num_slots, quiet.num_waiting, quiet.num_parked) == (1, 0, 0)
    assert flood.num_parked == sum(harness.of(each).state is RequestState.PARKED for each in harness.seen)


def test_a_request_that_lost_its_slot_at_its_cap_counts_as_parked_and_waiting() -> None:
    harness = FairHarness(max_sequences=1)
    paused = harness.submit("acme/red/k", 60, 100)
    harness.run(3)
    harness.scheduler.pause(harness.of(paused))
    red = teams_of(harness)["acme/red"]
    assert (red.num_slots, red.num_waiting, red.num_parked) == (1, 0, 0)
    harness.submit("acme/blue/k", 60, 100)
    harness.step()

    red = teams_of(harness)["acme/red"]
    assert (red.num_slots, red.num_waiting, red.num_parked) == (0, 1, 1)


def test_slots_beyond_a_team_s_share_are_borrowed_from_those_who_leave_theirs() -> None:
    harness = FairHarness(max_sequences=16)
    for _ in range(40):
        harness.submit("acme/flood/k", 60, 400)
    harness.run(20)
    alone = teams_of(harness)["acme/flood"]
    assert (alone.num_slots, alone.num_borrowed_slots, alone.num_lent_slots) == (16, 0, 0), "alone all of it is its own"
    harness.submit("acme/quiet/k", 30, 100)
    harness.run(2)

    flood, quiet = (teams_of(harness)[team] for team in ("acme/flood", "acme/quiet"))
    assert (flood.num_slots, flood.num_borrowed_slots, flood.num_lent_slots) == (15, 7, 0)
    assert (quiet.num_slots, quiet.num_borrowed_slots, quiet.num_lent_slots) == (1, 0, 7)


def test_a_slot_that_nobody_holds_is_not_lent() -> None:
    harness = FairHarness(max_sequences=16)
    for i in range(10):
        harness.submit("acme/flood/k", 60 + i, 400)
    harness.submit("acme/quiet/k", 30, 400)
    harness.run(20)

    flood, quiet = (teams_of(harness)[team] for team in ("acme/flood", "acme/quiet"))
    assert (flood.num_slots, quiet.num_slots) == (10, 1)
    assert (flood.num_borrowed_slots, quiet.num_lent_slots) == (2, 2), "of seven that it lacks five are free"


def test_more_teams_than_slots_neither_borrow_nor_lend() -> None:
    harness = FairHarness(max_sequences=4)
    for i in range(40):
        harness.submit(f"acme/t{i % 10}/k", 60 + i, 100)
    harness.run(20)

    shares = harness.policy.teams()
    assert sum(share.num_slots for share in shares) == 4
    assert all(share.num_borrowed_slots == share.num_lent_slots == 0 for share in shares)


def test_lag_is_positive_behind_the_siblings_and_negative_ahead_of_them() -> None:
    harness = FairHarness()
    for team in ("red", "blue"):
        for i in range(80):
            harness.submit(f"acme/{team}/k", 3000 + 97 * i, 20)
    harness.run(50)
    before = teams_of(harness)
    harness.policy.charge_external("acme/red", 1_000_000)
    shares = teams_of(harness)

    assert shares["acme/red"].lag_us == pytest.approx(before["acme/red"].lag_us - 1_000_000, abs=1)
    assert shares["acme/red"].lag_us < -800_000
    harness.policy.charge_external("acme/blue", 10_000_000)
    harness.step()
    assert teams_of(harness)["acme/red"].lag_us >= 0, "the clock is that of the one who is furthest behind"
    assert teams_of(harness)["acme/blue"].lag_us < -8_000_000


def test_lag_without_backlog_is_never_more_than_will_be_kept() -> None:
    """Two that never wait, one of which is served far more: the other one has no claim to the difference."""
    harness = FairHarness()
    for _ in range(8):
        harness.submit("acme/much/k", 50, 3000)
    harness.submit("acme/little/k", 50, 3000)
    harness.run(1000)
    much, little = (teams_of(harness)[team] for team in ("acme/much", "acme/little"))

    assert much.served_us - little.served_us > 2 * LAG_US
    assert little.lag_us == LAG_US


def test_a_team_that_is_ahead_is_told_of_after_its_requests() -> None:
    harness = FairHarness()
    for i in range(80):
        harness.submit("acme/red/k", 3000 + 97 * i, 20)
        harness.submit("acme/blue/k", 3000 + 97 * i, 20)
    harness.run(20)
    harness.policy.charge_external("acme/blue", 60 * RECENT_US)
    for request_id, seen in harness.seen.items():
        if seen.request.path[1].id == "acme/blue":
            harness.abort(request_id)
    while harness.now_us < 1_000_000 + 3 * RECENT_US:
        harness.step()

    blue = teams_of(harness)["acme/blue"]
    assert blue.lag_us < -RECENT_US
    assert (blue.entitled_ppm, blue.num_waiting, blue.num_slots) == (0, 0, 0)


def test_served_is_what_was_charged_whatever_became_of_the_team_meanwhile() -> None:
    harness = FairHarness(max_sequences=8)
    ended = [harness.submit("acme/coming and going/k", 700, 5)]
    busy = harness.submit("acme/busy/k", 300, 100_000)
    while harness.now_us < 8 * RECENT_US:
        harness.step()
        if harness.seen[ended[-1]].ended_us is not None and len(ended) < 4 and not harness.now_us // RECENT_US % 2:
            ended.append(harness.submit("acme/coming and going/k", 700, 5))
    shares = teams_of(harness)
    assert shares["acme/busy"].served_us == harness.seen[busy].served_us
    assert "acme/coming and going" not in shares, "not served for long"
    assert not list(harness.policy.tree.named("acme/coming and going"))
    ended.append(harness.submit("acme/coming and going/k", 700, 5))
    harness.run(30)

    assert harness.seen[ended[-1]].ended_us is not None
    served_us = sum(harness.seen[each].served_us for each in ended)
    assert teams_of(harness)["acme/coming and going"].served_us == served_us


def test_who_was_served_lately_is_told_of_without_requests() -> None:
    harness = FairHarness()
    quiet = harness.submit("acme/quiet/k", 50, 2)
    harness.submit("acme/busy/k", 50, 100_000)
    while harness.seen[quiet].ended_us is None:
        harness.step()
    assert teams_of(harness)["acme/quiet"] == TeamShare(
        org_id="acme", team_id="acme/quiet", served_us=harness.seen[quiet].served_us
    )
    ended_us = harness.now_us
    while harness.now_us < ended_us + RECENT_US - TARGET_US:
        harness.step()
        assert "acme/quiet" in teams_of(harness)
    while harness.now_us < ended_us + 2 * RECENT_US + TARGET_US:
        harness.step()
    assert "acme/quiet" not in teams_of(harness)


def test_what_was_taken_back_in_the_same_step_is_not_served() -> None:
    """Too few blocks for all, so that requests are preempted after they were granted something."""
    harness = FairHarness(max_sequences=8, num_blocks=40)
    for i in range(12):
        harness.submit(f"acme/t{i % 3}/k", 100 + 13 * i, 60)
    while harness.scheduler.num_runnable:
        harness.step()
    assert harness.counters.num_preemptions

    for team, share in teams_of(harness).items():
        assert share.served_us == harness.served_us["acme", team]


@pytest.mark.parametrize("seed", range(10))
def test_sums_hold_over_random_loads(seed: int) -> None:
    drawn = random.Random(seed)
    harness = FairHarness(max_sequences=drawn.choice([3, 8, 17]), num_blocks=drawn.choice([400, 100_000]))
    for _ in range(150):
        for _ in range(drawn.choice([0, 0, 1, 3])):
            path = path_of(f"o{drawn.randrange(3)}/t{drawn.randrange(6)}/k", drawn.randint(1, 3), drawn.randint(1, 5))
            harness.submit(path, drawn.randint(1, 900), drawn.randint(1, 40))
        if drawn.random() < 0.2 and harness.seen:
            harness.abort(drawn.choice(list(harness.seen)))
        harness.step()
        shares = harness.policy.teams()
        assert len({(share.org_id, share.team_id) for share in shares}) == len(shares)
        live = [seen.request for seen in harness.seen.values() if seen.ended_us is None]
        assert sum(share.num_slots for share in shares) == sum(request.row is not None for request in live)
        assert sum(share.num_waiting for share in shares) == sum(request.row is None for request in live)
        parked = sum(request.row is None and request.table is not None for request in live)
        assert sum(share.num_parked for share in shares) == parked
        assert sum(share.num_lent_slots for share in shares) <= sum(share.num_borrowed_slots for share in shares)
        assert all(not (share.num_lent_slots and share.num_borrowed_slots) for share in shares)
        if live:
            assert 1_000_000 - len(shares) < sum(share.entitled_ppm for share in shares) <= 1_000_000


def test_it_travels_with_the_engine_s_stats() -> None:
    harness = FairHarness()
    harness.submit("acme/red/k", 50, 5)
    harness.step()
    stats = Stats(engine_id="e", teams=harness.policy.teams())

    assert decode_from_engine(encode(stats)) == stats
