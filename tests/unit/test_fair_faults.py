"""More faults of other schedulers: credit for newcomers, cold prompts, double accounting, starved classes, idle share.

What each does to people under the policy that has the fault is shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
from core_harness import CoreHarness
from fair_days import Arrive, Day, Player
from fair_harness import FairHarness, path_of
from fair_measures import distance_us, ledger_us
from fair_peers import buckets, fcfs, prefix, priority, vtc

from engine.messages import PathNode, RequestClass
from engine.sched.cost import CostModel
from engine.sched.fair.policy import FairShare
from engine.sched.policy import Policy
from engine.sim import baselines

MakePolicy = Callable[..., Policy]
CLASSES: tuple[RequestClass, ...] = ("interactive", "standard", "batch")


# --- a newcomer gets no credit for the time before it came (VTC's lift looks at waiting requests only) ----------------


def lead_of_newcomer(make_policy: MakePolicy, *, visitor: bool, num_slots: int = 32) -> tuple[int, int]:
    """A team that has only running requests, for long; then a newcomer, and both are greedy: the newcomer's lead in
    service after 40 steps of that, and the bound."""
    harness = FairHarness(make_policy=make_policy, max_sequences=num_slots)
    if visitor:
        harness.submit("o/visitor/k", 30, 1)
        harness.run(3)
    for _ in range(num_slots // 8):
        harness.submit("o/old/k", 30, 100_000)
    harness.run(5)
    if visitor:  # comes back for a moment, and is the last that left the queue
        harness.submit("o/visitor/k", 30, 1)
    harness.run(3000)
    before = harness.served_us.copy()
    for i in range(200):
        harness.submit("o/new/k", 500 + 31 * i % 300, 4)
        harness.submit("o/old/k", 500 + 31 * i % 300, 4)
    harness.run(100)
    new, old = (harness.served_us["o", f"o/{team}"] - before["o", f"o/{team}"] for team in ("new", "old"))
    return new - old, distance_us(harness)


@pytest.mark.parametrize("visitor", [False, True])
def test_a_newcomer_beside_requests_that_only_run_gets_no_credit(visitor: bool) -> None:
    lead_us, bound_us = lead_of_newcomer(FairShare, visitor=visitor)

    assert abs(lead_us) <= bound_us


def test_vtc_gives_a_newcomer_the_credit_of_the_last_one_that_left() -> None:
    lead_us, bound_us = lead_of_newcomer(vtc, visitor=True)

    assert lead_us > 2 * bound_us


# --- a cold prompt beside a hot prefix --------------------------------------------------------------------------------


def cold_beside_hot(make_policy: MakePolicy, *, num_hot: int, with_cold: bool = True) -> tuple[int, float]:
    """A team whose prompts have 4,096 tokens in common and 32 of their own, so many before each step; at the tenth a
    cold prompt of another one. Steps until its first token, and the hot team's hit rate."""
    harness = FairHarness(make_policy=make_policy)
    head = list(range(100_000, 104_096))
    hot = [harness.submit("o/hot/k", prompt=head, output=1)]
    harness.drain()
    cold, waited = None, 0
    for step in range(120):
        own = [range(50 * step + i, 50 * step + i + 32) for i in range(num_hot)]
        hot += [harness.submit("o/hot/k", prompt=[*head, *each], output=2) for each in own]
        if step == 10 and with_cold:
            cold = harness.submit("o/cold/k", 512, 1)
        harness.step()
        waited += cold is not None and not harness.seen[cold].token_us
    requests = [harness.of(each) for each in hot[1:] if harness.of(each).num_computed]
    return waited, sum(r.num_cached_tokens for r in requests) / sum(r.num_prompt_tokens for r in requests)


@pytest.mark.parametrize("num_hot", [1, 4, 10])
def test_a_cold_prompt_starts_within_the_windows_work_and_the_hot_team_still_hits(num_hot: int) -> None:
    waited, hit_rate = cold_beside_hot(FairShare, num_hot=num_hot)
    _, alone = cold_beside_hot(FairShare, num_hot=num_hot, with_cold=False)

    # 512 tokens are four steps of work here: eight at half the engine, and the other team may be ahead by Λ.
    assert waited <= 2 * 4 + 4 + 1
    assert hit_rate >= 0.99 * alone


