"""The folder of all journals: whose files are in it, and who of these writers is dead.

A writer holds a lock on its ``WRITER.lock`` for as long as its process lives, and the kernel lets go of it however that
process ends. Who takes care of its journal holds the lock then, and the file says that it is for a dead one until all
of it is in the ledger. A writer's segments are ``WRITER-NUMBER.journal``; what was found damaged is kept as
``….journal.damaged``.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

FOLDER_NAME = "journal"
_SEGMENT = re.compile(r"([0-9a-f]+)-([0-9]+)\.journal")
_LOCK = re.compile(r"([0-9a-f]+)\.lock")
_OF_A_DEAD_ONE = b"the journal of a dead process\n"


def new_writer_id() -> str:
    """A name that no other process has, had or will have."""
    return secrets.token_hex(8)


class Segment(NamedTuple):
    """One file of a writer's journal; they are read in the order of their numbers."""

    number: int
    path: Path


class WriterLock:
    """The lock of a writer, held until `release`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @property
    def is_in_place(self) -> bool:
        """Others see it where they look for it. Raises `OSError` if that cannot be found out."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def note_posted(self) -> None:
        """All that a dead writer has left is in the ledger."""
        os.ftruncate(self._descriptor, 0)

    def release(self, *, remove: bool) -> None:
        """Args: remove: the writer's journal is finished and gone, so its lock goes too."""
        if remove:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class JournalFolder:
    """Made, with mode 0700, if it is not there.

    Attributes:
        path: where it is.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / FOLDER_NAME

    def create(self) -> None:
        """Raises `OSError`."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def lock_path(self, writer_id: str) -> Path:
        return self.path / f"{writer_id}.lock"

    def segment_path(self, writer_id: str, number: int) -> Path:
        return self.path / f"{writer_id}-{number:06d}.journal"

    def segments(self, writer_id: str) -> list[Segment]:
        """The writer's files that are there, in order."""
        matches = (_SEGMENT.fullmatch(name) for name in self._names())
        return sorted(
            Segment(int(match[2]), self.path / match[0]) for match in matches if match and match[1] == writer_id
        )

    def writers(self) -> list[str]:
        """Everybody who has a file here, alive or dead."""
        matches = (_SEGMENT.fullmatch(name) or _LOCK.fullmatch(name) for name in self._names())
        return sorted({match[1] for match in matches if match})

    def damaged(self) -> list[Path]:
        """Files that were put aside, since a part of them could not be read."""
        return sorted(self.path / name for name in self._names() if name.endswith(".damaged"))

    def begin(self, writer_id: str) -> WriterLock:
        """Take the lock of a new writer. Raises `OSError`."""
        # Under another name first: nobody may see the lock before it is held, and take its writer for dead.
        path, hidden = self.lock_path(writer_id), self.path / f".{writer_id}.new"
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(path)
        except BaseException:
            os.close(descriptor)
            hidden.unlink(missing_ok=True)
            raise
        return WriterLock(path, descriptor)

    def take_over(self, writer_id: str) -> WriterLock | None:
        """The lock of a writer that is dead and that nobody else is taking care of; else None."""
        path = self.lock_path(writer_id)
        try:
            # Files without a lock are those of somebody dead whose lock was removed by hand.
            create = os.O_CREAT if self.segments(writer_id) else 0
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | create, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same = os.path.samestat(os.fstat(descriptor), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_same = False
        if not is_same:  # alive; or another process has finished it and removed the file that we had opened
            os.close(descriptor)
            return None
        os.pwrite(descriptor, _OF_A_DEAD_ONE, 0)
        return WriterLock(path, descriptor)

    def is_alive(self, writer_id: str) -> bool:
        """Somebody holds the writer's lock: itself, or who takes care of it."""
        try:
            descriptor = os.open(self.lock_path(writer_id), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)

    def has_unposted(self) -> bool:
        """A dead writer has left something that may not be in the ledger, whoever takes care of it."""
        return any(map(self._is_unposted, self.writers()))

    def _is_unposted(self, writer_id: str) -> bool:
        try:
            return not self.is_alive(writer_id) or self.lock_path(writer_id).stat().st_size > 0
        except FileNotFoundError:  # finished meanwhile
            return False
        except OSError:  # nobody can tell, which whoever looks for dead ones has said
            return False

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.path.iterdir()]
        except FileNotFoundError:
            return []
