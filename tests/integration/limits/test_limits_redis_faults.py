"""A Redis that forgets, refuses, pauses and dies, and answers of it that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import uvloop
from databases import RedisServer
from redis.asyncio import Redis
from redis_limits_kit import Clock, Hub, bucket, lease, opened, quota, until

from gateway.domain.limits.admission import Reservation, Settlement, Verdict
from gateway.domain.limits.meters import Meter, Use
from gateway.errors import LimitsUnavailable
from gateway.limits.breaker import Breaker
from gateway.limits.redis_scripts import load
from gateway.limits.redis_store import ANSWER_S, RedisLimits

SOON_S = ANSWER_S + 0.25
"""A busy machine taken into account."""


# What is lost


async def test_an_organization_with_hard_quotas_is_lost_until_its_epoch_begins(hub: Hub) -> None:
    ask = hub.ask(quota(100), lease(1))
    lost = Verdict(is_admitted=False, is_lost=True)
    assert [await hub.store.check(ask), await hub.store.admit(ask)] == [lost, lost]
    others = (quota(100, "soft", is_hard=False), quota(100, "shadow", is_shadow=True), bucket(200), lease(5))
    assert (await hub.admit(*others))[1].is_admitted
    await hub.begin(day_1=60)
    _, verdict = await hub.admit(quota(100), prompt=10)

    assert verdict == Verdict(is_admitted=True, granted_output=30, binding=0, remaining=(0,))


async def test_two_processes_make_known_what_was_lost_at_once(
    redis: RedisServer, raw: Any, hub: Hub, clock: Clock
) -> None:
    uses = (quota(1_000), bucket(500, 0), lease(4))
    await hub.begin()
    asks = [hub.ask(*uses, prompt=20, most=80) for _ in range(3)]
    for ask in asks:
        assert (await hub.store.admit(ask)).is_admitted
    await hub.settle(asks[2].request_id, 20, 30)
    await raw.flushall()
    assert (await hub.admit(*uses))[1].is_lost
    held = [
        Reservation(ask=ask, granted_output=60, reserved=(80, 100, 1), reported_output=num)
        for num, ask in enumerate(asks[:2], 5)
    ]
    async with opened(redis.url, clock) as other:
        await asyncio.gather(
            hub.store.begin_epoch(hub.id, {"day_1": 50}, held[:1]),
            other.begin_epoch(hub.id, {"day_1": 50}, held[1:]),
            hub.store.begin_epoch(hub.id, {"day_1": 50}, held[:1]),
            other.begin_epoch(hub.id, {"day_1": 50}, held),
        )

    assert await hub.left(*uses) == [790, 300, 2]
    assert await hub.store.admit(asks[0]) == Verdict(is_admitted=True, granted_output=60)
    assert await hub.settle(asks[0].request_id, 20, 60) == Settlement(charged=(80, 80, 0), forgiven=(0, 0, 0))
    await hub.begin(day_1=0)
    assert await hub.left(*uses) == [790, 320, 3]
    await hub.passes(60_000)
    assert await hub.store.reap(hub.id, 9) == [asks[1].request_id]
    assert await hub.left(*uses) == [1_000 - 50 - 80 - 26, 500 - 80 - 26, 4]


async def test_amounts_that_come_later_count_where_nothing_is_committed(hub: Hub) -> None:
    await hub.begin(day_1=10)
    request, _ = await hub.admit(quota(100, "day_2"), prompt=5, most=10)
    await hub.settle(request, 5, 1)
    await hub.begin(day_1=20, day_2=20, day_3=20)
    await hub.begin(day_3=30)

    assert await hub.left(quota(100, "day_1"), quota(100, "day_2"), quota(100, "day_3")) == [90, 94, 80]


async def test_the_first_amounts_count_whatever_was_committed_before(hub: Hub) -> None:
    request, _ = await hub.admit(quota(100, is_hard=False), prompt=5, most=10)
    await hub.settle(request, 5, 1)
    await hub.begin(day_1=20)

    assert await hub.left(quota(100)) == [80]


async def test_what_has_ended_is_not_made_known_again(hub: Hub) -> None:
    ask = hub.ask(lease(5))
    await hub.store.admit(ask)
    await hub.settle(ask.request_id, 10, 5)
    await hub.store.begin_epoch(hub.id, {}, [Reservation(ask=ask, granted_output=100, reserved=(1,))])

    assert await hub.left(lease(5)) == [5]


async def test_what_is_no_reservation_of_the_organization_is_not_taken(hub: Hub) -> None:
    other = Hub(hub.store, hub.clock)
    alien = Reservation(ask=other.ask(lease(1)), granted_output=1, reserved=(1,))
    with pytest.raises(ValueError, match="no reservation"):
        await hub.store.begin_epoch(hub.id, {}, [alien])


# A Redis that forgets its scripts, or does not take them


async def test_scripts_that_redis_has_forgotten_are_sent_again(hub: Hub, raw: Any) -> None:
    await hub.admit(lease(9))
    await raw.script_flush()
    verdicts = await asyncio.gather(*(hub.admit(lease(9)) for _ in range(3)))

    assert {verdict.is_admitted for _, verdict in verdicts} == {True}
    assert await raw.script_exists(load("admit").sha) == [True]
    assert (await hub.left(lease(9))) == [5]


async def test_a_redis_that_allows_eval_alone(redis: RedisServer, raw: Any, clock: Clock) -> None:
    await raw.acl_setuser(
        "narrow",
        enabled=True,
        passwords=["+a p@ss"],
        keys=["eh1:*"],
        commands=[f"+{word}" for word in _COMMANDS],
    )
    url = redis.url.replace("redis://", "redis://narrow:a%20p%40ss@").replace("/0", "/3")
    async with opened(url, clock) as store:
        hub = Hub(store, clock)
        await hub.begin()
        request, verdict = await hub.admit(bucket(200), quota(100), lease(1))
        assert verdict.is_admitted
        await store.report(hub.id, {request: 5}, 1_000)
        await hub.passes(1_000)
        assert await store.reap(hub.id, 1) == [request]
        assert await hub.settle(request, 10, 7) is not None
        assert not await store.cancel(hub.id, request)
        assert (await store.held(hub.id), await store.age_ms()) == ([], 0)
        assert await hub.left(bucket(200), quota(100), lease(1)) == [184, 83, 1]
    await raw.acl_deluser("narrow")


_COMMANDS = ["eval", "select", "time", "exists", "get", "mget", "set", "del", "hget", "hset", "hdel", "zadd", "zrem"]
_COMMANDS += ["zrangebyscore", "pexpire", "sadd", "hkeys", "hgetall", "info"]
"""All that the store asks of Redis."""


async def test_a_password_that_is_wrong(redis: RedisServer, clock: Clock) -> None:
    async with opened(redis.url.replace("redis://", "redis://nobody:nothing@"), clock) as store:
        with pytest.raises(LimitsUnavailable) as caught:
            await Hub(store, clock).left(lease(1))
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)


async def test_an_error_in_a_script_is_logged(hub: Hub, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    await raw.set(f"eh1:{{{hub.id}}}:l:team_1/running", "seven")
    with pytest.raises(LimitsUnavailable) as caught, caplog.at_level(logging.ERROR, "gateway.limits"):
        await hub.admit(lease(9))
    with pytest.raises(LimitsUnavailable):
        await hub.admit(lease(9))

    assert caught.value.__cause__ is not None
    assert caplog.text.count("Redis does not run admit.lua: ERR") == 1
    assert isinstance(hub.store, RedisLimits)
    assert not hub.store.is_down


@pytest.mark.parametrize(
    ("no", "yes"),
    [("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"), ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE")],
)
async def test_a_redis_that_says_no_is_down_until_it_says_yes(
    redis: RedisServer, raw: Any, caplog: pytest.LogCaptureFixture, no: str, yes: str
) -> None:
    async with opened(redis.url, breaker=Breaker(3, 0.05)) as store:
        hub = Hub(store, Clock())
        await hub.left(lease(1))
        await raw.execute_command(*no.split())
        try:
            with caplog.at_level(logging.INFO, "gateway.limits"):
                for _ in range(20):
                    with pytest.raises(LimitsUnavailable):
                        await hub.admit(lease(1))
                    await asyncio.sleep(0.01)
                assert store.is_down
                await raw.execute_command(*yes.split())
                await answered(hub)
                assert not store.is_down
        finally:
            await raw.execute_command(*yes.split())

    lines = [record.getMessage() for record in caplog.records if record.name.startswith("gateway.limits")]
    assert len(lines) == 2, lines
    assert "Redis says no, so limits cannot be checked" in lines[0]
    assert "Redis answers again" in lines[1]


@pytest.mark.parametrize(
    ("policy", "memory", "is_told"),
    [
        ("volatile-lru", "1gb", True),
        ("allkeys-random", "1gb", True),
        ("noeviction", "1gb", False),
        ("allkeys-lru", "0", False),
    ],
)
async def test_a_redis_that_may_forget_single_keys_is_told_of(
    redis: RedisServer, raw: Any, caplog: pytest.LogCaptureFixture, policy: str, memory: str, is_told: bool
) -> None:
    """Many are set up so by those who sell them. What a quota has used would be gone, and nothing else."""
    await raw.config_set("maxmemory-policy", policy)
    await raw.config_set("maxmemory", memory)
    try:
        async with opened(redis.url, Clock()) as store:
            with caplog.at_level(logging.ERROR, "gateway.limits"):
                await Hub(store, Clock()).left(lease(1))
    finally:
        await raw.config_set("maxmemory-policy", "noeviction")
        await raw.config_set("maxmemory", "0")

    told = [record.getMessage() for record in caplog.records if record.name.startswith("gateway.limits")]
    expected = f"Redis may forget what quotas have used: its maxmemory-policy is {policy}, and must be noeviction"
    assert told == ([expected] if is_told else [])


# A Redis that pauses, or dies


@pytest.fixture
def own_redis(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis", free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def refused(hub: Hub, *uses: Use | Meter) -> BaseException | None:
    """Why it was, in time; None if Redis was not even asked."""
    async with asyncio.timeout(SOON_S):
        with pytest.raises(LimitsUnavailable) as caught:
            await hub.admit(*uses)
    return caught.value.__cause__


async def answered(hub: Hub, *uses: Use | Meter) -> list[int]:
    """What is left, as soon as Redis is asked again."""
    left: list[int] = []

    async def is_known() -> bool:
        try:
            left[:] = await hub.left(*uses)
        except LimitsUnavailable:
            return False
        return True

    await until(is_known)
    return left


async def test_a_frozen_redis_is_answered_for_in_time_and_charges_nothing_afterwards(
    own_redis: RedisServer, clock: Clock
) -> None:
    uses = (bucket(1_000, 0), quota(1_000), lease(50))
    async with opened(own_redis.url, clock) as store:
        hub = Hub(store, clock)
        await hub.begin()
        await store.cancel(hub.id, (await hub.admit(*uses))[0])  # the script is known by now
        own_redis.freeze()
        try:
            reasons = await asyncio.gather(*(refused(hub, *uses) for _ in range(10)))
            assert {type(reason) for reason in reasons} == {TimeoutError}
            assert store.is_down
            assert await refused(hub, *uses) is None
            await asyncio.sleep(2.5 * ANSWER_S)  # time for it to see that nobody listens any more
        finally:
            own_redis.thaw()

        assert await answered(hub, *uses) == [1_000, 1_000, 50]
        assert not store.is_down
        assert (await hub.admit(*uses))[1] == Verdict(is_admitted=True, granted_output=100, remaining=(890, 890, 49))


async def test_a_short_pause_costs_only_those_that_had_to_wait_too_long(own_redis: RedisServer, clock: Clock) -> None:
    async with opened(own_redis.url, clock) as store:
        hub = Hub(store, clock)
        await hub.left(lease(50))
        own_redis.freeze()
        early = asyncio.create_task(refused(hub, lease(50)))
        await asyncio.sleep(0.6 * ANSWER_S)
        late = asyncio.create_task(hub.admit(lease(50)))
        assert isinstance(await early, TimeoutError)
        own_redis.thaw()

        assert (await late)[1] == Verdict(is_admitted=True, granted_output=100, remaining=(49,))
        assert not store.is_down


async def test_a_paused_redis(own_redis: RedisServer, clock: Clock) -> None:
    uses = (bucket(1_000, 0), lease(50))
    async with opened(own_redis.url, clock) as store, Redis.from_url(own_redis.url) as raw:
        hub = Hub(store, clock)
        await hub.left(*uses)
        await raw.client_pause(1_000)
        assert isinstance(await refused(hub, *uses), TimeoutError)

        assert await answered(hub, *uses) == [1_000, 50]


async def test_a_killed_redis_comes_back_empty_and_is_known_to_be(own_redis: RedisServer, clock: Clock) -> None:
    uses = (quota(1_000), lease(50))
    async with opened(own_redis.url, clock) as store:
        hub = Hub(store, clock)
        await hub.begin()
        request, _ = await hub.admit(*uses)
        await asyncio.to_thread(own_redis.kill)
        for _ in range(8):
            await refused(hub, *uses)
        with pytest.raises(LimitsUnavailable):
            await hub.settle(request, 10, 10)
        await asyncio.to_thread(own_redis.start)

        await answered(hub)
        assert (await hub.admit(*uses))[1] == Verdict(is_admitted=False, is_lost=True)
        assert await hub.settle(request, 10, 10) is None
        await hub.begin(day_1=20)
        assert (await hub.admit(*uses))[1].remaining == (870, 49)


async def test_a_redis_that_comes_back_with_an_older_state_is_lost(own_redis: RedisServer, clock: Clock) -> None:
    uses = (quota(1_000), lease(50))
    async with opened(own_redis.url, clock) as store, Redis.from_url(own_redis.url) as raw:
        hub = Hub(store, clock)
        await hub.begin(day_1=600)
        await store.age_ms()
        early, _ = await hub.admit(*uses)
        raised = hub.ask(*uses)
        await store.admit(raised)
        await raw.save()
        await hub.settle(early, 10, 90)
        assert await store.raise_output(hub.id, raised.request_id, 150) == 150
        clock.now_ms += 5_000
        await asyncio.to_thread(own_redis.kill)
        await asyncio.to_thread(own_redis.start)

        await answered(hub)
        assert sorted(await store.held(hub.id)) == sorted([early, raised.request_id]), "it has its older state"
        assert (await hub.admit(*uses))[1] == Verdict(is_admitted=False, is_lost=True)
        assert await store.raise_output(hub.id, early, 1_000) == 100
        assert await store.age_ms() == 0
        again = Reservation(ask=raised, granted_output=150, reserved=(160, 1))
        assert not await store.begin_epoch(hub.id, {}, [again], is_whole=False)
        assert await store.begin_epoch(hub.id, {"day_1": 550}, (), settled=[early])
        assert await hub.left(*uses) == [1_000 - 550 - 160, 49]
        assert (await hub.admit(*uses))[1].is_admitted


async def test_nobody_there(free_port: Callable[[], int], clock: Clock) -> None:
    async with opened(f"redis://127.0.0.1:{free_port()}/0", clock, breaker=Breaker(3, 60.0)) as store:
        hub = Hub(store, clock)
        for _ in range(3):
            with pytest.raises(LimitsUnavailable) as caught:
                await hub.left(lease(1))
            assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(LimitsUnavailable) as caught:
            await hub.left(lease(1))
        assert caught.value.__cause__ is None
        assert store.is_down


# Answers that are lost


class Between:
    """A port that passes everything on to Redis, and its answers only while it is told to; later ones wait."""

    def __init__(self, port: int, redis: RedisServer) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_connections = 0
        self._port = port
        self._redis = redis
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drop()
        self._server.close()
        await self._server.wait_closed()

    def drop(self) -> None:
        """All connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self._redis.port)
        self._writers += [writer, redis_writer]
        await asyncio.gather(self._pass_on(reader, redis_writer), self._pass_on(redis_reader, writer, self.answers))

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may: asyncio.Event | None = None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if may is not None:
                    await may.wait()
                writer.write(data)
        writer.transport.abort()


