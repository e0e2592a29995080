"""``evenhand serve``: an engine and gateway workers on this machine, under one supervisor."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from engine.models.fetch import resolve_model
from gateway import __version__
from gateway.backends.curve import curve_keys
from gateway.commands.first_start import make_first_keys, prepare_database
from gateway.commands.health import reachable, server_url
from gateway.commands.storage_down import explain
from gateway.domain.credential import Peppers
from gateway.errors import StorageDown
from gateway.http_server import check_tls
from gateway.ports import check_port, reserved_port
from gateway.settings import Settings, all_settings
from gateway.settings_sources import CONFIG_VARIABLE, LoadedSettings
from gateway.socket_folder import SOCKET_NAME, socket_folder
from gateway.storage.errors import UnusableDatabase
from gateway.supervisor import ChildSpec, Supervisor

GATEWAY_NICENESS = 5
"""The gateway's work is short and can wait a millisecond; the engine's threads wait for the slowest of them."""
METRICS_FOLDER = "metrics"


def run(loaded: LoadedSettings, options: Mapping[str, Any]) -> int:
    """Serve until a signal; the exit code.

    Args:
        options: what was given on the command line, by dotted name; the children get it through their environment.

    Raises:
        SettingsError, PortError, ModelLoadError, ConfigError: before anything is started. What
            `prepare_database` raises likewise, but for a database that does not answer: that is told, and 1.
    """
    started = time.monotonic()
    settings = loaded.settings
    server = settings.server
    check_tls(server)
    curve_keys(settings.engine)
    with ExitStack() as stack:
        address = stack.enter_context(reserved_port(server.host, server.port, "--port or server.port"))
        check_port("127.0.0.1", server.metrics_port, "server.metrics_port")
        _, model = resolve_model(settings.engine.model, settings.home)
        try:
            peppers = prepare_database(settings)
        except StorageDown as e:
            _say(f"evenhand: {explain(e, settings)}")
            return 1

        def announce() -> None:
            took_s = time.monotonic() - started
            keys = _first_keys(settings, peppers)
            _say(f"Evenhand {__version__} is ready in {took_s:.1f} s")
            for line in where_to_go(settings, address, model, keys):
                _say(line)

        folder = stack.enter_context(socket_folder(settings.home))
        environment = _environment(loaded, options, folder)
        if server.workers == 1:
            gateways = [_gateway(settings, "gateway", environment)]
            supervise = partial(Supervisor, on_ready=announce, log=_say)
        else:
            # Imported here: it is this process that serves the metrics only if there are several workers.
            from gateway.telemetry.shared_metrics import forget_gauges, shared_metrics_server, worker_environment

            metrics = folder / METRICS_FOLDER
            metrics.mkdir(mode=0o700)
            stack.enter_context(shared_metrics_server(server.metrics_port, metrics))
            names = [f"gateway-{number}" for number in range(1, server.workers + 1)]
            gateways = [_gateway(settings, name, environment | worker_environment(metrics, name)) for name in names]
            supervise = partial(Supervisor, on_ready=announce, log=_say, on_end=partial(forget_gauges, metrics))
        engine = ChildSpec(name="engine", command=_command("engine"), environment=environment)
        return asyncio.run(supervise((gateways, [engine])).run())


def _first_keys(settings: Settings, peppers: Peppers) -> Sequence[tuple[str, str]]:
    """The server is running and goes on running, whatever becomes of them."""
    try:
        return make_first_keys(settings, peppers)
    except StorageDown as e:
        _say(f"evenhand: {explain(e, settings)}; if there is no organization yet, the next start makes one")
    except UnusableDatabase as e:
        _say(f"evenhand: {e}")
    return ()


def _command(name: str) -> list[str]:
    # -P: the folder that one happens to be in must not shadow our packages.
    return [sys.executable, "-P", "-m", "gateway.cli", name]


def _gateway(settings: Settings, name: str, environment: Mapping[str, str]) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=_command("gateway"),
        environment=environment,
        tells_ready=True,
        niceness=GATEWAY_NICENESS,
        drain_s=settings.server.drain_notice_s + settings.server.drain_s,
    )


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


def where_to_go(settings: Settings, address: str, model: str, keys: Sequence[tuple[str, str]]) -> list[str]:
    """What a person needs for a first request.

    Args:
        keys: those that were just made, as (team, raw key): nobody is shown them again.
    """
    server = settings.server
    url = server_url(server, address)
    body = (
        f'{{"model": "{model}", "temperature": 0, "max_tokens": 100, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    lines = [
        f"  address  {url}/v1" + (f" (listening on {address})" if reachable(address) != address else ""),
        f"  model    {model} on {settings.engine.device}",
        f"  metrics  http://127.0.0.1:{server.metrics_port}/metrics",
    ]
    if not keys:
        return [*lines, "  keys     evenhand key create --org ORG --team TEAM --name NAME"]
    return [
        *lines,
        *(f"  key      {team}  {raw} (new, shown this once)" for team, raw in keys),
        "Try it:",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"    -H 'Authorization: Bearer {keys[0][1]}' \\",
        f"    -d '{body}'",
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201
