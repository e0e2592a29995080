"""Granian, embedded: an ASGI application on a port, with a drain that is ours.

Granian's own ways to run either own the signals and fork workers of their own, or (embedded) leave both to us. A drain
needs them to be ours: on the first signal readiness goes false while the port stays open and requests are taken, for as
long as a load balancer takes to notice; then running requests end, and only then granian stops; whoever still runs
after the grace is cut. Knows nothing of what the application does.

HTTP/1.1 only: where granian may also speak HTTP/2 it waits without end for a connection's first bytes, and a few
thousand silent ones would take all its places.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server

from gateway.settings import ServerSettings
from gateway.settings_sources import SettingsError
from gateway.shutdown import Shutdown

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""ASGI: scope, receive, send. Every framework types them in its own way."""

BACKLOG = 1024
MAX_CONNECTIONS = 8192
"""Of one worker at a time, idle ones included; more wait in the backlog."""
HEADER_BUFFER_BYTES = 400 << 10
"""Granian answers headers that are longer than its buffer itself, without a body; up to there the answer is ours."""
STOP_S = 3.0
"""Granian waits for clients that do not read their answer; this long after the grace we do not."""

_KEYS = "it must be an RSA key of 2048 to 4096 bits, or one of P-256, P-384 or Ed25519"
_PANIC = re.compile(r"an `Err` value: (.*)")

# Granian's loggers go through whatever the root logger is set up with; its own default is stdout.
_LOGGING: dict[str, Any] = {
    "formatters": {},
    "handlers": {},
    "loggers": {"_granian": {"propagate": True}, "granian.access": {"propagate": False}},
}


class RunningRequests:
    """An ASGI wrapper that knows which requests run, so that a drain can wait for them and then cut them."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_cut = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        task = cast("asyncio.Task[Any]", asyncio.current_task())  # granian makes one for each request
        self._tasks.add(task)
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            # Ours: the connection closes without the end of its answer, which a client sees as an error.
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    def cut(self) -> None:
        self._is_cut = True
        for task in self._tasks:
            task.cancel()


def check_tls(settings: ServerSettings) -> None:
    """Raise `SettingsError` unless certificate and key, if there are any, can be used together, and by granian.

    Takes about 0.2 s: granian's own TLS takes less than OpenSSL and aborts at the rest, which another process tries.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return
    try:
        # A password that is never right: OpenSSL would ask the terminal for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except OSError as e:
        why = _why_not(e) if isinstance(e, ssl.SSLError) else e.strerror
        raise SettingsError(
            f"server.tls_cert {settings.tls_cert} and server.tls_key {settings.tls_key} cannot be used: {why}"
        ) from e
    # -P: the folder that one happens to be in must not shadow our packages.
    command = [sys.executable, "-P", "-m", "gateway.tls_trial", str(settings.tls_cert), str(settings.tls_key)]
    trial = subprocess.run(  # noqa: S603 - the command is ours
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    if trial.returncode == 0:
        return
    words = trial.stderr.decode(errors="replace")
    if "private key" in words:
        raise SettingsError(f"server.tls_key {settings.tls_key} cannot be used: {_KEYS}")
    if "UnsupportedCertVersion" in words:
        raise SettingsError(f"server.tls_cert {settings.tls_cert} cannot be used: it is not an X.509 version 3 one")
    panic = _PANIC.search(words)
    raise SettingsError(
        f"server.tls_cert {settings.tls_cert} and server.tls_key {settings.tls_key} cannot be used: "
        f"{panic[1] if panic else f'the trial ended with {trial.returncode}'}"
    )


def _why_not(error: ssl.SSLError) -> str:
    match error.reason:
        # OpenSSL keeps a certificate for each kind of key: where none is of the key's kind, none is assigned.
        case "KEY_VALUES_MISMATCH" | "KEY_TYPE_MISMATCH" | "NO_CERTIFICATE_ASSIGNED":
            return "the key is not the certificate's"
        case "EE_KEY_TOO_SMALL":
            return f"the key is too short: {_KEYS}"
        case "CA_KEY_TOO_SMALL":
            return "a certificate of the chain has a key that is too short"
        case "CA_MD_TOO_WEAK":
            return "a certificate of the chain is signed with a hash that is too weak"
        case None:
            return "one is not PEM, or the key has a password"
        case reason:
            return f"OpenSSL says {reason}"


async def serve_http(app: Application, settings: ServerSettings, address: str, shutdown: Shutdown) -> None:
    """Serve until `shutdown` is asked for and done. The caller runs the application's lifespan around this.

    Args:
        address: numeric, since granian knows no names.

    Raises:
        RuntimeError: from granian, which could not listen.
    """
    requests = RunningRequests(app)
    server = Server(
        requests,
        address=address,
        port=settings.port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(
            header_read_timeout=round(settings.header_timeout_s * 1000),
            max_buffer_size=max(HEADER_BUFFER_BYTES, 2 * settings.max_header_bytes),
        ),
        websockets=False,
        backlog=BACKLOG,
        backpressure=MAX_CONNECTIONS,
        log_dictconfig=_LOGGING,
        log_level=LogLevels.error,
        ssl_cert=settings.tls_cert,
        ssl_key=settings.tls_key,
        ssl_protocol_min=SSLProtocols.tls12,
    )
    serving = asyncio.create_task(server.serve())
    drain = asyncio.create_task(shutdown.wait_for_drain())
    cut = asyncio.create_task(shutdown.wait_for_cut())
    try:
        await asyncio.wait((serving, drain), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await asyncio.wait((serving, cut), timeout=settings.drain_notice_s, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            shutdown.close()
            idle = asyncio.create_task(requests.wait_until_idle())
            await asyncio.wait((idle, cut), timeout=settings.drain_s, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            requests.cut()
            server.stop()  # type: ignore[no-untyped-call]
            await asyncio.wait((serving,), timeout=STOP_S)
        if serving.done():
            serving.result()  # raises what granian raised
    finally:
        for task in (serving, drain, cut):
            task.cancel()
