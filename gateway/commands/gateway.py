"""``evenhand gateway``: one gateway worker process, from settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

import uvloop

from engine.garbage import collect_less_often
from engine.lifecycle import watch_pipe
from gateway.app import create_app
from gateway.gateway_lock import gateway_lock
from gateway.http_server import Application, check_tls, serve_http
from gateway.ports import check_port, numeric_address
from gateway.settings import Settings
from gateway.shutdown import Shutdown
from gateway.supervisor import READY_LINE
from gateway.telemetry.shared_metrics import join_shared_metrics

READY_POLL_S = 0.05


def run(settings: Settings, supervisor_fd: int | None) -> int:
    """Serve until told to stop; the exit code.

    Raises:
        SettingsError, PortError, ModelLoadError, ConfigError: what is set up cannot work.
    """
    server = settings.server
    check_tls(server)
    if supervisor_fd is None:
        address = check_port(server.host, server.port, "server.port")
    else:
        address = numeric_address(server.host, server.port)  # the supervisor keeps the port, and our siblings listen
    teams_file = join_shared_metrics()
    if teams_file is None:
        check_port("127.0.0.1", server.metrics_port, "server.metrics_port")
    _allow_many_connections()
    with gateway_lock(settings):
        uvloop.run(_serve(settings, address, supervisor_fd, teams_file))
    return 0


def _allow_many_connections() -> None:
    """As many open files as the system lets us have: usual is a lower limit of 1024, and every connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(settings: Settings, address: str, supervisor_fd: int | None, teams_file: Path | None) -> None:
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
    app = create_app(settings, shutdown=shutdown, teams_file=teams_file)
    collect_less_often()
    async with app.lifespan():
        telling = None if supervisor_fd is None else asyncio.create_task(_tell_ready(app, supervisor_fd))
        try:
            await serve_http(app, settings.server, address, shutdown)
        finally:
            if telling is not None:
                telling.cancel()


async def _tell_ready(app: Application, supervisor_fd: int) -> None:
    """Tell the supervisor once this very process can serve; through the shared port any of its siblings may answer."""
    while True:
        await asyncio.sleep(READY_POLL_S)  # the server has its port after two rounds of the loop
        if await is_ready(app):
            break
    with contextlib.suppress(OSError):  # it is gone, which `on_orphaned` is for
        os.write(supervisor_fd, READY_LINE)


async def is_ready(app: Application) -> bool:
    """What ``/ready`` of an application says, asked without a connection."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/ready",
        "raw_path": b"/ready",
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "client": None,
        "server": None,
        "state": {},
        "extensions": {},
    }
    await app(scope, receive, send)
    return statuses == [200]
