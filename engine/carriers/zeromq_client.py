"""The gateway's side over ZeroMQ: a fresh DEALER socket for each connection, watched by the event loop.

ZeroMQ's own reconnecting is not used: it would hand frames meant for a dead engine to its successor. So a socket lives
as long as one connection, and its monitor tells within milliseconds that the other process is gone. The socket's file
descriptor is given to the running loop directly; that works under asyncio and uvloop and costs less than zmq.asyncio.
"""

from __future__ import annotations

import asyncio
import functools
import operator

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.carriers.curve import CurveKeys
from engine.carriers.endpoint import check_endpoint
from engine.errors import ConfigError, EngineUnavailable

# Not -1 ("never"): libzmq would then throw away what the engine had sent before it died.
_NEVER_RECONNECT_MS = 1 << 30

_FRAMES_AT_ONCE = 100

_LOSSES = {
    zmq.Event.DISCONNECTED: "the engine process closed the connection",
    zmq.Event.CLOSED: "nothing listens there",
    zmq.Event.CONNECT_RETRIED: "nothing listens there",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the engine does not accept our CURVE key",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: one side wants CURVE keys and the other does not",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed: that is not the engine whose CURVE key we were given",
}
_WATCHED = functools.reduce(operator.or_, _LOSSES, zmq.Event.HANDSHAKE_SUCCEEDED)


class ZeroMQClient:
    """`ClientCarrier` to an engine at a Unix socket or, with CURVE keys, a TCP address; else raises `ConfigError`.

    Attributes:
        max_backlog: frames queued to an engine that does not read before the channel is given up.
    """

    def __init__(self, endpoint: str, *, curve: CurveKeys | None = None, max_backlog: int = 10_000) -> None:
        check_endpoint(endpoint, curve)
        if curve is not None and len(curve.peer_keys) != 1:
            raise ConfigError("a client's curve peer_keys must be the one public key of its engine")
        self._endpoint = endpoint
        self._curve = curve
        self._max_backlog = max_backlog
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    async def connect(self, timeout_s: float) -> ZeroMQChannel:
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, self._max_backlog)
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_RECONNECT_MS)
        if self._curve is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._curve.public_key)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve.secret_key)
            socket.setsockopt(zmq.CURVE_SERVERKEY, next(iter(self._curve.peer_keys)))
        channel = ZeroMQChannel(socket, self._endpoint)
        try:
            async with asyncio.timeout(timeout_s):
                await channel.established()
        except TimeoutError as e:
            channel.close()
            raise EngineUnavailable(f"no engine answers at {self._endpoint} within {timeout_s:g} s") from e
        except BaseException:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        if self._context is not None:
            self._context.term()
            self._context = None


class ZeroMQChannel:
    """`Channel` over one DEALER socket that is connected once."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._endpoint = endpoint
        self._news = asyncio.Event()
        self._established = False
        self._lost: str | None = None
        self._closed = False
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_WATCHED)
        self._fds = (socket.fileno(), self._monitor.fileno())
        self._loop.add_reader(self._fds[0], self._news.set)
        self._loop.add_reader(self._fds[1], self._on_monitor)
        socket.connect(endpoint)
        self._on_monitor()

    async def established(self) -> None:
        """Wait for the handshake. Raises `EngineUnavailable` if it fails."""
        while not self._established:
            self._raise_if_lost()
            self._news.clear()
            await self._news.wait()

    def send(self, frame: bytes) -> None:
        self._raise_if_lost()
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._lose("the engine does not read its messages")
            self._raise_if_lost()
        # A ZeroMQ descriptor tells of changes, not of states, and sending may have swallowed one.
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._news.set()

    async def receive(self) -> list[bytes]:
        while True:
            self._news.clear()
            # The order matters: what came before the loss is in the socket when the loss is known.
            lost = self._lost is not None
            frames = self._drain()
            if frames:
                return frames
            if lost:
                self._raise_if_lost()
            await self._news.wait()

    def _drain(self) -> list[bytes]:
        frames: list[bytes] = []
        while not self._closed and len(frames) < _FRAMES_AT_ONCE:
            try:
                frames.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        return frames

    def _on_monitor(self) -> None:
        while not self._closed:
            try:
                message = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if message["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._established = True
                self._news.set()
            else:
                self._lose(_LOSSES[zmq.Event(message["event"])])

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
        self._news.set()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise EngineUnavailable(f"the engine at {self._endpoint} is not reachable: {self._lost}")

    def close(self, reason: str = "closed") -> None:
        if self._closed:
            return
        self._closed = True
        self._lose(reason)
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