@pytest.mark.parametrize("make_policy", [fcfs, prefix])
def test_fcfs_and_longest_prefix_starve_a_cold_prompt_beside_a_hot_flood(make_policy: MakePolicy) -> None:
    waited, _ = cold_beside_hot(make_policy, num_hot=10)

    assert waited > 13


# --- what is lost and done again is not charged again -----------------------------------------------------------------


def test_a_prompt_computed_again_is_told_and_charged_once() -> None:
    """100 prompt tokens and 50 output tokens, forced out once after some of them."""
    core = CoreHarness(num_blocks=17, policy="fair", prefix_cache=False)
    core.submit([1 + i for i in range(100)], 110)
    victim = core.submit([500 + i for i in range(100)], 50)
    core.drain()
    last = core.last(victim)
    assert core.core.stats().num_preemptions
    assert (last.num_prompt_tokens, last.num_delivered_tokens) == (100, 50)
    assert last.num_cached_tokens <= 100
    assert last.num_computed_tokens + last.num_cached_tokens == 149

    harness = FairHarness(num_blocks=17)
    harness.submit("o/older/k", 100, 110)
    harness.submit("o/victim/k", 100, 50)
    harness.drain()
    assert harness.counters.num_preemptions
    assert ledger_us(harness, "o") == sum(
        harness.cost.marginal_us(0, 100 + num_output - 1, 100) for num_output in (110, 50)
    )


def test_vtc_charges_what_is_computed_again_once_more() -> None:
    harness = FairHarness(num_blocks=17, make_policy=vtc)
    harness.submit("o/older/k", 100, 110)
    harness.submit("o/victim/k", 100, 50)
    harness.drain()
    assert harness.counters.num_preemptions

    charged_us = harness.policy._inner._counters["o/victim"] / baselines._SCALE
    assert charged_us > 1.1 * harness.served_us["o", "o/victim"]


# --- classes of one team ----------------------------------------------------------------------------------------------


def least_share(
    make_policy: MakePolicy, loads: dict[RequestClass, int], watched: RequestClass, *, num_before: int = 0
) -> float:
    """Of a window of 200 steps the smallest part that the watched class gets, which always has work waiting.

    Args:
        loads: of each other class so many percent of what the engine can do arrive, a little before each step.
        num_before: requests of theirs that are in the queue before the watched ones come.
    """
    harness = FairHarness(
        make_policy=make_policy,
        cost=CostModel(
            fixed_us=5_000, prefill_token_ns=40_000, prefill_context_ps=0, decode_token_ns=40_000, decode_context_ps=0
        ),
    )
    for i in range(num_before):
        harness.submit("o/team/k", 500 + i % 7, 1, request_class=min(loads))
    for i in range(120):
        harness.submit("o/team/k", 12_000 + 37 * i, 1, request_class=watched)
    owed = dict.fromkeys(loads, 0.0)
    windows = []
    got, seen_us = [], 0
    for step in range(320):
        room = harness.limit_us(-1) // 40 if harness.targets_us else 0
        for request_class, percent in loads.items():
            owed[request_class] += percent / 100 * room
            while owed[request_class] >= 500:
                length = 450 + 10 * (step % 11)
                owed[request_class] -= length
                harness.submit("o/team/k", length, 1, request_class=request_class)
        harness.step()
        now_us = harness.served_us["o", "o/team", watched]
        got.append(now_us - seen_us)
        seen_us = now_us
    for start in (60, 110):
        span = slice(start, start + 200)
        windows.append(sum(got[span]) / sum(each - harness.cost.fixed_us for each in harness.step_us[span]))
    return min(windows)


CLASS_WEIGHTS = {"interactive": 4, "standard": 2, "batch": 1}


@pytest.mark.parametrize(("overload", "watched"), list(permutations(CLASSES, 2)))
def test_no_class_is_starved_by_another_at_110_percent(overload: RequestClass, watched: RequestClass) -> None:
    """Batch gets 5 % and more in every window of 200 steps; in fact each class gets what its weight says."""
    share = least_share(FairShare, {overload: 110}, watched)

    assert share >= 0.05
    assert share >= 0.9 * CLASS_WEIGHTS[watched] / (CLASS_WEIGHTS[watched] + CLASS_WEIGHTS[overload])


@pytest.mark.parametrize("order", list(permutations(CLASSES, 2)))
def test_batch_keeps_its_share_beside_two_overloads_at_once(order: tuple[RequestClass, RequestClass]) -> None:
    loads = {each: 110 for each in order if each != "batch"}

    assert least_share(FairShare, loads, "batch") >= 0.8 / (1 + sum(CLASS_WEIGHTS[each] for each in loads))


