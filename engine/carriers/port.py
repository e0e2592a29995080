"""The ports between the protocol and whatever carries its frames: one for each side.

A frame is one encoded message, bytes; a carrier never looks into it. A peer is one connection of a client, named by the
carrier; a client that connects again is another peer.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class Delivery(Enum):
    """What became of a frame given to `ServerCarrier.send`."""

    SENT = "sent"
    """Queued for the peer."""

    FULL = "full"
    """Not taken: the peer does not read, and its queue is at its bound."""

    GONE = "gone"
    """Not taken: there is no such peer any more."""


class ServerCarrier(Protocol):
    """The engine's side. All methods but `wake` belong to one thread, the one that called `open`."""

    def open(self) -> None:
        """Begin to listen. Raises `ConfigError` if that cannot work here."""
        ...

    def receive(self, timeout_s: float | None, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to `limit` pairs of peer and frame that have come, in order.

        Waits up to timeout_s for the first (None: without end; 0: not at all), or until `wake`.
        """
        ...

    def send(self, peer: bytes, frame: bytes) -> Delivery:
        """Queue a frame for a peer; never blocks, and never drops a frame that it took while the peer is there."""
        ...

    def wake(self) -> None:
        """Make a waiting `receive` return. May be called from any thread and from a signal handler."""
        ...

    def close(self, linger_s: float) -> None:
        """Stop listening; waits up to linger_s for frames still queued."""
        ...


class Channel(Protocol):
    """One established connection to an engine, used from one event loop. When it is lost it stays lost."""

    def send(self, frame: bytes) -> None:
        """Queue a frame; never blocks.

        Raises `EngineUnavailable` when the channel is lost, or when the engine does not read.
        """
        ...

    async def receive(self) -> list[bytes]:
        """Frames that have come since the last call, at least one; does not wait while there are any.

        Raises `EngineUnavailable` when the channel is lost, after everything that came before was returned.
        """
        ...

    def close(self, reason: str = "closed") -> None:
        """Give the connection up; a waiting `receive` raises with the reason. Idempotent."""
        ...


class ClientCarrier(Protocol):
    """The gateway's side: makes one channel after another to the same engine."""

    async def connect(self, timeout_s: float) -> Channel:
        """Raises `EngineUnavailable` when the engine cannot be reached, refuses our keys, or is not there in time."""
        ...

    def close(self) -> None:
        """Release what channels share; all of them must be closed."""
        ...
