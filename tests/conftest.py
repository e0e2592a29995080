"""What every test may use: the real model's file, free ports, and hypothesis' two lengths."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from evenhand_process import EvenhandProcess
from hypothesis import settings

from engine.models.fetch import SMOLLM2_135M_INSTRUCT, fetch

settings.register_profile("full", max_examples=10 * settings.default.max_examples)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The folder that fetched models are kept in, shared with the user's own servers: 98 MB are fetched once."""
    return Path(os.environ.get("EVENHAND_HOME") or "~/.evenhand").expanduser() / "models"


@pytest.fixture(scope="session")
def smollm2_path(model_folder: Path) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched if it is not there."""
    return fetch(SMOLLM2_135M_INSTRUCT, model_folder)


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Ports of 127.0.0.1 that nobody listens on; none is given twice."""
    given: set[int] = set()

    def next_port() -> int:
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            if port not in given:
                given.add(port)
                return port

    return next_port


@pytest.fixture(scope="session")
def new_home(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Callable[[], Path]:
    """Makes homes for servers: without a key, with the models that are already fetched."""

    def make() -> Path:
        home = tmp_path_factory.mktemp("home") / "evenhand"
        home.mkdir()
        (home / "models").symlink_to(smollm2_path.parents[1])
        return home

    return make


@pytest.fixture(scope="session")
def evenhand_server(new_home: Callable[[], Path], free_port: Callable[[], int]) -> Iterator[EvenhandProcess]:
    """The whole, running with the real model: gateway, engine and supervisor; shared, so leave it as it was."""
    server = EvenhandProcess(new_home(), free_port(), free_port())
    try:
        server.wait_ready()
        yield server
        assert server.stop() == 0
    finally:
        server.close()
