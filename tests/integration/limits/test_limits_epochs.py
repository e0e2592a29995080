"""How a store that was lost is told everything again, part by part: the same in the process and in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from databases import RedisServer
from redis_limits_kit import Clock, Hub, bucket, lease, opened, quota

from gateway.domain.ids import RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.rules import holdings
from gateway.limits.memory import MemoryLimits

ALL = (bucket(500, 0), quota(1_000), lease(4))
LOST = Verdict(is_admitted=False, is_lost=True)


@pytest_asyncio.fixture(params=["memory", "redis"])
async def hub(request: pytest.FixtureRequest, redis: RedisServer, clock: Clock) -> AsyncIterator[Hub]:
    if request.param == "memory":
        yield Hub(MemoryLimits(clock), clock)
        return
    async with opened(redis.url, clock) as store:
        yield Hub(store, clock)


def running(ask: Ask, granted: int, reported: int = 0) -> Reservation:
    return Reservation(ask=ask, granted_output=granted, reserved=holdings(ask, granted), reported_output=reported)


def asks(hub: Hub, num: int) -> list[Ask]:
    """20 tokens in, up to 80 out."""
    return [hub.ask(*ALL, prompt=20, most=80) for _ in range(num)]


async def begin(hub: Hub, *reservations: Reservation, is_whole: bool = True, **more: Any) -> bool:
    return await hub.store.begin_epoch(hub.id, more.pop("committed", {}), reservations, is_whole=is_whole, **more)


async def test_parts_that_are_not_all_leave_the_organization_lost(hub: Hub) -> None:
    [ask] = asks(hub, 1)

    assert not await begin(hub, running(ask, 60), is_whole=False)
    assert not await begin(hub, committed={"day_1": 300}, is_whole=False)
    assert await hub.store.admit(hub.ask(*ALL)) == LOST
    assert await hub.left(*ALL) == [400, 920, 3]
    assert await begin(hub)
    assert await hub.left(*ALL) == [400, 620, 3]
    assert await begin(hub, is_whole=False), "it is known from now on"
    assert (await hub.store.admit(hub.ask(*ALL))).is_admitted


async def test_of_amounts_that_are_told_before_the_end_the_last_ones_count(hub: Hub) -> None:
    await begin(hub, committed={"day_1": 300, "day_2": 7}, is_whole=False)
    await begin(hub, committed={"day_1": 310}, is_whole=False)
    await begin(hub, committed={"day_3": 9})
    await begin(hub, committed={"day_1": 1, "day_2": 1, "day_3": 1}, is_whole=False)

    assert await hub.left(*(quota(1_000, f"day_{n}") for n in (1, 2, 3))) == [690, 993, 991]


async def test_what_is_settled_already_ends_without_being_committed_again(hub: Hub) -> None:
    first, second, third = asks(hub, 3)
    await begin(hub, running(first, 80), running(second, 60), is_whole=False)
    await begin(hub, running(third, 80), committed={"day_1": 50}, is_whole=False)
    assert await hub.left(*ALL) == [200, 1_000 - 100 - 80 - 100, 1]

    ids = [ask.request_id for ask in (first, second)]
    assert await begin(hub, settled=[*ids, RequestId("req_of_nobody")])

    assert await hub.left(*ALL) == [200, 850, 3], "a bucket has been charged for them"
    assert await hub.store.held(hub.id) == [third.request_id]
    again = await hub.settle(first.request_id, 20, 70)
    assert again == Settlement(charged=(100, 100, 0), forgiven=(0, 0, 0), was_settled=True)
    assert not await hub.store.cancel(hub.id, second.request_id)
    assert await hub.store.report(hub.id, dict.fromkeys([*ids, third.request_id], 5), 60_000) == ids
    await hub.settle(third.request_id, 20, 10)
    assert await hub.left(*ALL) == [270, 1_000 - 50 - 30, 4]


@pytest.mark.parametrize("is_later_first", [False, True])
async def test_two_views_are_not_mixed(hub: Hub, is_later_first: bool) -> None:
    """In the later one the request is part of what is committed."""
    [ask] = asks(hub, 1)
    await begin(hub, running(ask, 80), is_whole=False)
    await begin(hub, committed={"day_1": 300, "day_2": 3}, view="later", is_whole=False)
    await begin(hub, committed={"day_1": 200}, view="earlier", is_whole=False)
    settled = {"earlier": [], "later": [ask.request_id]}
    for view in sorted(settled, reverse=is_later_first):
        assert await begin(hub, view=view, settled=settled[view])
    await hub.settle(ask.request_id, 20, 80)

    assert await hub.left(quota(1_000)) == [700]
    assert await hub.left(quota(1_000, "day_2")) == [997], "nobody had told of it, or the first did"


async def test_of_a_view_whose_parts_are_not_all_there_nothing_is_taken(hub: Hub) -> None:
    """The store was lost between them, with what others had made known."""
    [ask] = asks(hub, 1)
    await begin(hub, running(ask, 80), is_whole=False)
    for num_told in (1, 2):
        for num in range(num_told):
            await begin(hub, committed={f"day_{num}": 300}, view="v", is_whole=False)
        assert not await begin(hub, committed={"day_5": 7}, view="v", settled=[ask.request_id], num_parts=3)
        assert await hub.store.admit(hub.ask(*ALL)) == LOST
        assert await hub.store.held(hub.id) == [ask.request_id]
    for num in range(3):
        await begin(hub, committed={f"day_{num}": 200 + num}, view="v", is_whole=False)
    assert await begin(hub, committed={"day_5": 7}, view="v", settled=[ask.request_id], num_parts=3)

    assert await hub.left(*(quota(1_000, f"day_{num}") for num in (0, 1, 2, 5))) == [800, 799, 798, 993]
    assert await hub.store.held(hub.id) == []
    assert await begin(hub, committed={"day_0": 1}, view="other", num_parts=9), "it is known all the same"
    assert await hub.left(quota(1_000, "day_0")) == [800]


async def test_what_was_counted_of_a_soft_quota_that_becomes_hard_is_not_lowered(hub: Hub) -> None:
    """The ledger is behind the store by one request, and has another one that the store is not told of yet."""
    soft = quota(1_000, is_hard=False)
    for _ in range(3):
        await hub.settle((await hub.admit(soft, prompt=20, most=80))[0], 20, 80)
    running, _ = await hub.admit(soft, prompt=20, most=80)
    await begin(hub, committed={"day_1": 200 + 30}, settled=[running])

    assert await hub.left(quota(1_000)) == [1_000 - 300 - 100]
    await hub.settle(running, 20, 10)
    assert await hub.left(quota(1_000)) == [1_000 - 330]


async def test_amounts_that_nobody_comes_back_for_are_forgotten(redis: RedisServer, raw: Any, clock: Clock) -> None:
    memory = Hub(MemoryLimits(clock), clock)
    await begin(memory, committed={"day_1": 300}, view="v", is_whole=False)
    clock.now_ms += 600_000
    await begin(memory, view="v")
    assert await memory.left(quota(1_000)) == [1_000]
    async with opened(redis.url, clock) as store:
        hub = Hub(store, clock)
        await begin(hub, committed={"day_1": 300}, view="v", is_whole=False)
        assert 590_000 < await raw.pttl(f"eh1:{{{hub.id}}}:staged:v") <= 600_000
        await begin(hub, view="v")
        assert not await raw.exists(f"eh1:{{{hub.id}}}:staged:v")


async def test_only_who_begins_the_epoch_says_what_is_settled(hub: Hub) -> None:
    first, second = asks(hub, 2)
    await begin(hub, running(first, 80), running(second, 80), is_whole=False, settled=[first.request_id])
    assert sorted(await hub.store.held(hub.id)) == sorted([first.request_id, second.request_id])
    await begin(hub, settled=[first.request_id])
    await begin(hub, settled=[second.request_id])

    assert await hub.store.held(hub.id) == [second.request_id]


async def test_one_that_is_told_of_with_the_end_runs_even_if_it_is_said_to_be_settled(hub: Hub) -> None:
    """It was not among those whose rows were looked for."""
    [ask] = asks(hub, 1)
    await begin(hub, running(ask, 80, reported=5), settled=[ask.request_id])

    assert await hub.store.held(hub.id) == [ask.request_id]
    await hub.passes(60_000)
    assert await hub.store.reap(hub.id, 9) == [ask.request_id]
    assert await hub.left(*ALL) == [475, 975, 4]


async def test_nothing_is_raised_while_it_is_not_known_what_is_left(hub: Hub) -> None:
    exact, soft = asks(hub, 1)[0], hub.ask(quota(1_000, is_hard=False), prompt=20, most=80)
    await begin(hub, running(exact, 30), running(soft, 30), is_whole=False)
    hard = [quota(1_000)]

    assert await hub.store.raise_output(hub.id, exact.request_id, 80) == 30
    assert await hub.store.raise_output(hub.id, soft.request_id, 80, hard) == 30
    assert await hub.store.raise_output(hub.id, soft.request_id, 80) == 80
    await begin(hub, committed={"day_1": 880})
    assert await hub.left(quota(1_000)) == [1_000 - 880 - 50 - 100]
    assert await hub.store.raise_output(hub.id, exact.request_id, 80) == 30
    await hub.store.cancel(hub.id, soft.request_id)
    assert await hub.store.raise_output(hub.id, exact.request_id, 120) == 100


async def test_those_are_held_that_were_admitted_and_have_not_ended(hub: Hub) -> None:
    assert await hub.store.held(hub.id) == []
    await hub.begin()
    requests = [(await hub.admit(*ALL, lease_ms=1_000))[0] for _ in range(3)]
    assert sorted(await hub.store.held(hub.id)) == sorted(requests)
    await hub.settle(requests[0], 1, 1)
    await hub.store.cancel(hub.id, requests[1])
    assert await hub.store.held(hub.id) == [requests[2]]
    await hub.passes(1_000)
    assert await hub.store.held(hub.id) == [requests[2]], "nobody has looked for it yet"
    await hub.store.reap(hub.id, 1)
    assert await hub.store.held(hub.id) == []


async def test_how_old_a_redis_is_and_whether_it_is_still_the_same(redis: RedisServer, raw: Any, clock: Clock) -> None:
    await raw.flushall()
    async with opened(redis.url, clock) as one, opened(redis.url, clock) as other:
        begun_ms = clock.now_ms
        assert (await one.age_ms(), await other.born_ms()) == (0, begun_ms)
        clock.now_ms += 1_234
        assert (await other.age_ms(), await one.age_ms(), await one.born_ms()) == (1_234, 1_234, begun_ms)
        clock.now_ms -= 3_600_000  # it is not waited for until the clock says again what it said
        assert await one.age_ms() == 0
        clock.now_ms += 700
        assert (await one.age_ms(), await other.born_ms()) == (700, clock.now_ms - 700)
        clock.now_ms += 1
        await raw.flushall()
        assert (await other.born_ms(), await one.born_ms()) == (clock.now_ms, clock.now_ms)
        assert clock.now_ms != begun_ms


async def test_a_store_in_the_process_has_no_age(clock: Clock) -> None:
    store = MemoryLimits(clock)
    assert (await store.age_ms(), await store.born_ms()) == (None, None)
