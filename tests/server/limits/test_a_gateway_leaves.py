"""Limits and ledger when a gateway leaves in order at 200 requests a second: nobody notices, nothing is missing."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cluster import MODEL, Gateway, SharedCluster
from examples import examples
from kill_kit import all_back, check_books, never_over, tree, what_happened
from limit_books import balanced
from limit_kit import LimitOffice, begun
from open_load import LEAVES, STREAM, WHOLE, Load
from raw_client import is_ready

pytestmark = pytest.mark.slow

RATE_S = 200.0
LOAD_S = 8.0
POLL_S = 0.1
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
    logger.info("%s", what_happened(load.attempts))

    assert code == 0
    assert balancer.unready == {leaving}
    assert {each.status for each in load.attempts} == {200}, what_happened(load.attempts)
    assert all(each.is_whole for each in load.attempts), what_happened(load.attempts)
    await balanced(ends, ends_office, customer)
    rows = await check_books(ends, ends_office, customer, load.attempts)
    assert {row.outcome for row in rows.values()} <= {"finished", "client_gone"}
