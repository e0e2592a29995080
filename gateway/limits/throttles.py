"""Throttles over the library `limits`, which is made for this: coarse counting of what should be rare.

Of its strategies the sliding window counter: it counts no event that it refuses, a count is two numbers whatever the
rate, and nobody gets the rate twice at the edge of a window. Its storages are the library's own, in memory or in Redis.
Not used of it: `reset`, which makes Redis look through all its keys, and costs other than 1. A rate is a part of the
key in its storages, so a rate that is changed begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import cast

from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage, RedisStorage, SlidingWindowCounterSupport
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.limits.breaker import Breaker
from gateway.services.throttle import Throttle, Unthrottled

OFF = "off"
PREFIX = "evenhand:throttle"
ANSWER_S = 0.1
"""Within which Redis has counted, connecting included, or the count is made without it."""
FAILURES = 3
PAUSE_S = 5.0
CONNECTIONS = 8
MOST_COUNTED = 2_000
"""Whose events are counted in memory; then those of whom nothing was heard for longest are forgotten. The library looks
through all of them at each count, 0.3 ms for so many."""
MOST_REFUSED = 10_000

_log = logging.getLogger(__name__)

Ask = Callable[[SlidingWindowCounterRateLimiter], Awaitable[int]]


class Throttles:
    """Makes throttles that count in one place: in Redis, if it is set up and answers, else in this process.

    While Redis is away each process counts for itself, from nothing, so that nobody is refused or held up for that.

    Args:
        redis_url: as redis-py reads it; may hold a password.
    """

    def __init__(self, redis_url: str | None, *, answer_s: float = ANSWER_S, breaker: Breaker | None = None) -> None:
        self._answer_s = answer_s
        self._breaker = breaker or Breaker(FAILURES, PAUSE_S)
        self._pool: BlockingConnectionPool | None = None
        self._shared: SlidingWindowCounterRateLimiter | None = None
        if redis_url is not None:
            # The library's own way to an address knows neither Unix sockets nor a port that is left out.
            self._pool = BlockingConnectionPool.from_url(
                redis_url,
                max_connections=CONNECTIONS,
                timeout=answer_s,
                socket_connect_timeout=answer_s,
                socket_timeout=answer_s,
                retry=Retry(NoBackoff(), 0),
            )
            options: dict[str, BlockingConnectionPool] = {"connection_pool": self._pool}
            storage = RedisStorage("async+redis://", implementation="redispy", key_prefix=PREFIX, **options)  # type: ignore[arg-type]  # its annotation forgets the pool
            self._shared = SlidingWindowCounterRateLimiter(storage)

    @property
    def is_alone(self) -> bool:
        """Redis is set up and did not answer lately, so this process counts without the others."""
        return self._breaker.is_open

    def throttle(self, name: str, rate: str) -> Throttle:
        """
        Args:
            name: of what is counted; unique.
            rate: such as ``30/minute``, or ``off``. Raises ValueError for anything else.
        """
        return Unthrottled() if rate == OFF else CountingThrottle(name, parse(rate), self.shared)

    async def shared(self, ask: Ask) -> int | None:
        """What Redis answers; None if it does not, or there is none."""
        if self._shared is None or (ticket := self._breaker.enter()) is None:
            return None
        was_alone = self.is_alone
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await ask(self._shared)
        except (RedisError, OSError, TimeoutError) as e:
            self._breaker.failed(ticket)
            if self.is_alone and not was_alone:
                _log.warning("Redis does not count for throttles, so each process counts for itself: %r", e)
            return None
        except BaseException:
            self._breaker.left(ticket)
            raise
        self._breaker.succeeded()
        if was_alone:
            _log.warning("Redis counts for throttles again")
        return answer

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()


class CountingThrottle:
    """Implements `gateway.services.throttle.Throttle`.

    Who was refused is known here until it may come again, so that who goes on all the same costs nothing.
    """

    def __init__(self, name: str, rate: RateLimitItem, shared: Callable[[Ask], Awaitable[int | None]]) -> None:
        self._name = name
        self._rate = rate
        self._shared = shared
        self._own = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._counted: OrderedDict[str, None] = OrderedDict()
        self._refused_until: OrderedDict[str, float] = OrderedDict()

    async def count(self, who: str) -> int:
        async def ask(limiter: SlidingWindowCounterRateLimiter) -> int:
            if await limiter.hit(self._rate, self._name, who):
                return 0
            return max(1, await self._left(limiter, who))

        return self._refusal(who) or await self._asked(who, ask)

    async def wait_s(self, who: str) -> int:
        return self._refusal(who) or await self._asked(who, lambda limiter: self._left(limiter, who))

    async def _left(self, limiter: SlidingWindowCounterRateLimiter, who: str) -> int:
        """Seconds until there is room; 0 if there is now.

        Of the library's own answer a time that is a whole number of windows, as right after the first event, is 0.
        """
        storage = cast("SlidingWindowCounterSupport", limiter.storage)
        window_s = self._rate.get_expiry()
        before, before_ends_s, now, now_ends_s = await storage.get_sliding_window(
            self._rate.key_for(self._name, who), window_s
        )
        room = self._rate.amount - now
        if math.floor(before * before_ends_s / window_s) < room:
            return 0
        if room > 0:
            return max(1, math.ceil(before_ends_s - room * window_s / before))
        return max(1, math.ceil(now_ends_s - window_s))

    async def _asked(self, who: str, ask: Ask) -> int:
        seconds = await self._shared(ask)
        if seconds is None:
            await self._remember(who)
            seconds = await ask(self._own)
        if seconds > 0:
            self._refused_until[who] = time.monotonic() + seconds
            if len(self._refused_until) > MOST_REFUSED:
                self._refused_until.popitem(last=False)
        return seconds

    def _refusal(self, who: str) -> int:
        """Seconds that are left of an earlier one."""
        until = self._refused_until.get(who)
        if until is None:
            return 0
        left_s = until - time.monotonic()
        if left_s > 0:
            return math.ceil(left_s)
        del self._refused_until[who]
        return 0

    async def _remember(self, who: str) -> None:
        self._counted[who] = None
        self._counted.move_to_end(who)
        if len(self._counted) > MOST_COUNTED:
            forgotten, _ = self._counted.popitem(last=False)
            await self._own.clear(self._rate, self._name, forgotten)
