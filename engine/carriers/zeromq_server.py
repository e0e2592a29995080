"""The engine's side over ZeroMQ: one ROUTER socket, told to report what it cannot deliver.

Each connection is its own peer: ZeroMQ draws the identities, so no client can take another's place. A queue of
`max_backlog` frames stands between the engine and each client, besides what the system's socket buffers and the
client's own queue hold.
"""

from __future__ import annotations

import contextlib
import errno
import socket

import zmq
from zmq.auth.thread import ThreadAuthenticator

from engine.carriers.curve import CurveKeys
from engine.carriers.endpoint import check_endpoint, prepare_socket_folder, socket_path
from engine.carriers.port import Delivery
from engine.errors import ConfigError

MAX_FRAME_BYTES = 64 << 20
"""A longer frame ends its connection. A prompt of a million tokens takes 5 MB."""

_ZAP_DOMAIN = "evenhand"


class _KnownKeys:
    """The authenticator's question: may this client speak to us?"""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self._keys


class ZeroMQServer:
    """`ServerCarrier` at a Unix socket or, with CURVE keys, a TCP address. Raises `ConfigError` for any other."""

    def __init__(self, endpoint: str, *, curve: CurveKeys | None = None, max_backlog: int = 1000) -> None:
        check_endpoint(endpoint, curve)
        self._endpoint = endpoint
        self._curve = curve
        self._max_backlog = max_backlog
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._wakes: socket.socket | None = None
        self._waker: socket.socket | None = None

    def open(self) -> None:
        self._context = zmq.Context()
        try:
            self._socket = self._bind(self._context)
        except BaseException:
            self.close(0.0)
            raise
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakes, zmq.POLLIN)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, self._max_backlog)
        router.setsockopt(zmq.RCVHWM, self._max_backlog)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if self._curve is not None:
            self._require_keys(context, router, self._curve)
        if self._endpoint.startswith("ipc://"):
            prepare_socket_folder(socket_path(self._endpoint))
        try:
            router.bind(self._endpoint)
        except zmq.ZMQError as e:
            raise ConfigError(f"the engine cannot listen at '{self._endpoint}': {e.strerror}") from e
        if self._endpoint.startswith("ipc://"):
            socket_path(self._endpoint).chmod(0o600)
        return router

    def _require_keys(
        self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], curve: CurveKeys
    ) -> None:
        # The authenticator must answer before the socket is bound: without one, libzmq lets every key in.
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, _KnownKeys(curve.peer_keys))
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_PUBLICKEY, curve.public_key)
        router.setsockopt(zmq.CURVE_SECRETKEY, curve.secret_key)
        router.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)

    def receive(self, timeout_s: float | None, limit: int) -> list[tuple[bytes, bytes]]:
        if timeout_s != 0:
            ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
            if self._socket not in ready:
                self._forget_wakes()
                return []
        received: list[tuple[bytes, bytes]] = []
        while len(received) < limit:
            try:
                peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            received.append((peer, b"".join(parts)))
        return received

    def _forget_wakes(self) -> None:
        assert self._wakes is not None, "receive before open"
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)

    def send(self, peer: bytes, frame: bytes) -> Delivery:
        try:
            self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as e:
            if e.errno == errno.EHOSTUNREACH:
                return Delivery.GONE
            raise
        return Delivery.SENT

    def wake(self) -> None:
        waker = self._waker
        if waker is not None:
            # Full: earlier wakes are still unread. Closed: nobody waits any more.
            with contextlib.suppress(OSError):
                waker.send(b"\0")

    def close(self, linger_s: float) -> None:
        if self._context is None:
            return
        if self._endpoint.startswith("ipc://") and self._waker is not None:
            # Before the socket itself: afterwards it could already be the file of our successor.
            socket_path(self._endpoint).unlink(missing_ok=True)
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.destroy(linger=int(linger_s * 1000))
        self._context = None
        for end in (self._wakes, self._waker):
            if end is not None:
                end.close()
        self._wakes = self._waker = None
