"""Granian, embedded: an ASGI application on a port, with a drain that is ours.

Granian's own ways to run either own the signals and fork workers of their own, or (embedded) leave both to us. A drain
needs them to be ours: on the first signal readiness goes false while the port stays open, running requests end, and
only then granian stops; whoever still runs after the grace is cut. Knows nothing of what the application does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.log import LogLevels
from granian.server.embed import Server

from gateway.settings import ServerSettings

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""ASGI: scope, receive, send. Every framework types them in its own way."""

BACKLOG = 1024
MAX_CONCURRENT = 8192
"""Requests at once in one worker; beyond, new connections wait in the backlog."""
STOP_S = 3.0
"""Granian waits for clients that do not read their answer; this long after the grace we do not."""

# Granian's loggers go through whatever the root logger is set up with; its own default is stdout.
_LOGGING: dict[str, Any] = {
    "formatters": {},
    "handlers": {},
    "loggers": {"_granian": {"propagate": True}, "granian.access": {"propagate": False}},
}


class Shutdown:
    """How far a process is on its way out: running, draining, or cutting short what still runs."""

    def __init__(self) -> None:
        self._drain = asyncio.Event()
        self._cut = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self._drain.is_set()

    def request(self) -> None:
        """The first call asks for a drain, the second cuts it short."""
        if self._drain.is_set():
            self._cut.set()
        self._drain.set()

    def cut(self) -> None:
        self._drain.set()
        self._cut.set()

    async def wait_for_drain(self) -> None:
        await self._drain.wait()

    async def wait_for_cut(self) -> None:
        await self._cut.wait()


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
        http=HTTPModes.auto,
        websockets=False,
        backlog=BACKLOG,
        backpressure=MAX_CONCURRENT,
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
