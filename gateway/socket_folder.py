"""A private folder for the Unix socket between gateway and engine, gone when the server is."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

SOCKET_NAME = "engine.sock"
MAX_SOCKET_PATH_BYTES = 107
"""What `sockaddr_un` has room for, less the closing zero byte."""
_PREFIX = "serve-"
_LOCK = "lock"


@contextmanager
def socket_folder(home: Path) -> Iterator[Path]:
    """A new folder of mode 0700 under ``home/run``, or in the system's temporary folder if that path is too long.

    Folders of servers that were killed are removed first: a lock tells that nobody lives there.
    """
    run = home / "run"
    run.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as stack:
        with (run / ".lock").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            _remove_abandoned(run)
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=run))
            if len(os.fsencode(folder / SOCKET_NAME)) > MAX_SOCKET_PATH_BYTES:
                folder.rmdir()
                folder = Path(tempfile.mkdtemp(prefix="evenhand-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            fcntl.flock(stack.enter_context((folder / _LOCK).open("w")), fcntl.LOCK_EX)
        yield folder


def _remove_abandoned(run: Path) -> None:
    for folder in run.glob(f"{_PREFIX}*"):
        with suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if somebody lives there
            shutil.rmtree(folder, ignore_errors=True)
