"""Signs of life on one connection: gives ours at an interval, and notices when the other side gives none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Heartbeat:
    """Beats on the running event loop until `stop`.

    Silence is counted in beats, not by the clock: a gateway whose own loop stood still must not blame the engine.

    Args:
        beat: called every interval_s; must not raise.
        on_silence: called once, when `heard` was not called for limit_s; nothing is called after it.
    """

    def __init__(
        self, interval_s: float, limit_s: float, *, beat: Callable[[], None], on_silence: Callable[[], None]
    ) -> None:
        self._interval_s = interval_s
        self._limit_beats = max(1, round(limit_s / interval_s))
        self._beat = beat
        self._on_silence = on_silence
        self._silent_beats = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s, self._tick)

    def heard(self) -> None:
        """The other side said something, whatever it was."""
        self._silent_beats = 0

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._silent_beats += 1
        if self._silent_beats > self._limit_beats:
            self._on_silence()
            return
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        self._beat()
