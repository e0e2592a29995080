"""From settings to the store that limits are kept in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gateway.limits.degrading import DegradingLimits
from gateway.limits.memory import MemoryLimits
from gateway.limits.redis_store import RedisLimits
from gateway.services.limit_store import LimitStore
from gateway.services.ports import Clock, Readiness
from gateway.settings import Settings

DOWN = "limits cannot be checked: Redis does not answer"
DEGRADED = "limits are degraded: Redis does not answer, so this process allows its share of them"


class OpenedLimits(NamedTuple):
    """
    Attributes:
        is_up: whether the store that all processes share answers.
        readiness: of limits; ready with a reason if they are degraded.
    """

    store: LimitStore
    is_up: Callable[[], bool]
    readiness: Callable[[], Readiness]


def in_memory(clock: Clock) -> MemoryLimits:
    return MemoryLimits(_steady_ms(clock))


def _steady_ms(clock: Clock) -> Callable[[], int]:
    """A clock in ms that nobody sets: what only this process keeps is measured by it."""
    return lambda: int(clock.monotonic() * 1000)


def open_limits(settings: Settings, clock: Clock) -> OpenedLimits:
    """In Redis if there is one, else in this process."""
    if settings.redis.url is None:
        return OpenedLimits(in_memory(clock), lambda: True, lambda: Readiness(True))
    limits = settings.limits
    redis = RedisLimits(settings.redis.url.get_secret_value(), connect_s=limits.answer_s, answer_s=limits.answer_s)

    def is_up() -> bool:
        return not redis.is_down

    if limits.when_unavailable == "refuse":
        return OpenedLimits(redis, is_up, lambda: Readiness(is_up(), "" if is_up() else DOWN))
    shares = DegradingLimits(redis, num_processes=limits.processes, now_ms=_steady_ms(clock))
    return OpenedLimits(shares, is_up, lambda: Readiness(True, "" if is_up() else DEGRADED))
