"""``evenhand gateway``: one gateway worker process, from settings."""

from __future__ import annotations

import asyncio
import signal

import uvloop

from engine.lifecycle import watch_pipe
from gateway.app import create_app
from gateway.http_server import Shutdown, serve_http
from gateway.ports import check_port
from gateway.settings import Settings


def run(settings: Settings, supervisor_fd: int | None) -> int:
    """Serve until told to stop; the exit code."""
    address = check_port(settings.server.host, settings.server.port, "server.port")
    uvloop.run(_serve(settings, address, supervisor_fd))
    return 0


async def _serve(settings: Settings, address: str, supervisor_fd: int | None) -> None:
    loop = asyncio.get_running_loop()
    shutdown = Shutdown()

    def on_orphaned() -> None:
        loop.call_soon_threadsafe(shutdown.cut)

    loop.add_signal_handler(signal.SIGTERM, shutdown.request)
    if supervisor_fd is None:
        loop.add_signal_handler(signal.SIGINT, shutdown.request)
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watch_pipe(supervisor_fd, on_orphaned)
    app = create_app(settings, is_draining=lambda: shutdown.is_draining)
    async with app.lifespan():
        await serve_http(app, settings.server, address, shutdown)
