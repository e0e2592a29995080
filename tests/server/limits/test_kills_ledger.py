"""The ledger and the limits survive the end of a gateway at 200 requests a second, in order and by force."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from cluster import MODEL, Gateway, SharedCluster
from examples import examples
from kill_kit import LEASE_S, all_back, check_books, never_over, tree, what_became
from limit_books import balanced, store_books
from limit_kit import Customer, LimitOffice, begun, eventually
from limit_load import Caller
from open_load import LEAVES, STREAM, WHOLE, Load
from raw_client import is_ready

pytestmark = pytest.mark.slow

RATE_S = 200.0
LOAD_S = 6.0
POLL_S = 0.1
MOST_BURSTS = 5
BURST = 200
SLACK_S = 5.0
SIZES = (2, 8, 60)
"""Most tokens of answers."""
AMOUNT = 1_000_000
"""More than is asked for."""

logger = logging.getLogger(__name__)


class Balancer:
    """Picks among the gateways that said they are ready when they were last asked.

    Attributes:
        unready: those that have said once that they are not.
    """

    def __init__(self, cluster: SharedCluster) -> None:
        self._gateways = cluster.gateways
        self._ready = list(cluster.gateways)
        self._rng = random.Random(1)
        self.unready: set[Gateway] = set()

    def pick(self) -> str:
        return self._rng.choice(self._ready).url

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            task.cancel()

    async def _poll(self) -> None:
        while True:
            answers = [await is_ready(gateway.url) for gateway in self._gateways]
            self._ready = [gateway for gateway, is_so in zip(self._gateways, answers, strict=True) if is_so]
            self.unready.update(set(self._gateways) - set(self._ready))
            await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("repeat", range(examples(1)))
async def test_a_gateway_that_leaves_finishes_what_it_has(
    ends: SharedCluster, ends_office: LimitOffice, repeat: int
) -> None:
    """Nobody behind a balancer notices: no answer is cut, none is refused for anything but a limit.

    What breaks it: rows or settlements that wait in the process when it goes, a drain that closes the limits' store
    before the last answer is settled, or a readiness that turns after the listening has ended."""
    leaving = ends.gateways[repeat % 2]
    customer = await ends_office.customer(*tree(AMOUNT))
    await begun(ends, customer)
    balancer = Balancer(ends)
    load = Load(
        customer.key, MODEL, balancer.pick, rate_s=RATE_S, max_tokens=SIZES, kinds=(WHOLE, STREAM, LEAVES), seed=repeat
    )
    async with never_over(ends, customer, AMOUNT), all_back(ends), balancer.polling():
        running = asyncio.create_task(load.run(LOAD_S))
        async with asyncio.timeout(LOAD_S):
            await load.reached(int(RATE_S * 1.5), num_running=5, gateway=leaving.url)
        leaving.send(signal.SIGTERM)
        code = await asyncio.to_thread(leaving.wait)
        leaving.start()
        await running
        await asyncio.to_thread(leaving.wait_ready)
    logger.info("%s", what_became(load.attempts))

    assert code == 0
    assert balancer.unready == {leaving}
    assert {each.status for each in load.attempts} == {200}, what_became(load.attempts)
    assert all(each.is_whole for each in load.attempts), what_became(load.attempts)
    await balanced(ends, ends_office, customer)
    rows = await check_books(ends, ends_office, customer, load.attempts)
    assert {row.outcome for row in rows.values()} <= {"finished", "client_gone"}


@pytest.mark.parametrize("repeat", range(examples(1)))
async def test_a_gateway_that_is_killed_leaves_nothing_out(
    ends: SharedCluster, ends_office: LimitOffice, repeat: int
) -> None:
    """What breaks it: rows that are only in memory, requests that nobody finds, or finds twice; reservations of the
    dead that stay, or that are given back before it is known what they have used."""
    killed = ends.gateways[repeat % 2]
    customer = await ends_office.customer(*tree(AMOUNT))
    await begun(ends, customer)
    rng = random.Random(repeat)
    load = Load(
        customer.key, MODEL, lambda: rng.choice(ends.gateways).url, rate_s=RATE_S, max_tokens=SIZES, seed=repeat
    )
    async with never_over(ends, customer, AMOUNT), all_back(ends):
        running = asyncio.create_task(load.run(LOAD_S))
        async with asyncio.timeout(LOAD_S):
            await load.reached(int(RATE_S * rng.uniform(1.0, 2.0)), num_running=5, gateway=killed.url)
        await asyncio.to_thread(killed.kill)
        killed.start()
        await running
        await asyncio.to_thread(killed.wait_ready)
        await balanced(ends, ends_office, customer)
    logger.info("%s", what_became(load.attempts))

    assert any(each.was_cut for each in load.attempts)
    rows = await check_books(ends, ends_office, customer, load.attempts)
    assert any(row.outcome == "lost" for row in rows.values())


async def test_what_was_admitted_and_never_begun_costs_nothing(
    ends: SharedCluster, ends_office: LimitOffice, caller: Caller
) -> None:
    """A gateway is killed in a burst: of some requests Redis has a reservation, and the gateway never knew it. Nobody
    was answered, and the ledger has none of them. A burst in which all had begun shows nothing, so there are several.

    What breaks it: reservations that are charged for their prompts when their leases run out."""
    for _ in range(MOST_BURSTS):
        customer = await ends_office.customer(*tree(AMOUNT))
        await begun(ends, customer)
        admitted = await kill_in_a_burst(ends, ends_office, customer, caller)
        rows = {row.request_id for row in await ends_office.rows(customer)}
        assert rows <= admitted
        if rows < admitted:
            return
    pytest.fail(f"all that was admitted had begun, in each of {MOST_BURSTS} bursts")


async def kill_in_a_burst(
    ends: SharedCluster, ends_office: LimitOffice, customer: Customer, caller: Caller
) -> set[str]:
    """What was admitted of it. Afterwards all is back, and the books balance."""
    killed = ends.gateways[0]

    async def ask() -> None:
        with suppress(aiohttp.ClientError):
            await caller.ask(killed.url, customer.key, prompt=50, output=500)

    async with all_back(ends):
        asking = [asyncio.create_task(ask()) for _ in range(BURST)]

        async def has_some() -> bool:
            return bool(store_books(ends, customer).requests)

        await eventually(has_some, "some are admitted")
        killed.kill()
        admitted = set(store_books(ends, customer).requests)
        await asyncio.gather(*asking)
        await balanced(ends, ends_office, customer, LEASE_S + SLACK_S)
    return admitted
