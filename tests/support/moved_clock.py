"""A clock that a test moves and several processes read: the machine's time and an offset, which is in a file."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_OFFSET = struct.Struct("d")


class MovedClock:
    """Implements `gateway.services.ports.Clock`. It goes on by itself; its monotonic time is never moved.

    Args:
        path: of the file, which is made if it is not there. Whoever has it sees every move at once.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_OFFSET.pack(0.0))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _OFFSET.size)

    def time(self) -> float:
        offset: float = _OFFSET.unpack(self._shared[:])[0]
        return time.time() + offset

    def monotonic(self) -> float:
        return time.monotonic()

    def move_to(self, at_s: float) -> None:
        """It is now so many seconds since the epoch, for everybody."""
        self._shared[:] = _OFFSET.pack(at_s - time.time())
