"""Two misfortunes at once, or one that lasts: a hard quota is exact all the same."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AbstractAsyncContextManager, suppress

import aiohttp
import pytest
from cluster import SharedCluster
from kill_kit import LEASE_S, all_back, used_up_to_the_token
from limit_books import balanced, store_books
from limit_kit import Customer, Held, LimitOffice, begun, eventually
from limit_load import Caller, Running

from gateway.domain.limits.policy import Concurrency, QuotaRule

pytestmark = pytest.mark.slow

STEP_S = 0.005
"""Of the engine: it makes a token of each answer in a step."""
A_LEASE = int(LEASE_S / STEP_S * 1.1)
"""Tokens that an answer gets in more than a lease time."""
LONG = 2_500
AMOUNT = 20_000
TREE = (
    Held("organization", QuotaRule(unit="tokens", period="month", amount=AMOUNT)),
    Held("team", QuotaRule(unit="tokens", period="day", amount=1_000, is_hard=False)),
    Held("key", Concurrency(amount=50)),
)


def running(caller: Caller, url: str, customer: Customer, output: int) -> AbstractAsyncContextManager[Running]:
    return caller.running(url, customer.key, prompt=20, output=output)


async def lose_redis(ends: SharedCluster) -> None:
    """It is back at once, and empty."""
    await asyncio.to_thread(ends.redis.kill)
    ends.redis.forget()
    await asyncio.to_thread(ends.redis.start)


async def known_again(ends: SharedCluster, customer: Customer) -> None:
    async def is_known() -> bool:
        return store_books(ends, customer).is_known

    await eventually(is_known, "the organization is known again", 2 * LEASE_S)


async def test_redis_is_lost_while_postgresql_is_down(
    ends: SharedCluster, ends_office: LimitOffice, caller: Caller
) -> None:
    """An answer ends while its row cannot get into the ledger, and before the store is lost that knew of it.

    What breaks it: a store that is told what the ledger has, before the ledger has everything."""
    customer = await ends_office.customer(*TREE)
    await begun(ends, customer)
    one, other = (gateway.url for gateway in ends.gateways)
    async with all_back(ends):
        async with running(caller, one, customer, LONG) as long, running(caller, other, customer, 300) as short:
            await asyncio.to_thread(ends.postgres.kill)
            assert (await short.end()).reasons == {0: "length"}
            await lose_redis(ends)
            await long.answer.reached(long.answer.num_chunks + A_LEASE)
            await asyncio.to_thread(ends.postgres.start)
            await known_again(ends, customer)
        await balanced(ends, ends_office, customer)
        await used_up_to_the_token(ends, ends_office, caller, customer, AMOUNT)


async def test_a_gateway_and_redis_die_at_once(ends: SharedCluster, ends_office: LimitOffice, caller: Caller) -> None:
    """What breaks it: a store that is told what is committed before the rows of the dead gateway are in the ledger, or
    that charges them once more when they are."""
    customer = await ends_office.customer(*TREE)
    await begun(ends, customer)
    one, other = (gateway.url for gateway in ends.gateways)
    async with all_back(ends), running(caller, other, customer, LONG) as long:
        with suppress(aiohttp.ClientError):
            async with running(caller, one, customer, LONG) as cut, running(caller, one, customer, 50) as short:
                await cut.answer.reached(100)
                await short.end()
                await asyncio.to_thread(ends.gateways[0].kill)
                await lose_redis(ends)
        await known_again(ends, customer)
        assert (await long.end()).reasons == {0: "length"}
    await balanced(ends, ends_office, customer)
    await used_up_to_the_token(ends, ends_office, caller, customer, AMOUNT)


async def test_a_gateway_dies_and_the_engine_is_slow_to_tell(
    ends: SharedCluster, ends_office: LimitOffice, caller: Caller
) -> None:
    """Until it is known what the engine has made of a request, nobody gets what is reserved for it; that may be longer
    than its lease.

    What breaks it: a lease that runs out while somebody is finding that out. What was written unknown to all would come
    on top of what others use."""
    customer = await ends_office.customer(*TREE)
    await begun(ends, customer)
    async with all_back(ends):
        with suppress(aiohttp.ClientError):
            async with running(caller, ends.gateways[0].url, customer, LONG) as cut:
                request_id = cut.answer.request_id
                await cut.answer.reached(100)
                ends.engine.send(signal.SIGSTOP)
                ends.gateways[0].kill()
        due_ms = store_books(ends, customer).requests[request_id]
        before = store_books(ends, customer).quotas

        async def is_over() -> bool:
            return store_books(ends, customer).now_ms > due_ms + LEASE_S * 500

        await eventually(is_over, "its lease is over, and half another one", 3 * LEASE_S)
        assert store_books(ends, customer).quotas == before
        ends.engine.send(signal.SIGCONT)
        await balanced(ends, ends_office, customer)
    await used_up_to_the_token(ends, ends_office, caller, customer, AMOUNT)


async def test_redis_comes_back_with_its_data_after_a_lease_time(
    ends: SharedCluster, ends_office: LimitOffice, caller: Caller
) -> None:
    """What runs ends before its lease does, since nobody knows whether others can reach Redis; and it is charged for
    all that it has written meanwhile.

    What breaks it: leases that run out while nobody can renew them. The first who asks would settle the answer for what
    was known of it before, others would use the rest, and the answer has written more since."""
    customer = await ends_office.customer(*TREE)
    await begun(ends, customer)
    one, other = (gateway.url for gateway in ends.gateways)
    async with all_back(ends), running(caller, one, customer, LONG) as long:
        await long.answer.reached(100)
        await asyncio.to_thread(ends.redis.kill)
        ended = await long.end()
        assert ended.code == "limits_unavailable"
        assert 100 + A_LEASE / 3 < ended.num_chunks < 100 + A_LEASE

        async def row_is_there() -> bool:
            return bool(await ends_office.rows(customer))

        await eventually(row_is_there, "it is in the ledger")
        await asyncio.to_thread(ends.redis.start)
        answers = await caller.ask_until(
            lambda answer: answer.status == 429, lambda: caller.ask(other, customer.key, prompt=20, output=300, n=16)
        )
        assert answers[-1].code == "insufficient_quota"
        await balanced(ends, ends_office, customer)
        await used_up_to_the_token(ends, ends_office, caller, customer, AMOUNT)


async def test_a_gateway_leaves_while_redis_is_down(
    ends: SharedCluster, ends_office: LimitOffice, caller: Caller
) -> None:
    """What breaks it: settlements that go with the process that could not make them. Its reservations would be settled
    for what was known of them before, though the ledger has what they used."""
    customer = await ends_office.customer(*TREE)
    await begun(ends, customer)
    leaving = ends.gateways[0]
    async with all_back(ends):
        async with running(caller, leaving.url, customer, 600) as short:
            await asyncio.to_thread(ends.redis.kill)
            leaving.send(signal.SIGTERM)
            assert (await short.end()).output == 600
        assert await asyncio.to_thread(leaving.wait) == 0
        await asyncio.to_thread(ends.redis.start)
        await balanced(ends, ends_office, customer, LEASE_S)
    await used_up_to_the_token(ends, ends_office, caller, customer, AMOUNT)
