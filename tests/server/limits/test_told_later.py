"""What a gateway could not tell Redis before it ended is told by the next one, and alerts come though all ends."""

from __future__ import annotations

import asyncio
import signal

import pytest
from cluster import SharedCluster
from limit_kit import Held, LimitOffice, begun, eventually, standings_if_known
from limit_load import Caller

from gateway.domain.limits.policy import QuotaRule

pytestmark = pytest.mark.slow

QUOTA = QuotaRule(unit="tokens", period="day", amount=3_000)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_gateway_that_ends_while_redis_is_silent_has_its_requests_told_by_the_next(
    pair: SharedCluster, office: LimitOffice, caller: Caller, how: signal.Signals
) -> None:
    customer = await office.customer(Held("key", QUOTA))
    await begun(pair, customer)
    first, other = pair.gateways
    async with caller.running(first.url, customer.key, prompt=20, output=1_500, after=5) as running:
        pair.redis.freeze()
        try:
            answer = await asyncio.wait_for(running.end(), 20)
            await office.settled(customer, 1)
            first.send(how)
            await asyncio.to_thread(first.wait)
        finally:
            pair.redis.thaw()
    await asyncio.to_thread(first.start)
    await asyncio.to_thread(first.wait_ready)
    (used,) = (await office.committed(customer)).values()
    assert used == answer.total

    async def is_told() -> bool:
        found = await standings_if_known(other.url, customer.key)
        return found is not None and found.left(QUOTA.name) == QUOTA.amount - used

    await eventually(is_told, "Redis knows what the ledger knows", 15)
    last = await caller.ask(other.url, customer.key, prompt=20, output=2_900)
    assert (last.status, last.total) == (200, QUOTA.amount - used)


async def test_one_long_request_that_uses_up_a_quota_is_told_of(
    pair: SharedCluster, office: LimitOffice, caller: Caller
) -> None:
    customer = await office.customer(Held("key", QUOTA))
    await begun(pair, customer)
    answer = await caller.ask(pair.gateways[0].url, customer.key, prompt=20, output=QUOTA.amount)
    assert answer.total == QUOTA.amount

    async def is_told() -> bool:
        return await office.alerts(customer) == set(QUOTA.alerts)

    await eventually(is_told, "every percentage of the quota", 15)