@pytest.mark.parametrize("ending", ["no answer", "broken", "cancelled"])
async def test_what_was_admitted_without_an_answer_is_given_back(
    redis: RedisServer, store: RedisLimits, free_port: Callable[[], int], clock: Clock, ending: str
) -> None:
    uses = (bucket(1_000, 0), quota(1_000), lease(50))
    async with AsyncExitStack() as stack:
        between = await stack.enter_async_context(Between(free_port(), redis))
        hub = Hub(await stack.enter_async_context(opened(between.url, clock)), clock)
        await hub.begin()
        between.answers.clear()
        admission = asyncio.create_task(hub.admit(*uses))
        witness = Hub(store, clock)
        witness.id = hub.id

        async def is_given_back() -> bool:
            return await witness.left(*uses) == [1_000, 1_000, 50]

        async def is_taken() -> bool:
            return not await is_given_back()

        await until(is_taken)
        if ending == "broken":
            between.drop()
        elif ending == "cancelled":
            admission.cancel()
        with pytest.raises(asyncio.CancelledError if ending == "cancelled" else LimitsUnavailable):
            await admission
        assert await witness.left(*uses) == [890, 890, 49]
        between.answers.set()

        await answered(hub)
        await until(is_given_back)


async def test_one_that_is_asked_for_again_meanwhile_stays(
    redis: RedisServer, free_port: Callable[[], int], clock: Clock
) -> None:
    async with Between(free_port(), redis) as between, opened(between.url, clock) as store:
        hub = Hub(store, clock)
        await hub.left(lease(50))
        between.answers.clear()
        ask = hub.ask(lease(50))
        with pytest.raises(LimitsUnavailable):
            await store.admit(ask)
        between.answers.set()
        verdict = await store.admit(ask)
        await asyncio.sleep(2 * ANSWER_S)

        assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(49,))
        assert await hub.left(lease(50)) == [49]


async def test_a_connection_on_which_nothing_comes_is_given_up(
    redis: RedisServer, free_port: Callable[[], int], clock: Clock
) -> None:
    async with Between(free_port(), redis) as between, opened(between.url, clock, breaker=Breaker(99, 1.0)) as store:
        hub = Hub(store, clock)
        await hub.left(lease(50))
        between.answers.clear()

        async def is_new() -> bool:
            with contextlib.suppress(LimitsUnavailable):
                await hub.left(lease(50))
            return between.num_connections > 1

        await until(is_new)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_process_that_was_held_up_itself_reads_what_has_come_meanwhile(
    redis: RedisServer, new_loop: Callable[[], asyncio.AbstractEventLoop], clock: Clock
) -> None:
    async def ask() -> list[int]:
        async with opened(redis.url, clock) as store:
            hub = Hub(store, clock)
            await hub.left(lease(1))
            asked = asyncio.create_task(hub.left(lease(1)))
            await asyncio.sleep(0)
            time.sleep(2 * ANSWER_S)  # noqa: ASYNC251  (that is what it is about)
            return await asked

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(ask()) == [1]
