"""From this process' journal to the ledger, and from the ledger to the hourly sums.

The journal's files are read, not what is in memory: while the database does not answer, rows wait on disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.domain.ids import RequestId
from gateway.domain.ledger import LedgerRow
from gateway.errors import StorageDown
from gateway.journal.tail import JournalTail
from gateway.journal.writer import JournalFull, JournalWriter
from gateway.services.stores import Storage

logger = logging.getLogger(__name__)

POST_EVERY_S = 0.5
ROLL_UP_EVERY_S = 1.0
ROLL_UP_ROWS = 1000
"""Most rows that one transaction adds to the hourly sums."""
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 5.0


async def post(storage: Storage, rows: Sequence[LedgerRow]) -> int:
    """Enter rows that are not in the ledger yet; how many it were. Raises `StorageDown`."""
    if not rows:
        return 0
    async with storage.writing() as work:
        return await work.ledger.post(rows)


class Poster:
    """Posts what this process closes. The rows are on disk, so it can wait for the database as long as it takes.

    Args:
        on_posted: told of rows that are in the ledger from now on.
        is_told: whether everybody else who has to be told of a settled request has been; until then the journal stays,
            for the next process to tell them.
    """

    def __init__(
        self,
        journal: JournalWriter,
        storage: Storage,
        on_posted: Callable[[Sequence[LedgerRow]], None] = lambda _: None,
        is_told: Callable[[RequestId], bool] = lambda _: True,
    ) -> None:
        self._journal = journal
        self._storage = storage
        self._on_posted = on_posted
        self._tail = JournalTail(journal.folder, journal.writer_id, is_finished=False, is_told=is_told)
        self._pause_s = FIRST_PAUSE_S

    async def run(self) -> None:
        """Post and roll up, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_posting())
            group.create_task(self._keep_rolling_up())

    async def drain(self, timeout_s: float) -> bool:
        """Post the rest, once nothing is settled any more and `run` has ended; whether the journal is finished with.

        What is left after timeout_s is posted by whichever process comes next.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._post_some():
                    pass
                await roll_up(self._storage)
        except (TimeoutError, StorageDown, OSError) as e:
            logger.warning("the journal is not posted to its end: %s", type(e).__name__)
            return False
        return not (self._tail.open or self._tail.damaged or self._tail.has_untold)

    async def _keep_posting(self) -> None:
        while True:
            try:
                is_last = await self._post_some()
            except StorageDown:
                await self._back_off("the database does not answer")
            except Exception:
                # Rows that cannot be posted must not end the posting; they stay in the journal and are tried again.
                logger.exception("posting failed")
                await self._back_off("posting failed")
            else:
                self._pause_s = FIRST_PAUSE_S
                if is_last:
                    await asyncio.sleep(POST_EVERY_S)

    async def _post_some(self) -> bool:
        """One batch; whether it was the last for now."""
        batch = self._tail.read()
        await post(self._storage, batch.rows)
        self._on_posted(batch.rows)
        self._tail.commit(batch)
        if self._journal.number in self._tail.damaged:
            # What comes behind the damage could not be read.
            try:
                self._journal.seal()
            except JournalFull as e:
                logger.error("the damaged journal cannot be left (%s)", e)  # noqa: TRY400 - no bug
        return batch.is_last

    async def _back_off(self, why: str) -> None:
        logger.warning("%s; settled requests wait in the journal, next try in %.1f s", why, self._pause_s)
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    async def _keep_rolling_up(self) -> None:
        while True:
            try:
                await roll_up(self._storage)
            except StorageDown:
                pass  # the posting says so already
            except Exception:
                # The sums can be made later, from rows that stay; the process must not end for it.
                logger.exception("rolling up failed")
            await asyncio.sleep(ROLL_UP_EVERY_S)


async def roll_up(storage: Storage) -> None:
    """Add all rows that wait for it to the hourly sums, unless another process does. Raises `StorageDown`."""
    num_rows = ROLL_UP_ROWS
    while num_rows:
        async with storage.writing() as work:
            num_rows = await work.ledger.roll_up(ROLL_UP_ROWS)
