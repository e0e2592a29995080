"""News of changes between gateway processes, over Redis' publish and subscribe.

Redis keeps nothing of it: who is not listening misses a message and finds out by asking the database. So a message has
no content, and every failure here is a log line at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

CHANNEL = "evenhand:changes"

CONNECT_S = 1.0
SOCKET_S = 2.0
ANNOUNCE_S = 2.0
"""The longest that an announcement holds up whoever made the change."""
QUIET_S = 5.0
"""After so long without a message the server is asked whether it is there; it has `SOCKET_S` to say so."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

_FAILURES = (RedisError, OSError, TimeoutError)
_log = logging.getLogger(__name__)


class RedisFeed:
    """Implements `gateway.services.stores.ChangeFeed`.

    Args:
        url: ``redis://`` or ``rediss://``; may hold a password.
    """

    def __init__(self, url: str) -> None:
        self._client: Redis = Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=SOCKET_S,
            retry=Retry(NoBackoff(), 0),  # the pool renews dead connections; what else fails is not worth a wait
        )

    async def announce(self) -> None:
        try:
            async with asyncio.timeout(ANNOUNCE_S):
                await self._client.publish(CHANNEL, b"")
        except _FAILURES as e:
            _log.warning("a change was not announced: %s", type(e).__name__)

    async def heard(self) -> AsyncIterator[None]:
        """As the port says, and one item more whenever the connection is new: something may have been missed."""
        pause_s = FIRST_PAUSE_S
        is_lost = False
        while True:
            try:
                async with self._client.pubsub() as subscription:
                    await subscription.subscribe(CHANNEL)
                    while True:
                        message = await _next(subscription)
                        if message["type"] in ("message", "subscribe"):
                            pause_s, is_lost = FIRST_PAUSE_S, False
                            yield None
            except _FAILURES as e:
                if not is_lost:
                    _log.warning("Redis does not answer: %s; changes are heard of later", type(e).__name__)
                is_lost = True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Whoever listens has stopped before."""
        await self._client.aclose()


async def _next(subscription: PubSub) -> dict[str, Any]:
    """The next message of any kind. Raises TimeoutError if the server is not there any more."""
    message: dict[str, Any] | None = await subscription.get_message(timeout=QUIET_S)
    if message is None:
        await subscription.ping()
        message = await subscription.get_message(timeout=SOCKET_S)
        if message is None:
            raise TimeoutError
    return message
