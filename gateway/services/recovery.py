"""Settles what processes that died have left behind, each request exactly once.

A dead process is known by its journal, whose lock nobody holds. Its closed requests are posted as the process itself
would have done it; for those that were open, the engines are asked what they had used. A ledger takes a request's row
once, so a recovery that is itself interrupted is simply done again. Knows nothing of how engines are reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gateway.domain.ids import RequestId
from gateway.domain.ledger import LedgerRow, Opening
from gateway.errors import StorageDown
from gateway.journal.folder import JournalFolder, WriterLock
from gateway.journal.tail import MAX_ROWS, JournalTail, OpenRequest
from gateway.services.metering import EngineFinal, lost_row
from gateway.services.ports import Clock
from gateway.services.posting import post
from gateway.services.stores import Storage

logger = logging.getLogger(__name__)

EVERY_S = 2.0
OWN_EVERY_S = 10.0
GRACE_S = 30.0
"""How long engines that do not answer are waited for. One that answers says by itself when it has told everything:
at once, or when it has noticed the loss of the process (its client time-out is 10 s)."""


class FinalsPage(NamedTuple):
    """What the engines keep of a lost gateway's requests.

    Attributes:
        finals: some of them; the same again until they are acknowledged.
        is_complete: no engine has others, or ever will.
    """

    finals: Sequence[EngineFinal]
    is_complete: bool


class FinalsSource(Protocol):
    """All engines together."""

    async def collect(self, writer_id: str, acknowledge: Sequence[str] = ()) -> FinalsPage:
        """Those of the process with this writer_id, after forgetting what is acknowledged. Never raises."""


@dataclass(slots=True)
class _Case:
    """A dead process that is being taken care of.

    Attributes:
        since_s: when all that it had closed was posted; None before that.
        is_posted: all of its requests are in the ledger; somebody may still have to be told of some.
        found: final counts by the id of the part.
        settled: ids of parts that the engines may forget.
        failure: what went wrong last, so that it is said only once.
    """

    writer_id: str
    lock: WriterLock
    tail: JournalTail
    since_s: float | None
    found: dict[str, EngineFinal]
    settled: set[str]
    is_posted: bool = False
    failure: str = ""


class Recovery:
    """Looks after the journals of dead processes in one home.

    Args:
        writer_id: this process' own.
        is_open: whether this process has still to settle a request of its own.
        grace_s: how long engines that do not answer are waited for.
        on_posted: told of rows of dead processes that are in the ledger from now on; it may hear of one twice.
        is_told: whether it has passed on what it was told of a request. The journal stays until then: if this process
            dies, too, the next one tells it again.
        on_finished: told of a dead process when all its requests are in the ledger and told; not if a part of its
            journal cannot be read.
    """

    def __init__(
        self,
        folder: JournalFolder,
        storage: Storage,
        finals: FinalsSource,
        clock: Clock,
        *,
        writer_id: str,
        is_open: Callable[[str], bool],
        grace_s: float = GRACE_S,
        on_posted: Callable[[Sequence[LedgerRow]], None] = lambda _: None,
        is_told: Callable[[RequestId], bool] = lambda _: True,
        on_finished: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._storage = storage
        self._finals = finals
        self._clock = clock
        self._writer_id = writer_id
        self._is_open = is_open
        self._grace_s = grace_s
        self._on_posted = on_posted
        self._is_told = is_told
        self._on_finished = on_finished
        self._cases: dict[str, _Case] = {}
        self._unusable: set[str] = set()  # writers whose lock cannot even be looked at; that is said only once
        self._next_own_s = clock.monotonic() + OWN_EVERY_S

    @property
    def is_idle(self) -> bool:
        """There is no dead process whose requests are not all in the ledger, whoever takes care of it."""
        try:
            return not self._folder.has_unposted()
        except OSError:
            return False

    @property
    def dead(self) -> Collection[str]:
        """The writer_ids of the dead processes that are being taken care of."""
        return list(self._cases)

    async def run(self) -> None:
        """Until cancelled; what is not finished then is left to the next process."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(EVERY_S)
        finally:
            self.release()

    async def look(self) -> int:
        """Find dead processes and do what can be done for them now; how many of them wait for something."""
        try:
            self._find()
        except OSError as e:
            logger.error("the journals cannot be looked through (error %s)", e.errno)  # noqa: TRY400 - no bug
        for case in list(self._cases.values()):
            try:
                if await self._advance(case):
                    del self._cases[case.writer_id]
                    case.lock.release(remove=True)
            except StorageDown:
                logger.warning("the database does not answer; the journal of %s waits", case.writer_id)
            except Exception as e:
                # One journal must not keep others from being recovered; it stays, and is tried again.
                if case.failure != repr(e):
                    logger.exception("the recovery of journal %s failed; it is tried again", case.writer_id)
                case.failure = repr(e)
        if self._clock.monotonic() >= self._next_own_s:
            self._next_own_s = self._clock.monotonic() + OWN_EVERY_S
            await self._forget_own()
        return len(self._cases)

    def release(self) -> None:
        """Give up the locks, so that another process can go on."""
        for case in self._cases.values():
            case.lock.release(remove=False)
        self._cases.clear()

    def _find(self) -> None:
        writers = self._folder.writers()
        self._unusable.intersection_update(writers)
        for writer_id in writers:
            if writer_id == self._writer_id or writer_id in self._cases:
                continue
            try:
                lock = self._folder.take_over(writer_id)
            except OSError as e:
                if writer_id not in self._unusable:
                    self._unusable.add(writer_id)
                    logger.error(  # noqa: TRY400 - no bug
                        "nobody can tell whether journal %s is of a dead process: %s", writer_id, e
                    )
                continue
            self._unusable.discard(writer_id)
            if lock is not None:
                tail = JournalTail(self._folder, writer_id, is_finished=True, is_told=self._is_told)
                self._cases[writer_id] = _Case(writer_id, lock, tail, None, {}, set())

    async def _advance(self, case: _Case) -> bool:
        """Whether it is finished. Raises `StorageDown`."""
        if not case.is_posted:
            case.is_posted = await self._post_all(case)
            if case.is_posted:
                case.lock.note_posted()
        if not case.is_posted or case.tail.has_untold:
            return False
        if not case.tail.damaged:
            self._on_finished(case.writer_id)
        case.tail.remove_all()
        return True

    async def _post_all(self, case: _Case) -> bool:
        """Whether all of its requests are in the ledger. Raises `StorageDown`."""
        if case.since_s is None:
            await self._post_closed(case)
            case.since_s = self._clock.monotonic()
        is_complete = await self._collect(case)
        is_over = is_complete or self._clock.monotonic() - case.since_s >= self._grace_s
        await self._settle(case, everything=is_over)
        if is_over:
            await self._finals.collect(case.writer_id, sorted(case.settled))
        return is_over

    async def _post_closed(self, case: _Case) -> None:
        num_posted, is_last = 0, False
        while not is_last:
            batch = case.tail.read()
            num_posted += await post(self._storage, batch.rows)
            self._on_posted(batch.rows)
            case.tail.commit(batch)
            is_last = batch.is_last
        # Some may have been closed in a file that is gone, or settled by a recovery that was cut short.
        request_ids = list(case.tail.open)
        for begin in range(0, len(request_ids), MAX_ROWS):
            async with self._storage.reading() as work:
                rows = await work.ledger.rows(request_ids[begin : begin + MAX_ROWS])
            self._on_posted(rows)
            case.tail.close([row.request_id for row in rows])
        logger.info(
            "journal %s is of a dead process: %d requests posted, %d were open",
            case.writer_id,
            num_posted,
            len(case.tail.open),
        )

    async def _collect(self, case: _Case) -> bool:
        """Take in what the engines say; whether they have said everything."""
        while True:
            page = await self._finals.collect(case.writer_id, sorted(case.settled))
            case.settled.clear()
            parts = {part for request in case.tail.open.values() for part in part_ids(request.opening)}
            before = len(case.found)
            for final in page.finals:
                if final.request_id in parts:
                    case.found[final.request_id] = final
                else:
                    case.settled.add(final.request_id)  # the dead process has settled it itself
            if page.is_complete or (len(case.found) == before and not case.settled):
                return page.is_complete

    async def _settle(self, case: _Case, *, everything: bool) -> None:
        """Post the rows of requests whose counts are known; of the rest as well, if no more will come."""
        ready = [
            request
            for request in case.tail.open.values()
            if everything or all(part in case.found for part in part_ids(request.opening))
        ]
        for begin in range(0, len(ready), MAX_ROWS):
            some = ready[begin : begin + MAX_ROWS]
            rows = [self._lost(case, request) for request in some]
            await post(self._storage, rows)
            self._on_posted(rows)
            case.settled.update(self._parts_found(case, some))
            case.tail.close([request.opening.request_id for request in some])

    def _lost(self, case: _Case, request: OpenRequest) -> LedgerRow:
        opening = request.opening
        finals = [case.found[part] for part in part_ids(opening) if part in case.found]
        return lost_row(
            opening,
            finals,
            completion_tokens=request.completion_tokens,
            closed_at_ms=max(int(self._clock.time() * 1000), opening.opened_at_ms),
        )

    @staticmethod
    def _parts_found(case: _Case, requests: Iterable[OpenRequest]) -> set[str]:
        return {part for request in requests for part in part_ids(request.opening) if case.found.pop(part, None)}

    async def _forget_own(self) -> None:
        """Counts that engines keep since a connection was lost: this process has settled on what it knew."""
        acknowledge: list[str] = []
        while True:
            page = await self._finals.collect(self._writer_id, acknowledge)
            acknowledge = [
                final.request_id for final in page.finals if not any(map(self._is_open, _may_be_of(final.request_id)))
            ]
            if not acknowledge:
                return


def part_ids(opening: Opening) -> list[str]:
    """The ids that a request has in the engines."""
    if opening.num_parts == 1:
        return [opening.request_id]
    return [f"{opening.request_id}-{part}" for part in range(opening.num_parts)]


def _may_be_of(part_id: str) -> tuple[str, str]:
    """The requests that a part with this id may belong to."""
    return part_id, part_id.rpartition("-")[0]
