"""Engines with a scripted core behind real sockets, for the tests of the engine's process and its client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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
