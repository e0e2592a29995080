"""A server for the length of a measurement: ``evenhand serve`` in a home of its own, which vanishes with it.

Its model, device and whatever else the engine is told are those of the settings in force, and so is its calibration.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.models.fetch import resolve_model
from gateway.commands.administer import CommandError, opened
from gateway.services.admin_keys import KeyTerms
from gateway.services.audit import Actor
from gateway.settings import ENV_PREFIX, Settings, all_settings

_HOST = "127.0.0.1"
_SHARED = ("models", "calibration")
"""Folders of the home that both have."""
_NOT_TAKEN = ("engine.endpoint", "engine.curve_public_key", "engine.curve_secret_key", "engine.curve_peer_keys")
"""Settings of the engine that belong to another server."""
_START_S = 120.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class OwnServer:
    """Where it is, and the keys of each team by the team's name."""

    url: str
    metrics_url: str
    keys: Mapping[str, Sequence[str]]


@contextmanager
def own_server(
    settings: Settings, *, policy: str, num_slots: int, teams: Mapping[str, tuple[int, int]]
) -> Iterator[OwnServer]:
    """A server that is ready, with teams of one organization.

    Args:
        teams: name → weight, number of keys.

    Raises:
        CommandError: it does not start.
        ModelLoadError: there is no such model.
    """
    resolve_model(settings.engine.model, settings.home)  # fetched once, and not for a home that vanishes
    with tempfile.TemporaryDirectory(prefix="evenhand-bench-") as folder, _two_ports() as (port, metrics_port):
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        for name in _SHARED:
            if (settings.home / name).is_dir():
                (home / name).symlink_to(settings.home / name)
        keys = asyncio.run(_make_keys(Settings(home=home), teams))
        told = {
            "home": home,
            "server.host": _HOST,
            "server.port": port,
            "server.metrics_port": metrics_port,
            **_engine_settings(settings),
            "engine.policy": policy,
            "engine.max_sequences": num_slots,
        }
        with _serving(told, port, Path(folder) / "server.log"):
            yield OwnServer(f"http://{_HOST}:{port}", f"http://{_HOST}:{metrics_port}/metrics", keys)


def _engine_settings(settings: Settings) -> dict[str, object]:
    values = {f"engine.{name}": value for name, value in settings.engine}
    return {name: value for name, value in values.items() if value is not None and name not in _NOT_TAKEN}


async def _make_keys(settings: Settings, teams: Mapping[str, tuple[int, int]]) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    actor = Actor("cli:bench")
    async with opened(settings) as (_, administration):
        organization = await administration.tenants.create_organization(actor, name="bench")
        for name, (weight, num_keys) in teams.items():
            team = await administration.tenants.create_team(
                actor, organization_id=organization.id, name=name, weight=weight
            )
            made = [
                await administration.keys.create(actor, team_id=team.id, terms=KeyTerms(name=f"key {number + 1}"))
                for number in range(num_keys)
            ]
            keys[name] = [issued.raw for issued in made]
    return keys


@contextmanager
def _two_ports() -> Iterator[tuple[int, int]]:
    """Free ones, as far as one can know."""
    with socket.create_server((_HOST, 0)) as first, socket.create_server((_HOST, 0)) as second:
        ports = first.getsockname()[1], second.getsockname()[1]
    yield ports


@contextmanager
def _serving(told: Mapping[str, object], port: int, log: Path) -> Iterator[None]:
    variables = {setting.variable: str(told[setting.name]) for setting in all_settings() if setting.name in told}
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    with log.open("wb") as stderr:
        # -P: the folder that one happens to be in must not shadow our packages.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gateway.cli", "serve"],
            env=inherited | variables,
            cwd=log.parent,  # where no evenhand.toml lies
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        _wait_ready(process, port, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not _is_ready(port):
        if process.poll() is not None:
            raise CommandError(f"the server ended with exit code {process.returncode}: {_last_line(log)}")
        if time.monotonic() > deadline:
            raise CommandError(f"the server is not ready after {_START_S:.0f} s: {_last_line(log)}")
        time.sleep(0.2)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
