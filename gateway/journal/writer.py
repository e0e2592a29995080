"""Writes one process' journal.

An append is one write system call, so a record survives the end of the process in the instant after; `sync`, called
about ten times a second, makes what was written survive a loss of power. Files that somebody removes, moves or cuts
while they are written are noticed by `mend`, called as often, and what they said is written anew.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from pathlib import Path

from gateway.journal.folder import JournalFolder
from gateway.journal.records import MAGIC, Record, RecordEncoder

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 8 << 20


class JournalFull(Exception):
    """The record could not be written and is not in the journal."""


class JournalWriter:
    """The journal of this process.

    One thread calls everything but `sync`, which others may call at the same time.

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
        self._is_lost = False
        self._closing = threading.Lock()  # of descriptors, while they are synced
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
        self._check_usable()
        if self._size >= self._segment_bytes:
            self.seal()
        data = self._encoder.encode(record)
        if self._write(data):
            return
        # It stands behind what will be taken for damage, or the beginning of this one will.
        self.seal()
        logger.error("somebody else has changed the journal; it goes on in file %d", self._number)
        self._write(data)

    def seal(self) -> None:
        """Go on in a new file. Raises `JournalFull` if there can be none; the old one goes on then."""
        self._check_usable()
        try:
            descriptor = self._open(self._number + 1)
        except OSError as e:
            raise JournalFull(f"error {e.errno}") from e
        self._sealed.append(self._descriptor)
        self._descriptor = descriptor
        self._number += 1
        self._size = len(MAGIC)
        self._is_dirty = True

    def mend(self) -> bool:
        """Look whether lock and file are still there and as they were left, and make them anew if not.

        What can be read of a file that is gone is written again, so a reader may come upon a record twice.

        Returns:
            whether what was written before may be lost in part: requests that are open should be opened again.

        Raises:
            JournalFull: it cannot be put right now, and takes no records before it is.
        """
        if self._descriptor < 0 or not self._closing.acquire(blocking=False):
            return False  # while it is synced it can wait
        try:
            has_changed = self._put_right()
        except OSError as e:
            self._is_lost = True
            raise JournalFull(f"its file is gone, and a new one cannot be made: error {e.errno}") from e
        finally:
            self._closing.release()
        self._is_lost = False
        if not has_changed and os.fstat(self._descriptor).st_size != self._size:
            self.seal()
            logger.error("somebody else has changed the journal; it goes on in file %d", self._number)
            has_changed = True
        return has_changed

    def sync(self) -> None:
        """Make all that was appended before the call survive a loss of power; nothing if it is closed.

        Raises `OSError`.
        """
        with self._closing:
            if self._descriptor < 0:
                return
            self._is_dirty = False
            # In this order: what is sealed in between is left for the next time.
            num_sealed, current = len(self._sealed), self._descriptor
            try:
                for _ in range(num_sealed):
                    os.fsync(self._sealed[0])
                    os.close(self._sealed.popleft())
                os.fsync(current)
            except OSError:
                self._is_dirty = True
                raise

    def close(self, *, remove: bool) -> None:
        """Let go of the lock, once a `sync` that is under way has ended. What is appended later is refused.

        Args:
            remove: everything in the journal is in the ledger, and the files go.
        """
        with self._closing:
            for descriptor in (*self._sealed, self._descriptor):
                os.close(descriptor)
            self._sealed.clear()
            self._descriptor = -1
            if remove:
                for segment in self.folder.segments(self.writer_id):
                    segment.path.unlink(missing_ok=True)
            self._lock.release(remove=remove)

    def _check_usable(self) -> None:
        if self._descriptor < 0:
            raise JournalFull("it is closed")
        if self._is_lost:
            raise JournalFull("its file is gone")

    def _write(self, data: bytearray) -> bool:
        """Whether it was put where the last record ends. Raises `JournalFull`."""
        try:
            num_written = os.write(self._descriptor, data)
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        except OSError as e:
            raise JournalFull(f"error {e.errno}") from e
        if num_written != len(data):
            self._take_back()
            raise JournalFull("only a part of the record fitted")
        self._size += num_written
        self._is_dirty = True
        return end == self._size

    def _put_right(self) -> bool:
        """Make lock and files anew if they are gone; whether files were. Raises `OSError`."""
        if not self._lock.is_in_place:
            self.folder.create()
            old, self._lock = self._lock, self.folder.begin(self.writer_id)
            old.release(remove=False)
            logger.error("the lock of the journal was removed; there is a new one")
        if _is_at(self._descriptor, self.folder.segment_path(self.writer_id, self._number)):
            return False
        lost = [*self._sealed, self._descriptor]
        copies: list[int] = []
        try:
            for descriptor in lost:
                copies.append(self._open(self._number + len(copies) + 1, _content(descriptor)))
        except BaseException:
            for i, descriptor in enumerate(copies, self._number + 1):
                os.close(descriptor)
                self.folder.segment_path(self.writer_id, i).unlink(missing_ok=True)
            raise
        *sealed, self._descriptor = copies
        self._sealed = deque(sealed)
        self._number += len(copies)
        self._size = os.fstat(self._descriptor).st_size
        self._is_dirty = True
        for descriptor in lost:
            os.close(descriptor)
        logger.error("files of the journal were removed; what they said is written anew, up to file %d", self._number)
        return True

    def _open(self, number: int, content: bytes = MAGIC) -> int:
        path = self.folder.segment_path(self.writer_id, number)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, content)
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


def _is_at(descriptor: int, path: Path) -> bool:
    """The path names the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _content(descriptor: int) -> bytes:
    """Of one of our files, even if somebody has cut it to nothing."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return data if data.startswith(MAGIC) else MAGIC
