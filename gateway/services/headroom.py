"""More output for a request that was granted less than it wants: asked for in slices while it streams.

Asked for a little before an answer gets to its cap, so that nobody waits for the store; and once more when it is there,
since others may have given something back. If there is no more the answer ends at its cap, not a token further. If that
cannot be told the answer waits there for a while, since the store or the database may come back, and then ends, too.
"""

from __future__ import annotations

import asyncio
import logging

from gateway.domain.events import Cause
from gateway.errors import LimitsUnavailable
from gateway.services.grants import Grant
from gateway.services.limiter import Limiter
from gateway.services.ports import Generation

SLICE_TOKENS = 256
AHEAD_TOKENS = 32
"""Output tokens before its cap that an answer's next slice is asked for at."""
PATIENCE_S = 5.0
"""How long an answer waits at its cap for a store that does not answer, and no more than half a lease: who cannot
report for most of one ends without an answer. It keeps its slot and its pages meanwhile."""
RETRY_S = 0.25

_log = logging.getLogger(__name__)


class Headroom:
    """Of one running request.

    Args:
        held_cap: of each answer for now.

    Attributes:
        cap: of each answer for now.
        cut: why its answers end at `cap`; None if they do not.
    """

    def __init__(self, limiter: Limiter, grant: Grant, generation: Generation, held_cap: int) -> None:
        self._limiter = limiter
        self._grant = grant
        self._generation = generation
        self.cap = held_cap
        self._most = max(grant.caps)
        self._patience_s = min(PATIENCE_S, limiter.lease_ms / 2000)
        self._asking: asyncio.Task[None] | None = None
        self._is_held = False
        self._asked_at_cap = 0
        self._is_closed = False
        self._has_failed = False
        self.cut: Cause | None = None
        generation.on_held(self._on_held)

    def look(self) -> None:
        """The answers have grown: ask for more if one of them is near its cap."""
        if self._asking is not None or self._is_closed or self._asked_at_cap == self.cap or self.cap == self._most:
            return
        if self._generation.progress.most_tokens >= self.cap - AHEAD_TOKENS:
            self._ask()

    async def close(self) -> None:
        """Nothing more is asked for."""
        self._is_closed = True
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
            await asyncio.wait({asking})

    def _on_held(self) -> None:
        self._is_held = True
        if self._asking is None and not self._is_closed:
            self._ask()

    def _ask(self) -> None:
        self._asking = asyncio.ensure_future(self._grow())

    async def _grow(self) -> None:
        """Ask, and again if an answer got to its cap meanwhile; the last word if there is no more."""
        now_s = asyncio.get_running_loop().time
        give_up_s: float | None = None
        try:
            while not self._is_closed:
                was_held = self._is_held
                self._asked_at_cap = self.cap
                is_raised = await self._is_raised()
                if is_raised:
                    self._is_held = False
                    return
                if not was_held:
                    if not self._is_held:
                        return
                elif is_raised is not None:
                    self._end("quota_exceeded")
                elif give_up_s is None or now_s() < give_up_s:
                    give_up_s = now_s() + self._patience_s if give_up_s is None else give_up_s
                    await asyncio.sleep(RETRY_S)
                else:
                    self._end("limits_unavailable")
        finally:
            self._asking = None

    def _end(self, cause: Cause) -> None:
        self._is_closed = True
        self.cut = cause
        self._generation.raise_cap(self.cap)

    async def _is_raised(self) -> bool | None:
        """Whether there is more, or no answer is left to have it; None if that cannot be told."""
        progress = self._generation.progress
        if not progress.num_open:
            return True
        wanted_cap = min(self._most, max(self.cap, progress.most_tokens) + SLICE_TOKENS)
        try:
            granted = await self._limiter.raise_output(
                self._grant, progress.ended_tokens + progress.num_open * wanted_cap
            )
        except LimitsUnavailable:
            return None
        except Exception:  # noqa: BLE001 - a bug of ours; nobody else would let the answer go on
            if not self._has_failed:
                _log.exception("asking for more output for %s failed", self._grant.info.request_id)
            self._has_failed = True
            return None
        progress = self._generation.progress
        cap = min(self._most, (granted - progress.ended_tokens) // max(progress.num_open, 1))
        if cap <= self.cap:
            return False
        self.cap = cap
        self._generation.raise_cap(cap)
        return True
