"""SIGTERM to one of two gateways as they ship, behind a balancer: no request fails, and each is in the ledger once."""

from __future__ import annotations

import asyncio
import itertools
import signal

import asyncpg
import httpx
import pytest
from cluster import MODEL, Gateway, SharedCluster
from evenhand_process import wait_until
from open_load import STREAM, WHOLE, Load

POLL_S = 0.1
LOAD_S = 6.0
RATE_S = 50.0


class Balancer:
    """Knows which gateways said yes to ``/ready`` when it last asked."""

    def __init__(self, gateways: list[Gateway]) -> None:
        self._gateways = gateways
        self._ready = list(gateways)
        self._turn = itertools.count()

    def pick(self) -> str:
        return self._ready[next(self._turn) % len(self._ready)].url

    async def poll(self) -> None:
        async with httpx.AsyncClient(timeout=5) as client:
            while True:
                self._ready = [each for each in self._gateways if await self._says_yes(client, each)]
                await asyncio.sleep(POLL_S)

    @staticmethod
    async def _says_yes(client: httpx.AsyncClient, gateway: Gateway) -> bool:
        try:
            return (await client.get(f"{gateway.url}/ready")).status_code == 200
        except httpx.TransportError:
            return False


@pytest.mark.slow
async def test_sigterm_under_load_fails_nothing_and_loses_nothing(shared_cluster: SharedCluster) -> None:
    cluster = shared_cluster
    leaving = cluster.gateways[0]
    balancer = Balancer(cluster.gateways)
    polling = asyncio.create_task(balancer.poll())
    load = Load(cluster.new_key("acme", "blue", "drain"), MODEL, balancer.pick, rate_s=RATE_S, kinds=(WHOLE, STREAM))
    running = asyncio.create_task(load.run(LOAD_S))
    try:
        async with asyncio.timeout(LOAD_S):
            await load.reached(int(RATE_S * LOAD_S / 3), num_running=3, gateway=leaving.url)
        leaving.send(signal.SIGTERM)
        await running
        polling.cancel()
        assert await asyncio.to_thread(leaving.wait) == 0
    finally:
        leaving.start()
        await asyncio.to_thread(leaving.wait_ready)
    outcomes = await outcomes_of(cluster, [str(each.request_id) for each in load.attempts])

    assert [(each.status, each.error) for each in load.attempts if not each.is_whole] == []
    assert set(outcomes) == {"finished"}
    assert len(outcomes) == len(load.attempts)


async def outcomes_of(cluster: SharedCluster, request_ids: list[str]) -> list[str]:
    """How each of the requests ended, once the ledger has them all."""
    found: list[str] = []

    def are_there() -> bool:
        nonlocal found
        found = asyncio.run(select_outcomes(cluster.database_url, request_ids))
        return len(found) == len(request_ids)

    await asyncio.to_thread(wait_until, are_there)
    return found


async def select_outcomes(database_url: str, request_ids: list[str]) -> list[str]:
    connection = await asyncpg.connect(database_url)
    try:
        rows = await connection.fetch("SELECT outcome FROM ledger WHERE request_id = ANY($1)", request_ids)
        return [row["outcome"] for row in rows]
    finally:
        await connection.close()
