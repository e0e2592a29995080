"""Engines with a scripted core behind real sockets, and commands over real databases."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from cli_kit import Cli
from engine_kit import EngineThread, RawClient, card, raw_client
from scripted_core import ScriptedCore

from engine.carriers.curve import CurveKeys
from engine.carriers.inprocess import InProcessClient, InProcessServer
from engine.carriers.port import ClientCarrier, ServerCarrier
from engine.carriers.zeromq_client import ZeroMQClient
from engine.carriers.zeromq_server import ZeroMQServer


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short private folder: a socket's path must fit in 107 bytes."""
    path = tmp_path_factory.mktemp("s")
    path.chmod(0o700)
    return path


@pytest.fixture
def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/e"


@pytest.fixture
def engine(endpoint: str) -> Iterator[EngineThread[ScriptedCore]]:
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), card()) as running:
        yield running


@pytest.fixture
def client(engine: EngineThread[ScriptedCore], endpoint: str) -> Iterator[RawClient]:
    with raw_client(endpoint) as connected:
        connected.hello()
        yield connected


@pytest.fixture(params=["ipc", "tcp", "in process"])
def carriers(
    request: pytest.FixtureRequest, endpoint: str, free_port: Callable[[], int]
) -> tuple[ServerCarrier, ClientCarrier]:
    if request.param == "ipc":
        return ZeroMQServer(endpoint), ZeroMQClient(endpoint)
    if request.param == "tcp":
        address = f"tcp://127.0.0.1:{free_port()}"
        engine_keys, (client_keys,) = CurveKeys.pair()
        return ZeroMQServer(address, curve=engine_keys), ZeroMQClient(address, curve=client_keys)
    server = InProcessServer()
    return server, InProcessClient(server)


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, database_url: str
) -> Iterator[Cli]:
    """Of a home and a database of its own."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    for name in [name for name in os.environ if name.startswith("EVENHAND_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENHAND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EVENHAND_DATABASE__URL", database_url)
    yield Cli(monkeypatch, capsys)
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level
