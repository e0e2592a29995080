"""Whatever is killed under load, a hard quota is not exceeded by a token, and what is left of it is not lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import pytest
from cluster import MODEL, SharedCluster
from examples import examples
from kill_kit import LEASE_S, all_back, check_books, never_over, tree, used_up_to_the_token, what_became
from limit_books import balanced
from limit_kit import LimitOffice, begun
from limit_load import Caller
from open_load import Load

pytestmark = pytest.mark.slow

RATE_S = 100.0
LOAD_S = 7.0
AMOUNT = 60_000
"""Is used up while there is load, or soon after."""

logger = logging.getLogger(__name__)


def kill_gateway(cluster: SharedCluster) -> None:
    gateway = cluster.gateways[0]
    gateway.kill()
    gateway.start()


def kill_redis_empty(cluster: SharedCluster) -> None:
    cluster.redis.kill()
    cluster.redis.forget()
    cluster.redis.start()


def kill_redis_with_data(cluster: SharedCluster) -> None:
    cluster.redis.kill()
    cluster.redis.start()


def kill_postgresql(cluster: SharedCluster) -> None:
    cluster.postgres.kill()
    cluster.postgres.start()


VICTIMS: dict[str, tuple[Callable[[SharedCluster], None], float]] = {
    "gateway": (kill_gateway, LOAD_S),
    "redis, empty": (kill_redis_empty, LOAD_S + LEASE_S),
    "redis, with its data": (kill_redis_with_data, LOAD_S + LEASE_S),
    "postgresql": (kill_postgresql, LOAD_S),
}
"""What is killed, and for how long there is load: of a Redis that is empty, or may be an older one, it is refused until
every gateway must have made known what it has."""


@pytest.mark.parametrize("repeat", range(examples(1)))
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_kill_leaves_the_limits_exact(
    ends: SharedCluster, ends_office: LimitOffice, caller: Caller, victim: str, repeat: int
) -> None:
    """What breaks it: a store that begins at nothing when it was lost, or at what the ledger has without what runs;
    that counts twice what was settled while it was away; reservations of the dead that nobody ends, or that are given
    back before it is known what was used."""
    kill, load_s = VICTIMS[victim]
    rng = random.Random(f"{victim} {repeat}")
    customer = await ends_office.customer(*tree(AMOUNT))
    await begun(ends, customer)
    load = Load(customer.key, MODEL, lambda: rng.choice(ends.gateways).url, rate_s=RATE_S, seed=repeat)
    target = ends.gateways[0].url if victim == "gateway" else ""
    async with never_over(ends, customer, AMOUNT), all_back(ends):
        running = asyncio.create_task(load.run(load_s))
        async with asyncio.timeout(load_s):
            await load.reached(int(RATE_S * rng.uniform(1.5, 3.0)), num_running=3, gateway=target)
        await asyncio.to_thread(kill, ends)
        await running
        for gateway in ends.gateways:
            await asyncio.to_thread(gateway.wait_ready)
        logger.info("%s\n%s", victim, what_became(load.attempts))
        await balanced(ends, ends_office, customer, LEASE_S)
        await check_books(ends, ends_office, customer, load.attempts)
        await used_up_to_the_token(ends, ends_office, caller, customer, AMOUNT)
    assert sum(each.status == 200 for each in load.attempts) > LOAD_S * RATE_S / 4, what_became(load.attempts)
