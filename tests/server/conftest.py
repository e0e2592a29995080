"""A gateway with a scripted backend, for all tests that do not change it for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from scripted_server import ScriptedServer, running_server


@pytest.fixture(scope="session")
def scripted(free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with running_server(free_port(), tmp_path_factory.mktemp("scripted")) as server:
        yield server
