"""How far a process is on its way out. Knows nothing of signals, HTTP or what the process does."""

from __future__ import annotations

import asyncio


class Shutdown:
    """Running, draining, closing, or cutting short what still runs: each step includes the ones before it."""

    def __init__(self) -> None:
        self._drain = asyncio.Event()
        self._cut = asyncio.Event()
        self._is_closing = False

    @property
    def is_draining(self) -> bool:
        """It was asked to leave. Readiness is false, new requests are still taken."""
        return self._drain.is_set()

    @property
    def is_closing(self) -> bool:
        """New requests are not taken any more; those that run may finish."""
        return self._is_closing

    def request(self) -> None:
        """The first call asks for a drain, the second cuts it short."""
        if self._drain.is_set():
            self._cut.set()
        self._drain.set()

    def close(self) -> None:
        self._drain.set()
        self._is_closing = True

    def cut(self) -> None:
        self.close()
        self._cut.set()

    async def wait_for_drain(self) -> None:
        await self._drain.wait()

    async def wait_for_cut(self) -> None:
        await self._cut.wait()
