"""Limits while the store does not answer: each process allows its share, and nothing of a hard quota."""

from __future__ import annotations

from typing import Any

import pytest
from limits_kit import LEASE_MS, ORGANIZATION, ask

from gateway.domain.ids import RequestId
from gateway.domain.limits.admission import Reservation, Verdict
from gateway.domain.limits.meters import REQUESTS, Bucket, Lease, Meter, Quota, Use, Weights
from gateway.domain.limits.rules import holdings
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable
from gateway.limits.degrading import DegradingLimits
from gateway.limits.memory import MemoryLimits

RATE = Bucket(key="rate", capacity=100, refill=60, max_debt=20)
HARD = Quota(key="hard", amount=100)
SOFT = Quota(key="soft", amount=100, is_hard=False)
LEASE = Lease(key="lease", limit=5)
WIDE = Lease(key="wide", limit=6)
"""Of which a share is 2."""


class Remote(MemoryLimits):
    """Answers while `is_up`; counts what it is asked."""

    is_up = True

    def __init__(self, limits: Limits) -> None:
        super().__init__(lambda: limits.at_ms)
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found
        self.asked.append(name)
        if not self.is_up:
            raise LimitsUnavailable
        return found


class Limits(DegradingLimits):
    """Of one of several processes, over a store that may be away."""

    def __init__(self, num_processes: int = 3) -> None:
        self.at_ms = 1_000_000
        self.remote = Remote(self)
        super().__init__(self.remote, num_processes=num_processes, now_ms=lambda: self.at_ms)

    async def admits(self, *meters: Meter | Use, request: str = "r1", **changes: Any) -> Verdict:
        return await self.admit(ask(*meters, request=request, **changes))

    async def look_at(self, *meters: Meter) -> list[int]:
        return list(await self.remote.look(ORGANIZATION, [Use(meter) for meter in meters]))

    async def settles(self, request: str, *usage: int) -> object:
        return await self.settle(ORGANIZATION, RequestId(request), TokenUsage(*usage))


@pytest.fixture
async def limits() -> Limits:
    limits = Limits()
    await limits.remote.begin_epoch(ORGANIZATION, {}, [])
    return limits


def away(limits: Limits) -> None:
    limits.remote.is_up = False


def back(limits: Limits) -> None:
    limits.remote.is_up = True


async def test_while_the_store_answers_it_decides(limits: Limits) -> None:
    verdict = await limits.admits(RATE, HARD, LEASE)

    assert verdict == Verdict(is_admitted=True, granted_output=20, remaining=(85, 70, 4))
    assert await limits.check(ask(LEASE, request="r2")) == Verdict(is_admitted=True, granted_output=20, remaining=(3,))
    assert not limits.is_degraded


async def test_else_a_share_of_everything_does_rounded_down(limits: Limits) -> None:
    away(limits)
    first = await limits.admits(RATE, SOFT, LEASE)
    second = await limits.admits(RATE, LEASE, request="r2")
    third = await limits.admits(RATE, LEASE, request="r3")

    assert first == Verdict(is_admitted=True, granted_output=20, remaining=(18, 3, 0), is_by_share=True)
    assert limits.is_degraded
    assert (second.is_admitted, second.binding, second.is_by_share) == (False, 1, True)
    await limits.settles("r1", 10, 20)
    third = await limits.admits(RATE, LEASE, request="r3")
    assert (third.is_admitted, third.remaining, third.wait_ms) == (False, (3, 1), 36_000)
    limits.at_ms += 36_000
    assert (await limits.check(ask(RATE, request="r3"))).is_admitted
    assert (await limits.admits(RATE, LEASE, request="r3")).is_admitted


async def test_debt_is_by_shared_too_and_so_is_a_refill(limits: Limits) -> None:
    away(limits)
    await limits.admits(RATE)
    await limits.settles("r1", 10, 80)
    verdict = await limits.admits(RATE, request="r2")

    assert (verdict.remaining, verdict.wait_ms) == ((-6,), 63_000)


@pytest.mark.parametrize("method", ["check", "admit"])
async def test_what_is_too_large_for_a_share_is_not_said_to_be_too_large_for_ever(limits: Limits, method: str) -> None:
    away(limits)
    verdict = await getattr(limits, method)(ask(RATE, prompt_tokens=60))

    assert (verdict.is_admitted, verdict.is_never, verdict.wait_ms) == (False, False, None)
    once = await getattr(limits, method)(ask(Use(Bucket(key="once", capacity=2, refill=2), REQUESTS)))
    assert (once.is_admitted, once.is_never) == (False, False)


@pytest.mark.parametrize("method", ["check", "admit"])
async def test_hard_quotas_have_no_shares(limits: Limits, method: str) -> None:
    away(limits)
    with pytest.raises(LimitsUnavailable):
        await getattr(limits, method)(ask(RATE, HARD))

    assert not limits.is_degraded
    shadow = Quota(key="hard", amount=0, is_shadow=True)
    assert (await getattr(limits, method)(ask(RATE, shadow))).is_admitted


