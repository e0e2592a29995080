"""``evenhand serve``: an engine and a gateway on this machine, under one supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.models.fetch import resolve_model
from gateway import __version__
from gateway.bootstrap_key import FILE_NAME, load_or_create_key
from gateway.ports import check_port
from gateway.settings import ServerSettings, Settings, all_settings
from gateway.settings_sources import CONFIG_VARIABLE, LoadedSettings, SettingsError
from gateway.socket_folder import SOCKET_NAME, socket_folder
from gateway.supervisor import ChildSpec, Supervisor

GATEWAY_NICENESS = 5
"""The gateway's work is short and can wait a millisecond; the engine's threads wait for the slowest of them."""
PROBE_EVERY_S = 0.1
PROBE_TIMEOUT_S = 5.0


def run(loaded: LoadedSettings, options: Mapping[str, Any]) -> int:
    """Serve until a signal; the exit code.

    Args:
        options: what was given on the command line, by dotted name; the children get it through their environment.

    Raises:
        SettingsError, PortError, KeyFileError, ModelLoadError: before anything is started.
    """
    started = time.monotonic()
    settings = loaded.settings
    if settings.server.workers > 1:
        raise SettingsError("server.workers: this release runs one gateway worker on a machine")
    server = settings.server
    address = check_port(server.host, server.port, "--port or server.port")
    check_port("127.0.0.1", server.metrics_port, "server.metrics_port")
    _, model = resolve_model(settings.engine.model, settings.home)
    key, is_new = load_or_create_key(settings.home)

    def announce() -> None:
        _say(f"Evenhand {__version__} is ready in {time.monotonic() - started:.1f} s")
        for line in _where_to_go(settings, address, model, key if is_new else None):
            _say(line)

    with socket_folder(settings.home) as folder:
        environment = _environment(loaded, options, folder)
        # -P: the folder that one happens to be in must not shadow our packages.
        command = [sys.executable, "-P", "-m", "gateway.cli"]
        children = (
            ChildSpec(
                name="gateway",
                command=[*command, "gateway"],
                environment=environment,
                niceness=GATEWAY_NICENESS,
                drain_s=server.drain_s,
            ),
            ChildSpec(name="engine", command=[*command, "engine"], environment=environment),
        )
        supervisor = Supervisor(children, ready=lambda: wait_until_ready(server, address), on_ready=announce, log=_say)
        return asyncio.run(supervisor.run())


def _environment(loaded: LoadedSettings, options: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The same file and variables for every child, and what the command line said."""
    environment = dict(os.environ)
    if loaded.config is not None:
        environment[CONFIG_VARIABLE] = str(loaded.config)
    given = {name: value for name, value in options.items() if value is not None}
    given.setdefault("engine.endpoint", loaded.settings.engine.endpoint or f"ipc://{folder / SOCKET_NAME}")
    return environment | {
        setting.variable: str(given[setting.name]) for setting in all_settings() if setting.name in given
    }


async def wait_until_ready(server: ServerSettings, address: str) -> None:
    """Ask ``/ready`` until the answer is yes, as a load balancer would."""
    context = None
    if server.tls_cert is not None:
        # Our own process on our own machine, whose certificate is for its public name.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    while True:
        # Refused, reset or silent: not ready yet.
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                if await _probe(_reachable(address), server.port, context):
                    return
        await asyncio.sleep(PROBE_EVERY_S)


async def _probe(host: str, port: int, context: ssl.SSLContext | None) -> bool:
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status = await reader.readuntil(b"\r\n")
        return status.split()[1:2] == [b"200"]
    finally:
        writer.close()


def _reachable(address: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - compared, not bound


def _where_to_go(settings: Settings, address: str, model: str, new_key: str | None) -> list[str]:
    """What a person needs for a first request; the key itself only when it was just made."""
    server = settings.server
    host = _reachable(address)
    scheme = "http" if server.tls_cert is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"
    key_file = settings.home / FILE_NAME
    body = (
        f'{{"model": "{model}", "temperature": 0, "max_tokens": 100, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return [
        f"  address  {url}/v1" + (f" (listening on {address})" if host != address else ""),
        f"  model    {model} on {settings.engine.device}",
        f"  key      {new_key} (new, shown this once; kept in {key_file})" if new_key else f"  key      in {key_file}",
        f"  metrics  http://127.0.0.1:{server.metrics_port}/metrics",
        "Try it:",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"    -H \"Authorization: Bearer $(cat '{key_file}')\" \\",
        f"    -d '{body}'",
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201
