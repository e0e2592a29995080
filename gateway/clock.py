"""The time of this machine."""

from __future__ import annotations

import time


class SystemClock:
    """Implements `gateway.services.ports.Clock`."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
