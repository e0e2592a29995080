"""News over a real Redis: quickly heard by everybody, and again after Redis was away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from databases import RedisServer
from evenhand_process import wait_until
from identity_kit import KEY, MemoryStorage, holder_of

from gateway.clock import SystemClock
from gateway.services.directory import Directory
from gateway.storage.redis_feed import ANNOUNCE_S, CHANNEL, RedisFeed

QUICK_S = 0.2


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), free_port())
    server.start()
    yield server
    server.stop()


class Listener:
    """Counts what is heard."""

    def __init__(self, feed: RedisFeed) -> None:
        self.num_heard = 0
        self._news = asyncio.Event()
        self._feed = feed

    async def listen(self) -> None:
        async for _ in self._feed.heard():
            self.num_heard += 1
            self._news.set()

    async def wait(self, num: int, within_s: float = 20.0) -> None:
        """Until so many were heard in all."""
        async with asyncio.timeout(within_s):
            while self.num_heard < num:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def feed_of(url: str) -> AsyncIterator[tuple[RedisFeed, Listener]]:
    feed = RedisFeed(url)
    listener = Listener(feed)
    task = asyncio.create_task(listener.listen())
    try:
        yield feed, listener
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await feed.close()


async def test_everybody_hears_an_announcement_at_once(redis: RedisServer) -> None:
    async with feed_of(redis.url) as (ours, we), feed_of(redis.url) as (_, they):
        await we.wait(1)  # listening has begun
        await they.wait(1)
        for num in range(2, 6):
            await ours.announce()
            await we.wait(num, QUICK_S)
            await they.wait(num, QUICK_S)

        assert (we.num_heard, they.num_heard) == (5, 5)


async def test_a_killed_redis_is_found_again(redis: RedisServer) -> None:
    async with feed_of(redis.url) as (feed, listener):
        await listener.wait(1)
        await feed.announce()
        await listener.wait(2)
        redis.kill()
        await feed.announce()  # nobody hears it, and nothing is raised
        redis.start()
        await listener.wait(3)  # a new connection counts as news: something may have been missed
        await feed.announce()
        await listener.wait(4, QUICK_S)


async def test_the_first_announcement_after_a_restart_of_redis_is_heard(redis: RedisServer) -> None:
    """The announcer's own connection, from before, is dead without its knowing."""
    sender = RedisFeed(redis.url)
    async with feed_of(redis.url) as (_, listener):
        await listener.wait(1)
        await sender.announce()
        await listener.wait(2)
        await asyncio.to_thread(redis.kill)
        await asyncio.to_thread(redis.start)
        await listener.wait(3)
        await sender.announce()
        await listener.wait(4, QUICK_S)
    await sender.close()


async def test_a_redis_that_hangs_holds_an_announcement_up_for_a_bounded_time(redis: RedisServer) -> None:
    async with feed_of(redis.url) as (feed, listener):
        await listener.wait(1)
        await feed.announce()
        await listener.wait(2)
        redis.freeze()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            await feed.announce()
            assert loop.time() - begun < ANNOUNCE_S + 1
        finally:
            redis.thaw()
        num = listener.num_heard
        await feed.announce()
        await listener.wait(num + 1)


async def test_a_redis_that_falls_silent_is_noticed_by_who_listens(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection stays open, as with a machine that was unplugged."""
    monkeypatch.setattr("gateway.storage.redis_feed.QUIET_S", 0.2)
    monkeypatch.setattr("gateway.storage.redis_feed.SOCKET_S", 0.2)
    async with feed_of(redis.url) as (_, listener):
        await listener.wait(1)
        redis.freeze()
        try:
            await asyncio.to_thread(wait_until, lambda: "Redis does not answer" in caplog.text)
        finally:
            redis.thaw()
        await listener.wait(2)


async def test_nobody_there_is_not_an_error(free_port: Callable[[], int]) -> None:
    async with feed_of(f"redis://127.0.0.1:{free_port()}/0") as (feed, listener):
        await feed.announce()
        assert listener.num_heard == 0


async def test_a_redis_that_comes_later_is_found(tmp_path: Path, free_port: Callable[[], int]) -> None:
    server = RedisServer(tmp_path / "late", free_port())
    async with feed_of(server.url) as (feed, listener):
        await feed.announce()
        server.start()
        await listener.wait(1)
        await feed.announce()
        await listener.wait(2, QUICK_S)
    server.stop()


async def test_a_revocation_is_effective_within_the_blink_of_an_eye(redis: RedisServer) -> None:
    """The directory of one process, the announcement of another one."""
    holder = holder_of(KEY)
    public_id = holder.key.secret.public_id
    storage = MemoryStorage(holder)
    feed, other = RedisFeed(redis.url), RedisFeed(redis.url)
    directory = Directory(storage, feed, SystemClock())
    async with directory.running(), feed_of(redis.url) as (_, witness):
        await witness.wait(1)
        await directory.find(public_id)
        storage.revoke(holder)
        num_asked = storage.num_versions_asked
        await other.announce()
        async with asyncio.timeout(QUICK_S):
            await storage.wait_until(lambda: storage.num_versions_asked > num_asked)
            await storage.wait_idle()
        found = await directory.find(public_id)

        assert found is not None
        assert found.key.revoked_at_ms is not None
    await other.close()
    await feed.close()


def test_the_channel_has_a_name_of_its_own() -> None:
    assert CHANNEL == "evenhand:changes"