def test_priority_starves_batch_and_so_does_a_queue_before_it_with_fcfs_and_vtc() -> None:
    assert least_share(priority, {"interactive": 110}, "batch") < 0.05
    for make_policy in (fcfs, vtc):
        assert least_share(make_policy, {"interactive": 110}, "batch", num_before=1000) < 0.05
    assert least_share(FairShare, {"interactive": 110}, "batch", num_before=1000) > 0.05


# --- the share of those who are not there -----------------------------------------------------------------------------


def part_of_capacity(make_policy: MakePolicy, *, num_slots: int = 16) -> float:
    """What one team with a quarter of the weights gets while the others have nothing to do."""
    harness = FairHarness(make_policy=make_policy, max_sequences=num_slots)
    for _ in range(3):
        harness.submit(path_of("o/idle/k", 1, 3), 20, 1)
    harness.drain()
    for i in range(300):
        harness.submit(path_of("o/lone/k", 1, 1), 900 + 7 * i, 20)
    harness.run(20)
    before_us, num_before = harness.served_us["o", "o/lone"], len(harness.step_us)
    harness.run(200)
    room_us = sum(harness.limit_us(i) for i in range(num_before, len(harness.step_us)))
    return (harness.served_us["o", "o/lone"] - before_us) / room_us


def test_a_lone_key_has_all_of_the_engine() -> None:
    assert part_of_capacity(FairShare) >= 0.98


def test_a_bucket_caps_a_lone_key_at_its_share() -> None:
    capped: MakePolicy = buckets({"o/idle": 3, "o/lone": 1})

    assert part_of_capacity(capped) < 0.5


# --- a large head and small ones behind it ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_small", [1, 2])
def test_a_request_that_waits_for_blocks_is_not_passed_for_ever_by_small_ones(num_small: int) -> None:
    """64 blocks, a runner that holds 44 until it ends, a head that needs 40, and small ones before every step."""
    harness = FairHarness(num_blocks=64)
    runner = harness.submit("o/a/k", 16 * 40, 50)
    harness.run(20)
    head = harness.submit("o/b/k", 16 * 40, 1)
    ended_at = None
    for step in range(400):
        for _ in range(num_small):
            harness.submit((PathNode("o"), PathNode(f"o/s{step % 5}"), PathNode("k")), 20, 2)
        harness.step()
        if ended_at is None and harness.seen[runner].ended_us is not None:
            ended_at = step
        if harness.of(head).table is not None:
            break
    assert ended_at is not None
    assert step <= ended_at + 6


def test_parked_prompts_go_on_though_a_larger_one_waits_for_the_blocks_that_they_hold() -> None:
    """Two are parked half-read, small ones and a long one are before them in the deal, and all rows are free."""
    steps = (
        (Arrive((0, 0), "interactive", 3900, 1), Arrive((0,), "interactive", 3900, 1)),
        (Arrive((0, 2), "interactive", 40, 1, num=5),),
        (Arrive((0, 3), "interactive", 40, 8),),
        (),
        (),
        (Arrive((1,), "interactive", 3900, 1),),
    )
    player = Player(Day((7, 32), steps, 0, max_sequences=3, num_blocks=700, window_steps=2))
    harness = player.play()
    while harness.scheduler.num_runnable:
        assert harness.step()


def test_a_step_cut_short_for_a_newcomer_finishes_it_though_decodes_of_others_are_due() -> None:
    """The last to come finds a step that is cut to its size, and twenty decodes that have sat out for long enough."""
    steps = (
        (Arrive((0, 0), "standard", 5, 4, num=2), Arrive((1,), "batch", 1000, 1, num=5)),
        (Arrive((0,), "standard", 1000, 9), Arrive((1, 0), "standard", 5, 9, num=21)),
    )
    player = Player(Day((10, 5, 32, 5), steps, 0, max_sequences=24, window_steps=2))
    harness = player.play()
    num_short = 0
    for _ in range(30):
        harness.step()
        if harness.step_us[-1] < harness.targets_us[-1] // 2 and harness.left.residents:
            num_short += 1
            assert any(len(harness.seen[r.request_id].token_us) == 1 for r in harness.steps[-1].requests)
    assert num_short
