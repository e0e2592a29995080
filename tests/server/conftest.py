"""A gateway with a scripted backend, for all tests that do not change it for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import SharedCluster, running_cluster
from scripted_server import ScriptedServer, running_server


@pytest.fixture(scope="session")
def scripted(free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with running_server(free_port(), tmp_path_factory.mktemp("scripted")) as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[SharedCluster]:
    """Two gateways on PostgreSQL and Redis, with an organization ``acme`` and its team ``blue``."""
    folder, models = tmp_path_factory.mktemp("cluster"), smollm2_path.parents[1]
    with running_cluster(
        folder, models, free_port, step_ms=5, settings={"EVENHAND_SERVER__DRAIN_NOTICE_S": "1"}
    ) as cluster:
        cluster.command("org", "create", "acme")
        cluster.command("team", "create", "--org", "acme", "--weight", "2", "blue")
        yield cluster
