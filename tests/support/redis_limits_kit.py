"""A store of limits in Redis, and an organization whose requests ask it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

from redis.asyncio import Redis

from gateway.domain.ids import RequestId, new_organization_id, new_request_id
from gateway.domain.limits.admission import Ask, Settlement, Verdict
from gateway.domain.limits.meters import Bucket, Lease, Meter, Quota, Use
from gateway.domain.usage import TokenUsage
from gateway.limits.redis_store import RedisLimits
from gateway.services.limit_store import LimitStore


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now_ms


class Hub:
    """An organization, and asks of its requests."""

    def __init__(self, store: LimitStore, clock: Clock) -> None:
        self.id = new_organization_id(time.time_ns() // 1_000_000)
        self.store = store
        self.clock = clock

    async def admit(self, *uses: Use | Meter, **changes: Any) -> tuple[RequestId, Verdict]:
        ask = self.ask(*uses, **changes)
        return ask.request_id, await self.store.admit(ask)

    def ask(
        self,
        *uses: Use | Meter,
        prompt: int = 10,
        least: int = 1,
        expected: int | None = None,
        most: int = 100,
        lease_ms: int = 60_000,
        request_id: RequestId | None = None,
        owner: str = "gateway",
    ) -> Ask:
        return Ask(
            organization_id=self.id,
            request_id=request_id or new_request_id(self.clock.now_ms),
            owner=owner,
            lease_ms=lease_ms,
            prompt_tokens=prompt,
            min_output=least,
            expected_output=most if expected is None else expected,
            max_output=most,
            uses=tuple(use if isinstance(use, Use) else Use(use) for use in uses),
        )

    async def begin(self, store: LimitStore | None = None, **committed: int) -> None:
        await (store or self.store).begin_epoch(self.id, committed, ())

    async def passes(self, ms: int) -> None:
        """Time, in which the store is asked again and again."""
        end_ms = self.clock.now_ms + ms
        while self.clock.now_ms < end_ms:
            self.clock.now_ms = min(self.clock.now_ms + 500, end_ms)
            await self.store.held(self.id)

    async def left(self, *uses: Use | Meter) -> list[int]:
        return list(await self.store.look(self.id, self.ask(*uses).uses))

    async def settle(self, request_id: RequestId, prompt: int, output: int, cached: int = 0) -> Settlement | None:
        return await self.store.settle(self.id, request_id, TokenUsage(prompt, output, cached))


def bucket(capacity: int, refill: int = 60, **more: Any) -> Bucket:
    return Bucket(key="team_1/tokens", capacity=capacity, refill=refill, **more)


def quota(amount: int, key: str = "day_1", **more: Any) -> Quota:
    return Quota(key=key, amount=amount, **more)


def lease(limit: int, **more: Any) -> Lease:
    return Lease(key="team_1/running", limit=limit, **more)


@asynccontextmanager
async def opened(url: str, now_ms: Callable[[], int] | None = None, **more: Any) -> AsyncIterator[RedisLimits]:
    store = RedisLimits(url, now_ms=now_ms, **more)
    try:
        yield store
    finally:
        await store.close()


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = 20.0) -> None:
    """Asks again and again."""
    async with asyncio.timeout(within_s):
        while not await holds():  # noqa: ASYNC110  (what it is cannot tell us)
            await asyncio.sleep(0.005)


class InRedis:
    """For a test that tries several stores one after another, each with a clock of its own: all are this one, whose
    connections stay."""

    def __init__(self, url: str) -> None:
        self._raw = Redis.from_url(url)
        self._now_ms: Callable[[], int] = Clock()
        self.store: LimitStore = RedisLimits(url, now_ms=lambda: self._now_ms(), answer_s=5.0)

    def __call__(self, now_ms: Callable[[], int]) -> Self:
        self._now_ms = now_ms
        return self

    async def lose(self) -> None:
        """All that it knows."""
        await self._raw.flushall()

    async def close(self) -> None:
        await self.store.close()
        await self._raw.aclose()
