"""Whatever is killed, every request that got a 200 has exactly one row in the ledger, and nothing else has one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Any

import asyncpg
import pytest
from cluster import MODEL, SharedCluster
from evenhand_process import wait_until
from examples import examples
from open_load import LEAVES, Attempt, Load

LOAD_S = 8.0
RATE_S = 50.0
RUNNING = 4
"""Streams that run when something is killed."""
CUT = {"gateway": 3, "engine": 3, "postgresql": 0, "redis": 0}
"""How many answers each kill must hit at least; without a database or Redis running answers go on."""

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def key(shared_cluster: SharedCluster) -> str:
    return shared_cluster.new_key("acme", "blue")


def kill_gateway(cluster: SharedCluster) -> None:
    gateway = cluster.gateways[0]
    gateway.kill()
    gateway.start()


def kill_engine(cluster: SharedCluster) -> None:
    cluster.engine.kill()
    cluster.engine.start()


def kill_postgresql(cluster: SharedCluster) -> None:
    cluster.postgres.kill()
    cluster.postgres.start()


def kill_redis(cluster: SharedCluster) -> None:
    cluster.redis.kill()
    cluster.redis.start()


VICTIMS = {
    "gateway": kill_gateway,
    "engine": kill_engine,
    "postgresql": kill_postgresql,
    "redis": kill_redis,
}


@pytest.mark.parametrize("repeat", range(examples(1)))
@pytest.mark.parametrize("victim", VICTIMS)
async def test_the_books_balance_after_a_kill(
    shared_cluster: SharedCluster, key: str, victim: str, repeat: int
) -> None:
    cluster = shared_cluster
    before = set(await rows(cluster))
    rng = random.Random(f"{victim}{repeat}")
    load = Load(key, MODEL, lambda: rng.choice(cluster.gateways).url, rate_s=RATE_S, seed=repeat)
    running = asyncio.create_task(load.run(LOAD_S))
    target = cluster.gateways[0].url if victim == "gateway" else ""
    async with asyncio.timeout(LOAD_S):
        await load.reached(int(LOAD_S * RATE_S * rng.uniform(0.2, 0.5)), num_running=RUNNING, gateway=target)
    await asyncio.to_thread(VICTIMS[victim], cluster)
    await running
    for gateway in cluster.gateways:
        await asyncio.to_thread(gateway.wait_ready)

    answered = {each.request_id: each for each in load.attempts if each.status == 200}
    booked = await booked_rows(cluster, {str(request_id) for request_id in answered})
    new = {request_id: row for request_id, row in booked.items() if request_id not in before}
    known = {each.request_id for each in load.attempts if each.request_id is not None}
    num_unanswered = sum(each.status is None for each in load.attempts)

    num_cut = sum(each.was_cut for each in load.attempts)
    outcomes = Counter(row["outcome"] for row in new.values())
    logger.info(
        "%s: %d requests, %d answered, %d of them cut; %s",
        victim,
        len(load.attempts),
        len(answered),
        num_cut,
        dict(outcomes),
    )

    assert len(answered) > 0.5 * len(load.attempts), what_happened(load.attempts)
    assert num_cut >= CUT[victim], f"the kill hit {num_cut} answers"
    assert answered.keys() <= new.keys()
    assert len(new.keys() - known) <= num_unanswered, "rows without a request"
    for request_id, attempt in answered.items():
        check_row(attempt, new[str(request_id)])
    if victim == "gateway":
        assert outcomes["lost"] > 0
    assert "clean" in cluster.command("ledger", "verify")


def check_row(attempt: Attempt, row: dict[str, Any]) -> None:
    if attempt.is_whole and attempt.kind != LEAVES:
        assert attempt.usage is not None
        expected = (attempt.usage["prompt_tokens"], attempt.usage["completion_tokens"], "finished")
        assert (row["prompt_tokens"], row["completion_tokens"], row["outcome"]) == expected
    else:
        assert row["prompt_tokens"] > 0
        assert row["completion_tokens"] >= attempt.num_chunks
        assert row["outcome"] in {"finished", "client_gone", "engine_down", "lost", "cancelled"}


async def rows(cluster: SharedCluster) -> dict[str, dict[str, Any]]:
    connection = await asyncpg.connect(cluster.database_url)
    try:
        return {row["request_id"]: dict(row) for row in await connection.fetch("SELECT * FROM ledger")}
    finally:
        await connection.close()


async def booked_rows(cluster: SharedCluster, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """All rows, once those that are wanted are there and nothing waits to be posted any more."""
    found: dict[str, dict[str, Any]] = {}

    async def are_there() -> bool:
        nonlocal found
        found = await rows(cluster)
        return wanted <= found.keys()

    deadline = asyncio.get_running_loop().time() + 60
    while not await are_there():
        missing = wanted - found.keys()
        assert asyncio.get_running_loop().time() < deadline, f"{len(missing)} rows are missing: {sorted(missing)[:5]}"
        await asyncio.sleep(0.1)
    await asyncio.to_thread(wait_until, lambda: all_is_posted(cluster), 60)
    return await rows(cluster)


def all_is_posted(cluster: SharedCluster) -> bool:
    """Nothing runs, nothing waits to be posted, and no process that died has left anything open."""
    report = cluster.command("ledger", "verify").splitlines()
    return len(report) == 4 and report[1].endswith(" 0 of them not posted yet") and report[2].startswith("0 ")


def what_happened(attempts: list[Attempt]) -> str:
    counts: dict[str, int] = {}
    for each in attempts:
        counts[f"{each.status} {each.error[:150]}"] = counts.get(f"{each.status} {each.error[:150]}", 0) + 1
    return "\n".join(f"{count:5} {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1]))
