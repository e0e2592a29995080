"""Writes one process' journal.

An append is one write system call, so a record survives the end of the process in the instant after; `sync`, called
about ten times a second, makes what was written survive a loss of power.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque

from gateway.journal.folder import JournalFolder
from gateway.journal.records import MAGIC, Record, RecordEncoder

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 8 << 20


class JournalFull(Exception):
    """The record could not be written and is not in the journal."""


class JournalWriter:
    """The journal of this process.

    One thread appends; one other may call `sync` at the same time.

    Args:
        segment_bytes: a file of this size is followed by a new one.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: JournalFolder, writer_id: str, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.writer_id = writer_id
        self._segment_bytes = segment_bytes
        self._encoder = RecordEncoder()
        self._sealed: deque[int] = deque()  # descriptors that wait for their last sync
        self._is_dirty = False
        folder.create()
        self._lock = folder.begin(writer_id)
        self._number = 1
        self._size = len(MAGIC)
        self._descriptor = self._open(self._number)

    @property
    def number(self) -> int:
        """Of the segment that is being written; those below are sealed."""
        return self._number

    @property
    def is_dirty(self) -> bool:
        """Something was written that `sync` has not seen."""
        return self._is_dirty

    def append(self, record: Record) -> None:
        """Raises `JournalFull` if it cannot be written; nothing of it is left then."""
        if self._size >= self._segment_bytes:
            self.seal()
        data = self._encoder.encode(record)
        try:
            num_written = os.write(self._descriptor, data)
        except OSError as e:
            raise JournalFull(f"error {e.errno}") from e
        if num_written != len(data):
            self._take_back()
            raise JournalFull("only a part of the record fitted")
        self._size += num_written
        self._is_dirty = True

    def seal(self) -> None:
        """Go on in a new file. Raises `JournalFull` if there can be none; the old one goes on then."""
        try:
            descriptor = self._open(self._number + 1)
        except OSError as e:
            raise JournalFull(f"error {e.errno}") from e
        self._sealed.append(self._descriptor)
        self._descriptor = descriptor
        self._number += 1
        self._size = len(MAGIC)
        self._is_dirty = True

    def sync(self) -> None:
        """Make all that was appended before the call survive a loss of power. Raises `OSError`."""
        self._is_dirty = False
        current, num_sealed = self._descriptor, len(self._sealed)
        try:
            for _ in range(num_sealed):
                os.fsync(self._sealed[0])
                os.close(self._sealed.popleft())
            os.fsync(current)
        except OSError:
            self._is_dirty = True
            raise

    def close(self, *, remove: bool) -> None:
        """Let go of the lock. Nobody may append or sync any more.

        Args:
            remove: everything in the journal is in the ledger, and the files go.
        """
        for descriptor in (*self._sealed, self._descriptor):
            os.close(descriptor)
        self._sealed.clear()
        if remove:
            for segment in self.folder.segments(self.writer_id):
                segment.path.unlink(missing_ok=True)
        self._lock.release(remove=remove)

    def _open(self, number: int) -> int:
        path = self.folder.segment_path(self.writer_id, number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, MAGIC)
            self._sync_folder()
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return descriptor

    def _sync_folder(self) -> None:
        """The name of a file, too, must survive a loss of power."""
        descriptor = os.open(self.folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _take_back(self) -> None:
        """Remove a part of a record: whatever came behind it would be unreadable."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            logger.exception("a part of a record could not be removed from the journal")
            self._size = self._segment_bytes  # nothing more goes into this file


def _write_all(descriptor: int, data: bytes) -> None:
    if os.write(descriptor, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
