"""How requests end in a real Redis, what is kept there for how long, and several at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from databases import RedisServer
from redis_limits_kit import Clock, Hub, bucket, lease, opened, quota, until

from gateway.domain.ids import RequestId, new_request_id
from gateway.domain.limits.admission import Settlement, Verdict
from gateway.domain.limits.meters import (
    MOST_QUOTA,
    MOST_TOKENS,
    MOST_UNITS,
    MOST_WEIGHT,
    PARTS,
    Bucket,
    Use,
    Weights,
)
from gateway.domain.usage import TokenUsage

DAY_MS = 86_400_000


# Settling, cancelling, reaping


async def test_settled_exactly_once(hub: Hub) -> None:
    uses = (bucket(200), quota(1_000, is_hard=False), lease(2))
    request, _ = await hub.admit(*uses)
    first = await hub.settle(request, 10, 30)
    left = await hub.left(*uses)
    again = await hub.settle(request, 10, 99)

    assert first == Settlement(charged=(40, 40, 0), forgiven=(0, 0, 0))
    assert again == Settlement(charged=(40, 40, 0), forgiven=(0, 0, 0), was_settled=True)
    assert left == await hub.left(*uses) == [160, 960, 2]
    assert await hub.settle(new_request_id(1), 1, 1) is None
    assert not await hub.store.cancel(hub.id, request)


async def test_cancelling_gives_everything_back(hub: Hub) -> None:
    await hub.begin()
    uses = (bucket(200), quota(1_000), lease(2))
    request, _ = await hub.admit(*uses)

    assert await hub.store.cancel(hub.id, request)
    assert await hub.left(*uses) == [200, 1_000, 2]
    assert not await hub.store.cancel(hub.id, request)
    assert await hub.settle(request, 1, 1) is None


async def test_leases_that_run_out_are_reaped_at_what_was_last_reported(hub: Hub) -> None:
    await hub.begin()
    uses = (bucket(200, 0), quota(1_000), lease(2))
    request, _ = await hub.admit(*uses, prompt=10, most=50, lease_ms=10_000)
    await hub.passes(9_000)
    assert await hub.store.report(hub.id, {request: 17, RequestId("req_none"): 5}, 10_000) == ["req_none"]
    await hub.passes(9_999)
    assert await hub.store.reap(hub.id, 5) == []
    await hub.passes(1)
    assert await hub.store.reap(hub.id, 5) == [request]
    assert await hub.left(*uses) == [173, 973, 2]
    assert await hub.store.report(hub.id, {request: 18}, 10_000) == [request]

    late = await hub.settle(request, 10, 30, cached=4)
    assert late == Settlement(charged=(40, 40, 0), forgiven=(0, 0, 0), was_reaped=True)
    assert await hub.left(*uses) == [160, 960, 2]
    again = await hub.settle(request, 10, 30)
    assert again == Settlement(charged=(40, 40, 0), forgiven=(0, 0, 0), was_reaped=True, was_settled=True)


async def test_time_in_which_redis_was_silent_does_not_count(hub: Hub) -> None:
    await hub.begin()
    request, _ = await hub.admit(quota(1_000), prompt=10, most=890, lease_ms=15_000)
    await hub.store.report(hub.id, {request: 40}, 15_000)
    hub.clock.now_ms += 3_600_000

    other, verdict = await hub.admit(quota(1_000), prompt=10, most=2_000)
    assert verdict.granted_output == 90
    await hub.passes(14_999)
    assert await hub.store.report(hub.id, {request: 800}, 15_000) == []
    await hub.settle(request, 10, 890)
    await hub.settle(other, 10, verdict.granted_output)
    assert await hub.left(quota(1_000)) == [0]


async def test_what_was_forgiven_is_told_in_all(hub: Hub) -> None:
    request, _ = await hub.admit(bucket(50, 0, max_debt=10), prompt=10, expected=0, lease_ms=1_000)
    await hub.store.report(hub.id, {request: 100}, 1_000)
    await hub.passes(1_000)
    await hub.store.reap(hub.id, 1)

    assert await hub.settle(request, 10, 105) == Settlement(charged=(115,), forgiven=(55,), was_reaped=True)


async def test_one_that_was_reaped_can_be_cancelled(hub: Hub) -> None:
    uses = (bucket(200, 0), quota(1_000, is_hard=False), lease(2))
    request, _ = await hub.admit(*uses, lease_ms=1_000)
    await hub.passes(1_000)
    await hub.store.reap(hub.id, 1)

    assert await hub.left(*uses) == [190, 990, 2]
    assert await hub.store.cancel(hub.id, request)
    assert await hub.left(*uses) == [200, 1_000, 2]
    assert await hub.settle(request, 1, 1) is None


async def test_admitting_reaps_eight_at_most_the_oldest_first(hub: Hub) -> None:
    meter = lease(10)
    requests = [(await hub.admit(meter, lease_ms=2_000 - num))[0] for num in range(10)]
    await hub.passes(2_000)
    _, verdict = await hub.admit(meter, lease_ms=5_000)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(7,))
    assert await hub.store.reap(hub.id, 100) == [requests[1], requests[0]]


# What is kept


async def test_keys_carry_version_and_tag_and_expire_by_themselves(hub: Hub, raw: Any) -> None:
    await hub.begin(day_1=0)
    minute = Bucket(key="minute", capacity=120, refill=60, max_debt=30)
    quick = Bucket(key="quick", capacity=1_000, refill=1_000, period_ms=1_000)
    never = Bucket(key="never", capacity=1_000, refill=0)
    uses = (minute, quick, never, quota(1_000), lease(5))
    settled, _ = await hub.admit(*uses)
    reaped, _ = await hub.admit(*uses[1:], lease_ms=1_000)
    await hub.admit(*uses[1:])
    await hub.settle(settled, 10, 10)
    await hub.passes(1_000)
    await hub.store.reap(hub.id, 1)
    start = f"eh1:{{{hub.id}}}:"
    names = [key async for key in raw.scan_iter(match="*", count=10_000) if hub.id in key]
    lives = {key.removeprefix(start): await raw.pttl(key) for key in names}

    assert lives.pop("epoch") == -1
    expected_s = {
        "asked": 40 * 86_400,
        "b:minute": 300,
        "b:quick": 60,
        **dict.fromkeys(["b:never", "q:day_1", "l:team_1/running", "held", "due", "told"], 40 * 86_400),
        f"done:{settled}": 600,
        f"done:{reaped}": 3_600,
    }
    assert lives == {name: pytest.approx(1_000 * s, abs=10_000) for name, s in expected_s.items()}


async def test_a_method_is_one_call(hub: Hub, raw: Any) -> None:
    ask = hub.ask(bucket(1_000), lease(5))
    calls: list[Callable[[], Any]] = [
        lambda: hub.begin(day_1=5),
        lambda: hub.store.check(ask),
        lambda: hub.store.admit(ask),
        lambda: hub.store.raise_output(hub.id, ask.request_id, 50),
        lambda: hub.store.report(hub.id, {ask.request_id: 5}, 1_000),
        lambda: hub.store.settle(hub.id, ask.request_id, TokenUsage(1, 1)),
        lambda: hub.store.cancel(hub.id, ask.request_id),
        lambda: hub.store.reap(hub.id, 5),
        lambda: hub.store.held(hub.id),
        hub.store.age_ms,
        lambda: hub.left(lease(5)),
    ]
    for call in calls:
        await call()  # known to Redis from now on
    await raw.config_resetstat()
    for call in calls:
        await call()
    stats = await raw.info("commandstats")

    assert stats["cmdstat_evalsha"]["calls"] == len(calls)
    assert "cmdstat_eval" not in stats
    assert "cmdstat_script" not in stats


async def test_figures_at_their_bounds(hub: Hub) -> None:
    day = Bucket(key="day", capacity=MOST_UNITS, refill=MOST_UNITS, period_ms=DAY_MS, max_debt=MOST_UNITS)
    dear = Weights(prompt=MOST_WEIGHT, cached=MOST_WEIGHT, output=MOST_WEIGHT)
    meters = (Use(day), Use(quota(MOST_QUOTA)))
    await hub.begin(day_1=MOST_QUOTA - MOST_TOKENS - 1)
    request, verdict = await hub.admit(*meters, prompt=MOST_TOKENS - 1, most=1)
    assert verdict == Verdict(is_admitted=True, granted_output=1, remaining=(MOST_UNITS - MOST_TOKENS, 1))
    hub.clock.now_ms += 12_345_677
    assert await hub.left(*meters) == [MOST_UNITS, 1]
    await hub.settle(request, MOST_TOKENS - 1, 1)
    assert await hub.left(*meters) == [MOST_UNITS, 1]

    # as deep as it goes, and back again: to full it takes two days, to a part of a unit
    greedy, _ = await hub.admit(Use(day, dear), prompt=1_000_000, most=MOST_TOKENS - 1_000_000, expected=0)
    assert await hub.left(day) == [0]
    settled = await hub.settle(greedy, 1_000_000, MOST_TOKENS - 1_000_000)
    assert settled == Settlement(charged=(1_000_000_000,), forgiven=(800_000_000,))
    assert await hub.left(day) == [-MOST_UNITS]
    assert (await hub.store.check(hub.ask(day, prompt=MOST_TOKENS, most=0, least=0))).wait_ms == 95_040_000
    hub.clock.now_ms += DAY_MS - 1
    assert await hub.left(day) == [-(MOST_UNITS // DAY_MS) - 1]
    hub.clock.now_ms += 2
    assert await hub.left(day) == [MOST_UNITS // DAY_MS]
    hub.clock.now_ms += DAY_MS - 2
    assert await hub.left(day) == [MOST_UNITS - MOST_UNITS // DAY_MS - 1]
    hub.clock.now_ms += 1
    assert await hub.left(day) == [MOST_UNITS]


async def test_a_part_of_a_unit_is_kept_over_the_whole_range(hub: Hub, raw: Any) -> None:
    """A unit a day fills 1 part a millisecond, beside levels of nearly 2**53."""
    meter = Bucket(key="slow", capacity=MOST_UNITS, refill=1, period_ms=DAY_MS, max_debt=MOST_UNITS)
    await hub.admit(meter, prompt=1, expected=0)
    for ms in (1, 2, 3, 1_000_003):
        hub.clock.now_ms += ms
        await hub.store.cancel(hub.id, (await hub.admit(meter, prompt=5, expected=0))[0])
    level, at_ms = (await raw.get(f"eh1:{{{hub.id}}}:b:slow")).split()

    assert int(level) == (MOST_UNITS - 1) * PARTS + 1_000_009
    assert int(at_ms) == hub.clock.now_ms


async def test_the_clock_is_redis_own(redis: RedisServer, clock: Clock) -> None:
    async with opened(redis.url) as store:
        hub = Hub(store, clock)
        meter = bucket(1_000, 1_000, period_ms=1_000)
        await hub.admit(meter, prompt=1_000, expected=0)
        begun = time.monotonic()

        async def has_100() -> bool:
            return (await hub.left(meter))[0] >= 100

        await until(has_100)
        assert 0.05 < time.monotonic() - begun < 5


# Several at once


@pytest.mark.parametrize("run", range(10))
async def test_two_hundred_at_once_on_a_hard_quota(redis: RedisServer, clock: Clock, run: int) -> None:
    """Each is settled at its cap, some give theirs back: never over, and next to nothing is left unused."""
    meter = quota(10_000)
    async with opened(redis.url, clock) as one, opened(redis.url, clock) as other:
        hub = Hub(one, clock)
        await hub.begin()

        async def serve(num: int) -> int:
            store = (one, other)[num % 2]
            ask = hub.ask(meter, prompt=23, most=150 + num % 40)
            verdict = await store.admit(ask)
            if not verdict.is_admitted:
                return 0
            if num % 7 == 0:
                await store.cancel(hub.id, ask.request_id)
                return await serve(num + 1)
            usage = TokenUsage(23, verdict.granted_output)
            settled = await store.settle(hub.id, ask.request_id, usage)
            assert settled == Settlement(charged=(usage.total_tokens,), forgiven=(0,))
            return usage.total_tokens

        used = sum(await asyncio.gather(*(serve(num) for num in range(run, 200 + run))))

        assert await hub.left(meter) == [10_000 - used]
        assert 9_900 <= used <= 10_000


async def test_a_lease_is_never_exceeded(redis: RedisServer, clock: Clock) -> None:
    async with opened(redis.url, clock) as one, opened(redis.url, clock) as other:
        hub = Hub(one, clock)
        asks = [hub.ask(lease(7)) for _ in range(60)]
        verdicts = await asyncio.gather(*((one, other)[num % 2].admit(ask) for num, ask in enumerate(asks)))

        assert sum(verdict.is_admitted for verdict in verdicts) == 7
        assert await hub.left(lease(7)) == [0]
