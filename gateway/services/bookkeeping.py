"""All that meters in one process: journal, recorder, posting, roll-ups and recovery, started and ended in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.journal.folder import JournalFolder
from gateway.journal.writer import JournalWriter
from gateway.services.metering import MeteringRecorder
from gateway.services.ports import Clock
from gateway.services.posting import Poster
from gateway.services.recovery import FinalsSource, Recovery
from gateway.services.stores import Storage

logger = logging.getLogger(__name__)

RETRY_S = 1.0
DRAIN_S = 5.0
"""How long the end of the process waits for the database; the next process posts what is left."""


class Bookkeeping:
    """The metering of this process.

    Args:
        writer_id: new for this process (`gateway.journal.folder.new_writer_id`), and its client id at the engines.

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
    ) -> None:
        folder = JournalFolder(home)
        self._journal = JournalWriter(folder, writer_id)
        self._drain_s = drain_s
        self.recorder = MeteringRecorder(self._journal, clock)
        self._poster = Poster(self._journal, storage, self.recorder.posted)
        self._recovery = Recovery(folder, storage, finals, clock, writer_id=writer_id, is_open=self.recorder.is_open)

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


async def _for_ever(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:
            # A bug of ours. Requests go on being answered and recorded, so posting must go on, too.
            logger.exception("a part of the metering failed; it is started again")
        await asyncio.sleep(RETRY_S)
