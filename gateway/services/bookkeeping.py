"""All that meters in one process: journal, recorder, posting, roll-ups and recovery, started and ended in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.domain.ids import RequestId
from gateway.domain.ledger import LedgerRow
from gateway.journal.folder import JournalFolder
from gateway.journal.writer import JournalWriter
from gateway.services.metering import MeteringRecorder
from gateway.services.ports import Clock
from gateway.services.posting import Poster
from gateway.services.recovery import FinalsSource, Recovery
from gateway.services.stores import Storage

logger = logging.getLogger(__name__)

OnPosted = Callable[[Sequence[LedgerRow]], None]

RETRY_S = 1.0
DRAIN_S = 5.0
"""How long the end of the process waits for the database; the next process posts what is left."""


class Bookkeeping:
    """The metering of this process.

    Args:
        writer_id: new for this process (`gateway.journal.folder.new_writer_id`), and its client id at the engines.
        on_posted: told, in this order, as `Poster`'s; those of `on_recovered` as `Recovery`'s `on_posted`.
        is_told: as `Poster`'s and `Recovery`'s.
        on_gone: as `Recovery`'s `on_finished`.

    Attributes:
        recorder: to be told of every request.

    Raises:
        OSError: the journal's folder cannot be written to.
    """

    def __init__(
        self,
        home: Path,
        storage: Storage,
        finals: FinalsSource,
        clock: Clock,
        *,
        writer_id: str,
        drain_s: float = DRAIN_S,
        on_posted: Sequence[OnPosted] = (),
        on_recovered: Sequence[OnPosted] = (),
        is_told: Callable[[RequestId], bool] = lambda _: True,
        on_gone: Callable[[str], None] = lambda _: None,
    ) -> None:
        folder = JournalFolder(home)
        self._journal = JournalWriter(folder, writer_id)
        self._drain_s = drain_s
        self.recorder = MeteringRecorder(self._journal, clock)
        self._poster = Poster(self._journal, storage, _all_of([self.recorder.posted, *on_posted]), is_told)
        self._recovery = Recovery(
            folder,
            storage,
            finals,
            clock,
            writer_id=writer_id,
            is_open=self.recorder.is_open,
            on_posted=_all_of(on_recovered),
            is_told=is_told,
            on_finished=on_gone,
        )

    @property
    def is_recovered(self) -> bool:
        """Nothing of dead processes with this home waits to be entered in the ledger."""
        return self._recovery.is_idle

    @property
    def dead(self) -> Collection[str]:
        """As `Recovery`'s."""
        return self._recovery.dead

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """To be held while requests are answered: inside what connects to database and engines."""
        tasks = [
            asyncio.create_task(_for_ever(work), name=name)
            for name, work in (
                ("journal-sync", self.recorder.run),
                ("ledger-posting", self._poster.run),
                ("journal-recovery", self._recovery.run),
            )
        ]
        try:
            yield
        finally:
            is_finished = False
            try:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await self.recorder.flush()
                is_finished = await self._poster.drain(self._drain_s) and not self.recorder.num_unwritten
            finally:
                self._journal.close(remove=is_finished)


def _all_of(listeners: Sequence[OnPosted]) -> OnPosted:
    def tell(rows: Sequence[LedgerRow]) -> None:
        for listener in listeners:
            listener(rows)

    return tell


async def _for_ever(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:
            # A bug of ours. Requests go on being answered and recorded, so posting must go on, too.
            logger.exception("a part of the metering failed; it is started again")
        await asyncio.sleep(RETRY_S)
