"""The rules of limits, kept by a real Redis, and what is kept there for how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from databases import RedisServer
from redis.asyncio import Redis
from redis_limits_kit import Clock, Hub, bucket, lease, opened, quota, until

from gateway.domain.ids import RequestId, new_request_id
from gateway.domain.limits.admission import Settlement, Verdict
from gateway.domain.limits.meters import (
    MOST_QUOTA,
    MOST_TOKENS,
    MOST_UNITS,
    MOST_WEIGHT,
    PARTS,
    REQUESTS,
    Bucket,
    Use,
    Weights,
)
from gateway.domain.usage import TokenUsage
from gateway.limits.redis_store import RedisLimits

DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture
async def store(redis: RedisServer, clock: Clock) -> AsyncIterator[RedisLimits]:
    async with opened(redis.url, clock) as store:
        yield store


@pytest_asyncio.fixture
async def raw(redis: RedisServer) -> AsyncIterator[Any]:
    """redis-py's own client, to look behind the store's back."""
    async with Redis.from_url(redis.url, decode_responses=True) as client:
        yield client


@pytest.fixture
def hub(store: RedisLimits, clock: Clock) -> Hub:
    return Hub(store, clock)


# Buckets


async def test_a_bucket_is_charged_for_prompt_and_expected_output_and_refills(hub: Hub) -> None:
    _, first = await hub.admit(bucket(100), prompt=40, expected=20)
    _, second = await hub.admit(bucket(100), prompt=40, expected=20)
    hub.clock.now_ms += 19_999  # a unit a second
    _, third = await hub.admit(bucket(100), prompt=40, expected=20)
    hub.clock.now_ms += 1
    _, fourth = await hub.admit(bucket(100), prompt=40, expected=20)

    assert first == Verdict(is_admitted=True, granted_output=100, remaining=(40,))
    assert second == Verdict(is_admitted=False, binding=0, remaining=(40,), wait_ms=20_000)
    assert third == Verdict(is_admitted=False, binding=0, remaining=(59,), wait_ms=1)
    assert fourth == Verdict(is_admitted=True, granted_output=100, remaining=(0,))


async def test_expected_output_charges_no_more_than_the_capacity(hub: Hub) -> None:
    _, verdict = await hub.admit(bucket(50), prompt=40, expected=100)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(0,))


async def test_a_prompt_above_the_capacity_never_fits(hub: Hub) -> None:
    _, verdict = await hub.admit(bucket(50), lease(0), prompt=51, expected=0)

    assert verdict == Verdict(is_admitted=False, binding=0, remaining=(50, 0), is_never=True)


async def test_a_bucket_without_refill_has_no_wait(hub: Hub) -> None:
    await hub.admit(bucket(50, 0), prompt=50, expected=0)
    hub.clock.now_ms += 1_000 * DAY_MS
    _, verdict = await hub.admit(bucket(50, 0), prompt=1, expected=0)

    assert verdict == Verdict(is_admitted=False, binding=0, remaining=(0,))


async def test_settling_gives_back_or_takes_down_to_the_debt_and_forgives_the_rest(hub: Hub) -> None:
    meter = bucket(100, max_debt=30)
    early, _ = await hub.admit(meter, prompt=10, expected=50)
    assert await hub.settle(early, 10, 20) == Settlement(charged=(30,), forgiven=(0,))
    assert await hub.left(meter) == [70]
    greedy, _ = await hub.admit(meter, prompt=10, expected=50, most=500)
    hub.clock.now_ms += 500  # half a unit
    assert await hub.settle(greedy, 10, 200) == Settlement(charged=(210,), forgiven=(109,))
    assert await hub.left(meter) == [-30]
    hub.clock.now_ms += 31_000
    assert await hub.left(meter) == [1]


async def test_the_wait_of_a_bucket_in_debt(hub: Hub) -> None:
    """31 units at 7 a minute."""
    meter = bucket(100, 7, max_debt=30)
    request, _ = await hub.admit(meter, prompt=10, expected=0)
    await hub.settle(request, 10, 200)
    assert (await hub.store.check(hub.ask(meter, prompt=1, expected=0))).wait_ms == 265_715
    hub.clock.now_ms += 265_714
    assert (await hub.store.check(hub.ask(meter, prompt=1, expected=0))).wait_ms == 1
    hub.clock.now_ms += 1
    assert (await hub.store.check(hub.ask(meter, prompt=1, expected=0))).is_admitted


async def test_what_is_given_back_stops_at_the_capacity(hub: Hub) -> None:
    request, _ = await hub.admit(bucket(100), prompt=10, expected=50)
    hub.clock.now_ms += 50_000
    await hub.settle(request, 10, 20)

    assert await hub.left(bucket(100)) == [100]


async def test_time_does_not_go_back(hub: Hub) -> None:
    await hub.admit(bucket(100), prompt=60, expected=0)
    hub.clock.now_ms -= 50_000
    assert await hub.left(bucket(100)) == [40]
    _, verdict = await hub.admit(bucket(100), prompt=10, expected=0)
    hub.clock.now_ms += 55_000

    assert verdict.remaining == (30,)
    assert await hub.left(bucket(100)) == [35]


async def test_an_edited_limit_keeps_what_was_used(hub: Hub) -> None:
    await hub.admit(bucket(100), quota(1_000, is_hard=False), prompt=30, expected=0, most=0, least=0)

    assert await hub.left(bucket(200), quota(500)) == [70, 470]
    assert await hub.left(bucket(50), quota(20)) == [50, -10]
    await hub.admit(bucket(50), prompt=1, expected=0)
    assert await hub.left(bucket(200)) == [49]


async def test_a_debt_that_is_limited_more_is_forgiven_before_it_is_refilled(hub: Hub) -> None:
    request, _ = await hub.admit(bucket(100, max_debt=50), prompt=10, expected=0)
    await hub.settle(request, 10, 200)
    hub.clock.now_ms += 5_000

    assert await hub.left(bucket(100, max_debt=50), bucket(100, max_debt=20)) == [-45, -15]


async def test_a_shadow_bucket_is_charged_to_its_debt_and_no_further(hub: Hub) -> None:
    meter = bucket(50, 60, max_debt=20, is_shadow=True)
    _, verdict = await hub.admit(meter, prompt=60, expected=40)
    request, second = await hub.admit(meter, prompt=60, expected=40)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(-10,), shadow_refused=(0,))
    assert second == Verdict(is_admitted=True, granted_output=100, remaining=(-20,), shadow_refused=(0,))
    await hub.store.cancel(hub.id, request)
    assert await hub.left(meter) == [-10]


# Quotas


async def test_a_hard_quota_clamps_and_then_refuses(hub: Hub) -> None:
    await hub.begin()
    uses = (quota(300, "team"), quota(200, "org"))
    first, verdict = await hub.admit(*uses, prompt=50, most=100)
    _, second = await hub.admit(*uses, prompt=20, most=100)
    _, third = await hub.admit(*uses, prompt=1, most=100)
    _, never = await hub.admit(*uses, prompt=200, most=100)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(150, 50))
    assert second == Verdict(is_admitted=True, granted_output=30, binding=1, remaining=(100, 0))
    assert third == Verdict(is_admitted=False, binding=1, remaining=(100, 0))
    assert never == Verdict(is_admitted=False, binding=0, remaining=(100, 0), is_never=True)
    assert await hub.settle(first, 50, 7) == Settlement(charged=(57, 57), forgiven=(0, 0))
    assert await hub.left(*uses) == [193, 93]


async def test_of_quotas_that_grant_the_same_the_first_binds_and_none_that_grants_all(hub: Hub) -> None:
    await hub.begin()
    _, equal = await hub.admit(quota(90, "a"), quota(80, "b"), quota(80, "c"), prompt=10, most=100)
    _, whole = await hub.admit(quota(110, "d"), prompt=10, most=100)

    assert equal == Verdict(is_admitted=True, granted_output=70, binding=1, remaining=(10, 0, 0))
    assert whole == Verdict(is_admitted=True, granted_output=100, remaining=(0,))


async def test_weights_of_a_quota(hub: Hub) -> None:
    await hub.begin()
    price = Weights(prompt=2_500_000, cached=1_000_000, output=3_333_333, per_request=7)
    use = Use(quota(100), price)
    request, verdict = await hub.admit(use, prompt=10)

    assert verdict == Verdict(is_admitted=True, granted_output=20, binding=0, remaining=(1,))
    assert await hub.settle(request, 10, 3, cached=5) == Settlement(charged=(35,), forgiven=(0,))
    assert await hub.left(use) == [65]


async def test_output_that_costs_nothing_is_granted_whole(hub: Hub) -> None:
    await hub.begin()
    _, verdict = await hub.admit(Use(quota(10), Weights(output=0)), prompt=10)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(0,))


async def test_a_soft_quota_counts_and_refuses_nothing(hub: Hub) -> None:
    meter = quota(50, is_hard=False)
    _, verdict = await hub.admit(meter, prompt=10)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(-60,))


async def test_a_shadow_quota_says_what_it_would_have_refused(hub: Hub) -> None:
    await hub.begin()
    uses = (quota(5, "shadow", is_shadow=True), quota(80, "real"))
    _, verdict = await hub.admit(*uses)

    assert verdict == Verdict(is_admitted=True, granted_output=70, binding=1, remaining=(-75, 0), shadow_refused=(0,))


async def test_output_is_raised_as_far_as_a_quota_allows_that_was_changed_meanwhile(hub: Hub) -> None:
    await hub.begin()
    request, _ = await hub.admit(quota(100), prompt=10, most=20)

    for amount, granted in ((60, 50), (130, 120), (40, 120)):
        assert await hub.store.raise_output(hub.id, request, 500, [quota(amount)]) == granted
    assert await hub.store.raise_output(hub.id, request, 500, [quota(1, is_hard=False)]) == 500
    assert await hub.left(quota(600)) == [90]


async def test_output_is_raised_as_far_as_hard_quotas_allow(hub: Hub) -> None:
    await hub.begin()
    uses = (quota(100), quota(10, "soft", is_hard=False), bucket(1_000))
    request, _ = await hub.admit(*uses, prompt=10, most=20)

    assert await hub.store.raise_output(hub.id, request, 10) == 20
    assert await hub.store.raise_output(hub.id, request, 50) == 50
    assert await hub.left(*uses) == [40, -50, 970]
    assert await hub.store.raise_output(hub.id, request, 500) == 90
    assert await hub.store.raise_output(hub.id, request, 501) == 90
    assert await hub.left(*uses) == [0, -90, 970]
    assert await hub.store.raise_output(hub.id, new_request_id(1), 5) is None
    await hub.settle(request, 10, 90)
    assert await hub.left(*uses) == [0, -90, 900]
    assert await hub.store.raise_output(hub.id, request, 5) is None


async def test_a_request_is_settled_in_the_period_it_was_admitted_in(hub: Hub) -> None:
    await hub.begin()
    request, _ = await hub.admit(quota(200, "day_1"))
    await hub.admit(quota(200, "day_2"))
    await hub.settle(request, 10, 5)

    assert await hub.left(quota(200, "day_1"), quota(200, "day_2")) == [185, 90]


# All of them


async def test_a_refusal_leaves_everything_as_it_was(hub: Hub) -> None:
    await hub.begin()
    uses = (Use(bucket(5), REQUESTS), quota(1_000), lease(1))
    held, _ = await hub.admit(*uses)
    refused = {(await hub.admit(*uses))[1] for _ in range(10)}
    assert refused == {Verdict(is_admitted=False, binding=2, remaining=(4, 890, 0))}
    await hub.store.cancel(hub.id, held)

    assert await hub.left(*uses) == [5, 1_000, 1]


async def test_the_first_that_refuses_binds_and_there_is_no_wait_if_one_has_none(hub: Hub) -> None:
    slow = Bucket(key="slow", capacity=100, refill=60)
    quick = Bucket(key="quick", capacity=100, refill=600)
    await hub.admit(slow, quick, lease(1), prompt=100, expected=0)

    _, buckets = await hub.admit(quick, slow, prompt=50, expected=0)
    _, all_three = await hub.admit(lease(1), quick, slow, prompt=50, expected=0)

    assert buckets == Verdict(is_admitted=False, binding=0, remaining=(0, 0), wait_ms=50_000)
    assert all_three == Verdict(is_admitted=False, binding=0, remaining=(0, 0, 0))


async def test_a_check_says_what_admit_would_and_consumes_nothing(hub: Hub) -> None:
    await hub.begin()
    ask = hub.ask(bucket(150), quota(80), lease(1))
    checked = [await hub.store.check(ask) for _ in range(3)]
    assert await hub.left(bucket(150), quota(80), lease(1)) == [150, 80, 1]
    admitted = await hub.store.admit(ask)

    assert checked == [admitted] * 3
    assert admitted == Verdict(is_admitted=True, granted_output=70, binding=1, remaining=(40, 0, 0))


async def test_the_same_request_again_gets_the_same_answer(hub: Hub) -> None:
    await hub.begin()
    ask = hub.ask(bucket(150), quota(80), lease(1))
    answers = [await hub.store.admit(ask) for _ in range(3)]
    answers.append(await hub.store.check(ask))
    assert await hub.left(bucket(150), quota(80), lease(1)) == [40, 0, 0]
    await hub.settle(ask.request_id, 10, 10)
    answers.append(await hub.store.admit(ask))

    assert answers == [answers[0]] * 5
    assert await hub.left(bucket(150), quota(80), lease(1)) == [130, 60, 1]


async def test_no_meters_at_all(hub: Hub) -> None:
    request, verdict = await hub.admit()

    assert verdict == Verdict(is_admitted=True, granted_output=100)
    assert await hub.settle(request, 10, 10) == Settlement(charged=(), forgiven=())
    assert await hub.left() == []


async def test_an_ask_that_breaks_its_own_rules_is_not_sent(hub: Hub) -> None:
    with pytest.raises(ValueError, match="two uses"):
        await hub.admit(lease(1), lease(2))
    with pytest.raises(ValueError, match="min_output"):
        await hub.store.check(hub.ask(least=5, most=4))


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
    hub.clock.now_ms += 9_000
    assert await hub.store.report(hub.id, {request: 17, RequestId("req_none"): 5}, 10_000) == ["req_none"]
    hub.clock.now_ms += 9_999
    assert await hub.store.reap(hub.id, 5) == []
    hub.clock.now_ms += 1
    assert await hub.store.reap(hub.id, 5) == [request]
    assert await hub.left(*uses) == [173, 973, 2]
    assert await hub.store.report(hub.id, {request: 18}, 10_000) == [request]

    late = await hub.settle(request, 10, 30, cached=4)
    assert late == Settlement(charged=(40, 40, 0), forgiven=(0, 0, 0), was_reaped=True)
    assert await hub.left(*uses) == [160, 960, 2]
    again = await hub.settle(request, 10, 30)
    assert again == Settlement(charged=(40, 40, 0), forgiven=(0, 0, 0), was_reaped=True, was_settled=True)


async def test_what_was_forgiven_is_told_in_all(hub: Hub) -> None:
    request, _ = await hub.admit(bucket(50, 0, max_debt=10), prompt=10, expected=0, lease_ms=1)
    await hub.store.report(hub.id, {request: 100}, 1)
    hub.clock.now_ms += 1
    await hub.store.reap(hub.id, 1)

    assert await hub.settle(request, 10, 105) == Settlement(charged=(115,), forgiven=(55,), was_reaped=True)


async def test_one_that_was_reaped_can_be_cancelled(hub: Hub) -> None:
    uses = (bucket(200, 0), quota(1_000, is_hard=False), lease(2))
    request, _ = await hub.admit(*uses, lease_ms=1)
    hub.clock.now_ms += 1
    await hub.store.reap(hub.id, 1)

    assert await hub.left(*uses) == [190, 990, 2]
    assert await hub.store.cancel(hub.id, request)
    assert await hub.left(*uses) == [200, 1_000, 2]
    assert await hub.settle(request, 1, 1) is None


async def test_admitting_reaps_eight_at_most_the_oldest_first(hub: Hub) -> None:
    meter = lease(10)
    requests = [(await hub.admit(meter, lease_ms=1_000 - num))[0] for num in range(10)]
    hub.clock.now_ms += 1_000
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
    reaped, _ = await hub.admit(*uses[1:], lease_ms=1)
    await hub.admit(*uses[1:])
    await hub.settle(settled, 10, 10)
    hub.clock.now_ms += 1
    await hub.store.reap(hub.id, 1)
    start = f"eh1:{{{hub.id}}}:"
    names = [key async for key in raw.scan_iter(match="*", count=10_000) if hub.id in key]
    lives = {key.removeprefix(start): await raw.pttl(key) for key in names}

    assert lives.pop("epoch") == -1
    expected_s = {
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
