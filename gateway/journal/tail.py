"""Reads a journal from its beginning, remembers what is open, and removes the files that are done.

The same for a journal that is still being written, by this process, and for one that a dead process has left. Nothing
is taken as read before `commit`: who reads posts the rows first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.domain.ids import RequestId
from gateway.domain.ledger import LedgerRow, Opening
from gateway.journal.folder import JournalFolder, Segment
from gateway.journal.records import (
    MAGIC,
    MAX_PAYLOAD_BYTES,
    Closed,
    DamagedJournal,
    Opened,
    Progress,
    Record,
    whole_records,
)

logger = logging.getLogger(__name__)

READ_BYTES = MAX_PAYLOAD_BYTES + 1024
"""At least one whole record fits in."""
MAX_ROWS = 500


@dataclass(slots=True)
class OpenRequest:
    """A request that was opened and, as far as the journal was read, not closed.

    Attributes:
        segment: the number of the file that says so, which must stay until it is closed.
        completion_tokens: what it had been told at the last `Progress`; `progress_segment` says so.
    """

    opening: Opening
    segment: int
    completion_tokens: int = 0
    progress_segment: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """What was read together.

    Attributes:
        rows: of the requests that were closed; at most `MAX_ROWS`.
        is_last: there was nothing behind it.
    """

    rows: list[LedgerRow] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    number: int = 0
    offset: int = 0
    is_last: bool = True


class JournalTail:
    """One writer's journal, for one reader at a time.

    Args:
        is_finished: nobody writes it any more, so that a record which is cut off will never be whole.
        keeps_files: it is only looked at: no file is removed.
        is_told: whether everybody who has to be told of a settled request has been; the file that says that it was
            stays until then, so that whoever reads it next can tell them.

    Attributes:
        open: requests that are open after what was committed.
        damaged: numbers of files whose rest cannot be read.
    """

    def __init__(
        self,
        folder: JournalFolder,
        writer_id: str,
        *,
        is_finished: bool,
        keeps_files: bool = False,
        is_told: Callable[[RequestId], bool] = lambda _: True,
    ) -> None:
        self.open: dict[RequestId, OpenRequest] = {}
        self.damaged: set[int] = set()
        self._folder = folder
        self._writer_id = writer_id
        self._is_finished = is_finished
        self._keeps_files = keeps_files
        self._is_told = is_told
        self._untold: dict[RequestId, int] = {}  # with the number of the file that says that it is settled
        self._number = 0
        self._offset = 0
        self._done: set[int] = set()  # files that are read to their end and still there

    @property
    def has_untold(self) -> bool:
        """Somebody has still to be told of a request that is settled."""
        if self._untold:
            self._untold = {each: number for each, number in self._untold.items() if not self._is_told(each)}
        return bool(self._untold)

    def read(self) -> Batch:
        """The next records; again the same ones if they were not committed. Raises `OSError`."""
        segments = self._folder.segments(self._writer_id)
        for i, segment in enumerate(segments):
            if segment.number < self._number:
                continue
            offset = self._offset if segment.number == self._number else 0
            is_sealed = self._is_finished or i + 1 < len(segments)
            batch = self._read(segment, offset, is_sealed=is_sealed, is_last=i + 1 == len(segments))
            if batch.records or batch.is_last:
                return batch
            self._pass(segment.number)
        return Batch(number=self._number, offset=self._offset)

    def commit(self, batch: Batch) -> None:
        """The rows of the batch are in the ledger; go on behind it. Raises `OSError`."""
        for record in batch.records:
            match record:
                case Opened(opening=opening):
                    self.open[opening.request_id] = OpenRequest(opening, batch.number)
                case Progress(completion_tokens=counts):
                    for request_id, num_tokens in counts.items():
                        if (request := self.open.get(request_id)) is not None:
                            request.completion_tokens, request.progress_segment = num_tokens, batch.number
                case Closed(row=row):
                    self.open.pop(row.request_id, None)
                    self._note_untold(row.request_id, batch.number)
        self._number, self._offset = batch.number, batch.offset
        self._remove_done()

    def close(self, request_ids: Collection[RequestId]) -> None:
        """These requests are in the ledger, though the journal does not say so. Raises `OSError`."""
        for request_id in request_ids:
            if (request := self.open.pop(request_id, None)) is not None:
                self._note_untold(request_id, request.segment)
        self._remove_done()

    def remove_all(self) -> None:
        """Everything is read and told, and nothing is open: the files go, but for damaged ones. Raises `OSError`."""
        assert not self.open, "a journal with open requests stays"
        assert not self.has_untold, "a journal that is still to be told of stays"
        for segment in self._folder.segments(self._writer_id):
            self._remove(segment)

    def _read(self, segment: Segment, offset: int, *, is_sealed: bool, is_last: bool) -> Batch:
        rows: list[LedgerRow] = []
        records: list[Record] = []
        begin, end, data = max(offset, len(MAGIC)), 0, b""
        try:
            data = _bytes_at(segment, begin)
            for record, after in whole_records(data):
                records.append(record)
                end = after
                if isinstance(record, Closed):
                    rows.append(record.row)
                    if len(rows) == MAX_ROWS:
                        break
        except DamagedJournal as e:
            if not records:
                self._give_up(segment, begin, str(e))
        # A whole read may have ended in the middle of a record that is whole in the file.
        is_more = len(rows) == MAX_ROWS or (bool(records) and (end < len(data) or len(data) >= READ_BYTES))
        if data and not records and is_sealed and segment.number not in self.damaged:
            logger.warning("journal %s ends with a record that is cut off, %d bytes", segment.path.name, len(data))
        return Batch(rows, records, segment.number, begin + end, is_last=is_last and not is_more)

    def _give_up(self, segment: Segment, offset: int, why: str) -> None:
        """The rest of the file cannot be read."""
        if segment.number not in self.damaged:
            self.damaged.add(segment.number)
            logger.error("journal %s is damaged from byte %d on: %s", segment.path.name, offset, why)

    def _pass(self, number: int) -> None:
        """The file is read to its end, and there is another one."""
        self._done.add(number)
        self._number, self._offset = number + 1, 0
        self._remove_done()

    def _note_untold(self, request_id: RequestId, number: int) -> None:
        if not self._is_told(request_id):
            self._untold[request_id] = number

    def _remove_done(self) -> None:
        if not self._done or self._keeps_files:
            return
        needed = {number for each in self.open.values() for number in (each.segment, each.progress_segment)}
        if self.has_untold:
            needed.update(self._untold.values())
        for number in sorted(self._done - needed):
            self._remove(Segment(number, self._folder.segment_path(self._writer_id, number)))
            self._done.discard(number)

    def _remove(self, segment: Segment) -> None:
        if segment.number in self.damaged:
            with suppress(FileNotFoundError):
                segment.path.rename(segment.path.with_name(f"{segment.path.name}.damaged"))
        else:
            segment.path.unlink(missing_ok=True)


def _bytes_at(segment: Segment, offset: int) -> bytes:
    """Up to `READ_BYTES` of the file; none if it is gone. Raises `DamagedJournal` if it does not begin as ours do."""
    try:
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        if not MAGIC.startswith(os.pread(descriptor, len(MAGIC), 0)):
            raise DamagedJournal("it begins as no journal of this version does")
        return os.pread(descriptor, READ_BYTES, offset)
    except OSError as e:
        e.filename = str(segment.path)  # reading knows only descriptors, and this is for people
        raise
    finally:
        os.close(descriptor)
