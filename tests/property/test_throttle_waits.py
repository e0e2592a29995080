"""Whatever came before: when the wait that was told is over there is room, and a second before there was none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits.aio.storage import memory

from gateway.limits import throttles
from gateway.limits.throttles import CountingThrottle, Throttles


class _World:
    """A throttle, and the only time there is for it and the library."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: str, now_s: float) -> None:
        self.now_s = now_s
        for module in (memory, throttles):
            monkeypatch.setattr(module, "time", SimpleNamespace(time=self._now, monotonic=self._now))
        throttle = Throttles(None).throttle("test", rate)
        assert isinstance(throttle, CountingThrottle)
        self.throttle = throttle

    def _now(self) -> float:
        return self.now_s

    async def looked(self, at_s: float) -> int:
        """What looking says at that moment, whatever was said before."""
        before, self.now_s = self.now_s, at_s
        self.throttle._refused_until.clear()
        try:
            return await self.throttle.wait_s("a")
        finally:
            self.now_s = before
            self.throttle._refused_until.clear()


@given(
    amount=st.integers(1, 12),
    window_s=st.integers(1, 100),
    begin_s=st.integers(1_000_000_000_000, 1_000_000_100_000).map(lambda ms: ms / 1000),
    pauses_ms=st.lists(st.integers(0, 30_000), min_size=1, max_size=60),
)
def test_the_wait_that_is_told_is_true(amount: int, window_s: int, begin_s: float, pauses_ms: list[int]) -> None:
    async def live() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            world = _World(monkeypatch, f"{amount} per {window_s} seconds", begin_s)
            for pause_ms in pauses_ms:
                world.now_s += pause_ms / 1000
                wait_s = await world.throttle.count("a")
                assert 0 <= wait_s <= window_s
                if wait_s > 0:
                    assert await world.looked(world.now_s + wait_s + 0.001) == 0
                    if wait_s > 1:
                        assert await world.looked(world.now_s + wait_s - 1.001) > 0

    asyncio.run(live())
