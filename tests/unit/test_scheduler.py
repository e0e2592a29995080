"""The mechanism of a step: budget, admission, preemption, and what a policy is told of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from core_harness import CoreHarness

from engine.request import Request
from engine.sched.fcfs import Fcfs
from engine.sched.plan import StepPlan
from engine.sched.policy import Offers


def prompt_of(num_tokens: int, first: int) -> list[int]:
    return [first + i for i in range(num_tokens)]


def tokens_by_row(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.row, chunk.num_tokens) for chunk in plan.chunks]


def test_decodes_come_first_then_begun_prompts_then_newcomers() -> None:
    harness = CoreHarness(max_step_tokens=20)
    harness.submit(prompt_of(4, 1), 10)
    harness.submit(prompt_of(40, 100), 10)
    harness.submit(prompt_of(6, 200), 10)
    for _ in range(4):
        harness.step()

    assert tokens_by_row(harness.runner.plans[0]) == [(0, 4), (1, 16)]
    assert tokens_by_row(harness.runner.plans[1]) == [(0, 1), (1, 19)]
    assert tokens_by_row(harness.runner.plans[2]) == [(0, 1), (1, 5), (2, 6)]
    assert tokens_by_row(harness.runner.plans[3]) == [(0, 1), (1, 1), (2, 1)]


def test_nobody_passes_the_head_of_the_queue() -> None:
    harness = CoreHarness(num_blocks=8, max_step_tokens=200)
    harness.submit(prompt_of(60, 1), 10)
    large = harness.submit(prompt_of(90, 200), 2)
    small = harness.submit([5], 2)
    while not harness.finish("r0"):
        harness.step()
        assert not harness.tokens(large)
        assert not harness.tokens(small)
    harness.drain()
    harness.check_ended()


def test_newcomers_are_not_let_in_on_blocks_that_running_prompts_still_need() -> None:
    """Four prompts of 14 blocks and 24 tokens of output fill 64 blocks; a fifth one must wait for the first to end."""
    harness = CoreHarness(num_blocks=64, max_step_tokens=64)
    for i in range(4):
        harness.submit(prompt_of(224, 1 + i * 240), 24)
    for _ in range(5):
        harness.step()
    fifth = harness.submit(prompt_of(240, 3), 4)
    harness.drain()

    assert harness.core.stats().num_preemptions == 0
    assert harness.finish(fifth) == "length"
    harness.check_ended()


@pytest.mark.parametrize("plan_ahead", [False, True], ids=["in-turn", "ahead"])
def test_the_latest_yields_to_older_ones_and_resumes_with_the_same_tokens(plan_ahead: bool) -> None:
    harness = CoreHarness(num_blocks=10, plan_ahead=plan_ahead)
    ids = [harness.submit(prompt_of(30, 1 + i * 100), 60, seed=i) for i in range(3)]
    ends = []
    while harness.core.has_work:
        ends += [output.request_id for output in harness.step() if output.finish]

    assert ids == ends
    assert harness.core.stats().num_preemptions > 0
    timings = harness.last(ids[0]).timings
    assert timings is not None
    assert timings.preempted_us == 0
    timings = harness.last(ids[2]).timings
    assert timings is not None
    assert timings.preempted_us > 0
    harness.check_ended()


def test_what_a_preempted_request_computes_again_is_counted_apart() -> None:
    harness = CoreHarness(num_blocks=10, prefix_cache=False)
    for i in range(3):
        harness.submit(prompt_of(30, 1 + i * 100), 60)
    harness.drain()
    stats = harness.core.stats()

    assert stats.num_prefill_tokens == 90
    assert stats.num_decode_tokens == 3 * 59
    assert stats.num_recomputed_tokens > 0
    num_computed = sum(plan.num_tokens for plan in harness.runner.plans)
    assert num_computed == 90 + 3 * 59 + stats.num_recomputed_tokens


def test_a_preempted_request_finds_what_is_left_of_it_in_the_cache() -> None:
    with_cache, without = (CoreHarness(num_blocks=10, prefix_cache=cache) for cache in (True, False))
    for harness in (with_cache, without):
        for i in range(3):
            harness.submit(prompt_of(30, 1 + i * 100), 60, seed=i)
        harness.drain()
        harness.check_ended()

    assert with_cache.core.stats().num_recomputed_tokens < without.core.stats().num_recomputed_tokens
    for key, answer in with_cache.answers.items():
        assert answer.token_ids == without.answers[key].token_ids


def test_a_preemption_waits_until_nothing_is_in_flight() -> None:
    """No plan that follows another in flight may give away blocks which that one writes."""
    harness = CoreHarness(num_blocks=6, plan_ahead=True)
    for i in range(2):
        harness.submit(prompt_of(30, 1 + i * 100), 40, seed=i)
    preempted_with = []
    while harness.core.has_work:
        before = harness.core.stats()
        in_flight = len(harness.runner.plans) - before.busy_us // 1000
        harness.step()
        if harness.core.stats().num_preemptions > before.num_preemptions:
            preempted_with.append(in_flight)

    assert preempted_with
    assert {0} == set(preempted_with)
    harness.check_ended()


def test_the_oldest_never_waits_for_blocks() -> None:
    harness = CoreHarness(num_blocks=6, max_sequences=6)
    oldest = harness.submit(prompt_of(20, 1), 60)
    for i in range(5):
        harness.submit(prompt_of(14, 100 + i * 100), 30)
    harness.step()
    while harness.finish(oldest) is None:
        num_before = len(harness.tokens(oldest))
        harness.step()
        assert num_before + 1 == len(harness.tokens(oldest))
    harness.drain()
    harness.check_ended()


class Quanta(Fcfs):
    """Offers to everybody in turn, 4 tokens at a time; notes what it is charged and what is taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[Request] = []
        self.charged: dict[str, int] = {}
        self.num_revoked = 0

    def admit(self, request: Request) -> None:
        self.known.append(request)

    def forget(self, request: Request) -> None:
        self.known.remove(request)

    def preempted(self, request: Request) -> None:
        """It stays known."""

    def offers(self, budget: int, now_us: int) -> Offers:
        is_anyone_served = True
        while is_anyone_served:
            is_anyone_served = False
            for request in self.known:
                granted = yield request, 4
                self.charged[request.request_id] = self.charged.get(request.request_id, 0) + granted
                is_anyone_served |= granted > 0

    def revoke(self, request: Request, num_tokens: int) -> None:
        self.charged[request.request_id] -= num_tokens
        self.num_revoked += num_tokens

    def victims(self, claimant: Request) -> Iterator[Request]:
        return (r for r in reversed(self.known[:]) if r.row is not None and r.arrival > claimant.arrival)


