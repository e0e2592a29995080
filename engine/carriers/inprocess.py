"""Both sides in one process, for tests: the engine's loop runs in a thread, the client in an event loop.

Frames are the same bytes as on a real wire, so nothing is shared by accident.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from queue import Empty, SimpleQueue

from engine.carriers.port import Delivery
from engine.errors import EngineUnavailable


class InProcessServer:
    """`ServerCarrier` that holds at most `max_backlog` unread frames for each channel."""

    def __init__(self, *, max_backlog: int = 1000) -> None:
        self._max_backlog = max_backlog
        self._inbox: SimpleQueue[tuple[bytes, bytes] | None] = SimpleQueue()
        self._channels: dict[bytes, InProcessChannel] = {}
        self._numbers = itertools.count(1)
        self._listening = False

    def open(self) -> None:
        self._listening = True

    def connect(self) -> InProcessChannel:
        """A new channel for the running event loop. Raises `EngineUnavailable` while nobody listens."""
        if not self._listening:
            raise EngineUnavailable("the engine in this process is not running")
        peer = next(self._numbers).to_bytes(8, "big")
        channel = InProcessChannel(self, peer, self._max_backlog)
        self._channels[peer] = channel
        return channel

    def put(self, peer: bytes, frame: bytes) -> None:
        """A channel's frame to the engine."""
        self._inbox.put((peer, frame))

    def forget(self, peer: bytes) -> None:
        """A channel was closed."""
        self._channels.pop(peer, None)

    def receive(self, timeout_s: float | None, limit: int) -> list[tuple[bytes, bytes]]:
        received: list[tuple[bytes, bytes]] = []
        try:
            item = self._inbox.get(timeout_s != 0, timeout_s)
            while item is not None:
                received.append(item)
                if len(received) == limit:
                    break
                item = self._inbox.get_nowait()
        except Empty:
            pass
        return received

    def send(self, peer: bytes, frame: bytes) -> Delivery:
        channel = self._channels.get(peer)
        return Delivery.GONE if channel is None else channel.offer(frame)

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self, linger_s: float) -> None:  # noqa: ARG002 (frames are handed over at once)
        self._listening = False
        for channel in list(self._channels.values()):
            channel.lose("the engine in this process has stopped")


class InProcessClient:
    """`ClientCarrier` to an `InProcessServer`."""

    def __init__(self, server: InProcessServer) -> None:
        self._server = server

    async def connect(self, timeout_s: float) -> InProcessChannel:  # noqa: ARG002 (it is there or it is not)
        return self._server.connect()

    def close(self) -> None:
        """Channels share nothing that would have to be released."""


class InProcessChannel:
    """`Channel` whose `offer` and `lose` are called from the engine's thread."""

    def __init__(self, server: InProcessServer, peer: bytes, max_backlog: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._peer = peer
        self._max_backlog = max_backlog
        self._frames: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._lost: str | None = None

    def offer(self, frame: bytes) -> Delivery:
        """The engine's frame to this channel."""
        if self._lost is not None or self._loop.is_closed():
            return Delivery.GONE
        if len(self._frames) >= self._max_backlog:
            return Delivery.FULL
        self._frames.append(frame)
        self._loop.call_soon_threadsafe(self._news.set)
        return Delivery.SENT

    def lose(self, reason: str) -> None:
        """The engine's end is gone."""
        self._lost = reason
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    def send(self, frame: bytes) -> None:
        if self._lost is not None:
            raise EngineUnavailable(self._lost)
        self._server.put(self._peer, frame)

    async def receive(self) -> list[bytes]:
        while True:
            self._news.clear()
            lost = self._lost
            frames = [self._frames.popleft() for _ in range(len(self._frames))]
            if frames:
                return frames
            if lost is not None:
                raise EngineUnavailable(lost)
            await self._news.wait()

    def close(self, reason: str = "closed") -> None:
        self._lost = self._lost or reason
        self._server.forget(self._peer)
        self._news.set()
