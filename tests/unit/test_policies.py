"""The order of the two policies: first come, first served, and static batches."""

from __future__ import annotations

import pytest
from core_harness import CoreHarness

from engine.request import Request, RequestState
from engine.sampling_params import SamplingParams
from engine.sched.fcfs import Fcfs


def prompt_of(num_tokens: int, first: int) -> list[int]:
    return [first + i for i in range(num_tokens)]


def test_static_batches_let_nobody_in_before_the_last_of_the_batch_has_ended() -> None:
    harness = CoreHarness(policy="static", max_sequences=3)
    caps = [2, 9, 5, 4, 1]
    for i, cap in enumerate(caps):
        harness.submit(prompt_of(4, 1 + 10 * i), cap)
    sizes = []
    while harness.core.has_work:
        harness.step()
        sizes.append(len(harness.runner.plans[-1].chunks))

    assert sizes == [3, 3, 2, 2, 2, 1, 1, 1, 1, 2, 1, 1, 1]
    harness.check_ended()


def test_static_batches_skip_requests_that_ended_in_the_queue() -> None:
    harness = CoreHarness(policy="static", max_sequences=1)
    first, second, third = (harness.submit([i + 1], 3) for i in range(3))
    harness.step()
    harness.abort(second)
    harness.drain()

    assert [harness.finish(r) for r in (first, second, third)] == ["length", "abort", "length"]
    harness.check_ended()


def request(arrival: int, num_tokens: int) -> Request:
    return Request(
        request_id=f"r{arrival}",
        choice=0,
        arrival=arrival,
        path=(),
        request_class="standard",
        cache_salt="",
        token_ids=list(range(num_tokens)),
        sampling=SamplingParams(seed=1),
        stop_ids=frozenset(),
        output_cap=5,
        output_limit=5,
        hold_at_cap=False,
        arrival_us=0,
    )


def seat(policy: Fcfs, requests: list[Request]) -> None:
    """Let the policy believe that these run."""
    for each in requests:
        policy.admit(each)
    offers = policy.offers(1000, 0)
    next(offers)
    for i, each in enumerate(requests):
        each.row, each.state = i, RequestState.RUNNING
        if i < len(requests) - 1:
            offers.send(1)
    with pytest.raises(StopIteration):
        offers.send(1)


def unseat(policy: Fcfs, victim: Request) -> None:
    victim.row, victim.state = None, RequestState.WAITING
    policy.preempted(victim)


def test_fcfs_victims_are_the_claimants_juniors_the_latest_first() -> None:
    policy = Fcfs()
    requests = [request(arrival, 9) for arrival in range(5)]
    seat(policy, requests)

    assert list(policy.victims(requests[1])) == [requests[4], requests[3], requests[2]]
    assert list(policy.victims(requests[4])) == []
    assert list(policy.victims(request(0, 9))) == []  # it waits, and so has no claim on those who run


@pytest.mark.parametrize("num_tokens", [1, 9], ids=["decode", "prompt"])
def test_fcfs_offers_to_a_request_preempted_in_this_very_step_only_at_its_place_in_the_queue(num_tokens: int) -> None:
    policy = Fcfs()
    oldest, victim, newcomer = request(0, num_tokens), request(1, num_tokens), request(2, num_tokens)
    seat(policy, [oldest, victim])
    policy.admit(newcomer)
    offers = policy.offers(1000, 0)

    assert next(offers) == (oldest, num_tokens)
    unseat(policy, victim)
    assert offers.send(1) == (victim, num_tokens)
    victim.row, victim.state = 1, RequestState.RUNNING
    assert offers.send(1) == (newcomer, num_tokens)
    offers.close()
    assert list(policy.victims(oldest)) == [victim]