def test_the_grants_of_one_request_in_one_step_add_up_to_one_chunk() -> None:
    policy = Quanta()
    harness = CoreHarness(policy=policy, max_step_tokens=22)
    harness.submit(prompt_of(30, 1), 3)
    harness.submit(prompt_of(6, 100), 3)
    harness.step()

    assert tokens_by_row(harness.runner.plans[0]) == [(0, 16), (1, 6)]
    harness.drain()
    assert policy.charged == {"r0": 32, "r1": 8}
    harness.check_ended()


def test_charges_are_taken_back_when_a_plan_made_ahead_is_dropped_or_a_victim_was_in_the_plan() -> None:
    policy = Quanta()
    harness = CoreHarness(policy=policy, num_blocks=7, plan_ahead=True, prefix_cache=False)
    for i in range(3):
        harness.submit(prompt_of(20, 1 + i * 100), 50, seed=i)
    harness.drain()

    assert policy.num_revoked > 0
    assert sum(plan.num_tokens for plan in harness.runner.plans) == sum(policy.charged.values())
    harness.check_ended()


class YoungestFirst(Quanta):
    """Offers whole gaps, the youngest first; who is older may still take their blocks."""

    def offers(self, budget: int, now_us: int) -> Offers:
        for each in reversed(self.known[:]):
            granted = yield each, each.num_wanted
            self.charged[each.request_id] = self.charged.get(each.request_id, 0) + granted


def test_a_victim_that_was_in_the_plan_gives_its_budget_and_its_charge_back() -> None:
    policy = YoungestFirst()
    harness = CoreHarness(policy=policy, num_blocks=4, max_step_tokens=40, prefix_cache=False)
    oldest = harness.submit(prompt_of(30, 1), 20)
    harness.step()
    youngest = harness.submit(prompt_of(15, 100), 20)
    for _ in range(2):
        harness.step()
    assert harness.tokens(youngest)
    assert policy.num_revoked == 0
    harness.step()

    assert policy.num_revoked == 1
    assert harness.core.stats().num_preemptions == 1
    assert tokens_by_row(harness.runner.plans[-1]) == [(0, 1)]
    assert len(harness.tokens(oldest)) == 4
    harness.drain()
    assert sum(plan.num_tokens for plan in harness.runner.plans) == sum(policy.charged.values())
    harness.check_ended()
