"""A Redis of the module's own, which its tests may stop, and an organization whose limits are in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from databases import RedisServer
from redis.asyncio import Redis
from redis_limits_kit import Clock, Hub, opened

from gateway.limits.redis_store import RedisLimits


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
