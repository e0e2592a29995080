"""How every change of an administrator happens: in one transaction with its audit entries, then told to everybody."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from gateway.domain.audit import AuditDraft
from gateway.services.audit import Actor, draft
from gateway.services.ports import Clock
from gateway.services.stores import ChangeFeed, Storage, Work


class Change:
    """A change under way.

    Attributes:
        work: the transaction it happens in.
        now_ms: the time of all that is done in it, since the epoch.
    """

    def __init__(self, work: Work, actor: Actor, now_ms: int) -> None:
        self.work = work
        self.now_ms = now_ms
        self._actor = actor
        self._drafts: list[AuditDraft] = []

    def record(
        self, action: str, object_id: str, *, before: msgspec.Struct | None = None, after: msgspec.Struct | None = None
    ) -> None:
        """Have an audit entry written. A change that records nothing is rolled back."""
        self._drafts.append(draft(self._actor, action, object_id, at_ms=self.now_ms, before=before, after=after))

    async def write_audit(self) -> bool:
        """Write the entries; whether there were any."""
        for each in self._drafts:
            await self.work.audit.append(each)
        return bool(self._drafts)


class Changes:
    """Opens changes.

    Args:
        feed: None where no other process can hear of them at once.
    """

    def __init__(self, storage: Storage, feed: ChangeFeed | None, clock: Clock) -> None:
        self._storage = storage
        self._feed = feed
        self._clock = clock

    @contextlib.asynccontextmanager
    async def begin(self, actor: Actor) -> AsyncIterator[Change]:
        """One change: committed, with its audit entries, when the block ends well, and announced after that.

        Changes take turns over all processes, so what one has read is still so when it writes. One that has recorded
        nothing leaves nothing behind.
        """
        with contextlib.suppress(_NothingChanged):
            async with self._storage.writing() as work:
                # First of all: whoever has raised the version keeps the others out until the end of its transaction.
                await work.count_change()
                change = Change(work, actor, int(self._clock.time() * 1000))
                yield change
                if not await change.write_audit():
                    raise _NothingChanged
            if self._feed is not None:
                await self._feed.announce()


class _NothingChanged(Exception):
    """Rolls back the transaction of a change that was none."""
