"""A circuit breaker: who does not answer is left alone for a while. Knows nothing of who that is."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Opens after some failures in a row. When its pause is over it lets one call through, the probe, whose failure
    begins another pause. Any call that succeeds closes it, one that began before it opened too.

    Args:
        num_failures: in a row, until it opens.
        pause_s: in which nobody is let through.
        monotonic: seconds.
    """

    def __init__(self, num_failures: int, pause_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most_failures = num_failures
        self._pause_s = pause_s
        self._monotonic = monotonic
        self._num_failures = 0
        self._open_until: float | None = None
        self._is_probing = False
        self._turn = 0

    @property
    def is_open(self) -> bool:
        """From its opening until a call has succeeded, while one probes too."""
        return self._open_until is not None

    def enter(self) -> int | None:
        """None: not now. Else a ticket, to be handed in to `failed` or `left` if the call did not succeed."""
        if self._open_until is None:
            return self._turn
        if self._is_probing or self._monotonic() < self._open_until:
            return None
        self._is_probing = True
        self._turn += 1  # what calls from before have to say is no news of the probe
        return self._turn

    def succeeded(self) -> None:
        self._num_failures = 0
        self._open_until = None
        self._is_probing = False

    def failed(self, ticket: int) -> None:
        if ticket != self._turn:
            return
        self._num_failures += 1
        if self._is_probing or self._num_failures >= self._most_failures:
            self._open_until = self._monotonic() + self._pause_s
            self._is_probing = False
            self._turn += 1

    def left(self, ticket: int) -> None:
        """Given up by the caller, so nothing is known; if it was the probe, the next call is."""
        if ticket == self._turn:
            self._is_probing = False
