"""Two gateways that share limits, an engine whose answers are scripted, and somebody who administers and calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from cluster import ENDS_ENGINE, MODEL, SharedCluster, running_cluster
from kill_kit import LEASE_S as ENDS_LEASE_S
from limit_kit import LimitOffice, limit_office
from limit_load import Caller, calling

LEASE_S = 5
"""So short that Redis' first seconds, in which no hard quota is served, are nearly over when tests begin; and so long
that no request loses its reservation while Redis pauses."""


@pytest.fixture(scope="session")
def pair(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[SharedCluster]:
    """Requests are refused while Redis does not answer. A test that stops something lets it go on."""
    folder, models = tmp_path_factory.mktemp("pair"), smollm2_path.parents[1]
    with running_cluster(folder, models, free_port, settings={"EVENHAND_LIMITS__LEASE_S": str(LEASE_S)}) as cluster:
        yield cluster


@pytest.fixture
async def office(pair: SharedCluster) -> AsyncIterator[LimitOffice]:
    async with limit_office(pair) as office:
        yield office


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    async with calling() as caller:
        yield caller


@pytest.fixture(scope="session")
def ends(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[SharedCluster]:
    """For tests that kill and lose, and bring back what they end. Requests end in the engine as they ask, their tokens
    have a price, and Redis keeps what it has over a restart."""
    folder, models = tmp_path_factory.mktemp("ends"), smollm2_path.parents[1]
    with running_cluster(
        folder,
        models,
        free_port,
        engine=(ENDS_ENGINE, "5"),
        settings={"EVENHAND_SERVER__DRAIN_NOTICE_S": "1", "EVENHAND_LIMITS__LEASE_S": str(ENDS_LEASE_S)},
        redis_keeps_data=True,
    ) as cluster:
        cluster.command("price", "set", MODEL, "--prompt", "1", "--cached", "0.5", "--completion", "3")
        yield cluster


@pytest.fixture
async def ends_office(ends: SharedCluster) -> AsyncIterator[LimitOffice]:
    async with limit_office(ends) as office:
        yield office
