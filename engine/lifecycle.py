"""How a child process notices that its supervisor is gone."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable


def watch_pipe(fd: int, on_close: Callable[[], None]) -> threading.Thread:
    """Call on_close, in a thread of its own, once the other end of an inherited pipe or socket is closed.

    The system closes it when the supervisor dies, however it dies. Takes over the descriptor; what is written into the
    pipe is ignored. The thread is a daemon: it never holds up the end of the process.
    """

    def watch() -> None:
        # A socket tells by an error that the other end died with something of ours unread.
        with contextlib.suppress(OSError):
            while os.read(fd, 4096):
                pass
        os.close(fd)
        on_close()

    thread = threading.Thread(target=watch, name="supervisor-watch", daemon=True)
    thread.start()
    return thread