async def test_what_a_share_admitted_stays_with_it_when_the_store_is_back(limits: Limits) -> None:
    away(limits)
    await limits.admits(RATE, LEASE)
    back(limits)
    assert (await limits.admits(RATE, LEASE, request="r2")).remaining == (85, 4)
    assert not limits.is_degraded
    limits.remote.asked.clear()

    assert await limits.raise_output(ORGANIZATION, RequestId("r1"), 700) == 700
    assert await limits.report(ORGANIZATION, {RequestId("r1"): 5}, LEASE_MS) == ()
    reservation = Reservation(ask=ask(LEASE), granted_output=5, reserved=holdings(ask(LEASE), 5))
    assert limits.remote.asked == []
    await limits.begin_epoch(ORGANIZATION, {}, [reservation])
    assert await limits.held(ORGANIZATION) == ["r2"]
    assert await limits.settles("r1", 10, 5) is not None
    assert await limits.settles("r1", 10, 5) is None
    assert await limits.look_at(RATE, LEASE) == [85, 4]


async def test_cancelling_gives_back_to_where_it_came_from(limits: Limits) -> None:
    await limits.admits(WIDE, request="r0")
    away(limits)
    await limits.admits(WIDE)
    assert not (await limits.admits(WIDE, request="r2")).is_admitted
    assert await limits.cancel(ORGANIZATION, RequestId("r1"))
    assert (await limits.admits(WIDE, request="r2")).is_admitted
    with pytest.raises(LimitsUnavailable):
        await limits.cancel(ORGANIZATION, RequestId("r0"))
    back(limits)

    assert await limits.cancel(ORGANIZATION, RequestId("r0"))
    assert await limits.look_at(WIDE) == [6]


async def test_reports_renew_the_leases_of_both(limits: Limits) -> None:
    await limits.admits(WIDE, request="r0")
    away(limits)
    await limits.admits(WIDE)
    for _ in range(3):
        limits.at_ms += LEASE_MS - 1
        with pytest.raises(LimitsUnavailable):
            await limits.report(ORGANIZATION, {RequestId("r0"): 1, RequestId("r1"): 1}, LEASE_MS)
    refused = await limits.admits(WIDE, request="r2")
    assert not refused.is_admitted, "it still runs"
    back(limits)

    assert await limits.report(ORGANIZATION, {RequestId("r0"): 1, RequestId("r1"): 1}, LEASE_MS) == []
    assert await limits.look_at(WIDE) == [5]


async def test_a_share_is_as_far_used_up_as_the_outage_before_left_it(limits: Limits) -> None:
    """Were it full each time, a store that answers every other question would let any number through."""
    slow = Use(Bucket(key="slow", capacity=9, refill=6), REQUESTS)
    admitted = 0
    for number in range(100):
        away(limits)
        verdict = await limits.admits(slow, request=f"by share {number}")
        assert verdict.is_by_share
        if verdict.is_admitted:
            await limits.settles(f"by share {number}", 10, 20)
        admitted += verdict.is_admitted
        back(limits)
        await limits.admits(LEASE, request=f"by store {number}")
        assert not limits.is_degraded
        await limits.settles(f"by store {number}", 10, 20)
        limits.at_ms += 6_000

    assert admitted == 3 + 19, "a share of 3, and 2 a minute for not quite ten minutes"


async def test_what_runs_by_a_share_holds_its_part_in_the_next_outage_too(limits: Limits) -> None:
    away(limits)
    await limits.admits(LEASE)
    back(limits)
    await limits.admits(Use(LEASE), request="r2")
    await limits.settles("r2", 10, 20)
    away(limits)

    assert not (await limits.admits(LEASE, request="r3")).is_admitted


async def test_whatever_else_is_asked_needs_the_store(limits: Limits) -> None:
    assert (await limits.born_ms(), await limits.age_ms()) == (None, None)
    await limits.admits(LEASE, request="r0")
    away(limits)
    calls: list[Any] = [
        lambda: limits.look(ORGANIZATION, [Use(LEASE)]),
        lambda: limits.reap(ORGANIZATION, 1),
        lambda: limits.held(ORGANIZATION),
        lambda: limits.begin_epoch(ORGANIZATION, {}, []),
        lambda: limits.raise_output(ORGANIZATION, RequestId("r0"), 5),
        lambda: limits.settle(ORGANIZATION, RequestId("r0"), TokenUsage(1)),
        limits.age_ms,
        limits.born_ms,
    ]
    for call in calls:
        with pytest.raises(LimitsUnavailable):
            await call()


async def test_all_processes_together_never_allow_more_than_the_limit() -> None:
    for num in (1, 2, 3, 7):
        processes = [Limits(num) for _ in range(num)]
        num_admitted = 0
        for process in processes:
            away(process)
            for request in range(20):
                free = Use(RATE, Weights(prompt=0, cached=0, output=0, per_request=9))
                verdict = await process.admits(free, LEASE, request=f"r{request}")
                num_admitted += verdict.is_admitted
        assert num_admitted == num * min(5 // num, 100 // num // 9)
