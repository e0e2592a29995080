"""What a hard quota had reserved for a gateway that nobody hears of for a lease, and that comes back: it stands still,
as on a machine that is suspended, or it was killed and has a home of its own, so that only itself finds its journal."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from cluster import Gateway, SharedCluster, running_cluster
from limit_kit import Customer, Held, LimitOffice, begun, eventually, limit_office, standings
from limit_load import Answer, Caller, taken, what_happened

from gateway.domain.limits.policy import QuotaRule

pytestmark = pytest.mark.slow

QUOTA = Held("team", QuotaRule(unit="tokens", period="month", amount=3_000))
LEASE_S = 5
AWAY_S = 9.0


@pytest.fixture
def apart(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[SharedCluster]:
    """Gateways with a home each, as in containers."""
    folder, models = tmp_path_factory.mktemp("apart"), smollm2_path.parents[1]
    with running_cluster(folder, models, free_port, settings={"EVENHAND_LIMITS__LEASE_S": str(LEASE_S)}) as cluster:
        home = folder / "another home"
        home.mkdir()
        (home / "models").symlink_to(models)
        shutil.copy(cluster.home / "pepper.key", home)
        environment = cluster.environment | {"EVENHAND_HOME": str(home)}
        cluster.gateways[1].kill()
        cluster.gateways[1] = Gateway("another", free_port(), free_port(), environment, folder)
        cluster.gateways[1].start()
        cluster.gateways[1].wait_ready()
        yield cluster


@pytest.fixture
async def apart_office(apart: SharedCluster) -> AsyncIterator[LimitOffice]:
    async with limit_office(apart) as office:
        yield office


async def use_up(caller: Caller, gateway: Gateway, customer: Customer) -> list[Answer]:
    """Ask for more than there is, until well after the lease of another one's request has run out."""
    answers: list[Answer] = []
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < AWAY_S:
        asks = (caller.ask(gateway.url, customer.key, prompt=20, output=100) for _ in range(10))
        answers += await caller.ask_all(asks)
        await asyncio.sleep(0.1)
    assert len(taken(answers)) > 1, what_happened(answers)
    return answers


async def used(office: LimitOffice, gateway: Gateway, customer: Customer, num: int) -> tuple[int, int]:
    """By the ledger, when all these requests are in it: in all, and the most output of one. The meter has come to the
    same."""
    rows = await office.settled(customer, num)
    tokens = sum(row.prompt_tokens + row.completion_tokens for row in rows)

    async def is_told() -> bool:
        left = (await standings(gateway.url, customer.key)).left(QUOTA.rule.name, QUOTA.scope)
        return left == 3_000 - tokens

    await eventually(is_told, "what was used is known")
    return tokens, max(row.completion_tokens for row in rows)


async def test_a_hard_quota_holds_though_a_gateway_stands_still_for_more_than_a_lease(
    pair: SharedCluster, office: LimitOffice, caller: Caller
) -> None:
    frozen, other = pair.gateways
    customer = await office.customer(QUOTA)
    await begun(pair, customer)

    async with caller.running(frozen.url, customer.key, prompt=20, output=2_000, after=50) as running:
        frozen.send(signal.SIGSTOP)
        try:
            answers = await use_up(caller, other, customer)
        finally:
            frozen.send(signal.SIGCONT)
        assert (await running.end()).code in ("limits_unavailable", "engine_unavailable"), "its client is told"

    tokens, _ = await used(office, other, customer, len(taken(answers)) + 1)
    assert tokens <= 3_000


async def test_one_that_is_killed_is_charged_what_it_wrote_though_its_journal_is_found_after_its_lease(
    apart: SharedCluster, apart_office: LimitOffice, caller: Caller
) -> None:
    killed, other = apart.gateways
    customer = await apart_office.customer(QUOTA)
    await begun(apart, customer)

    answer = Answer(killed.url)
    stream = caller.ask(killed.url, customer.key, prompt=20, output=700, stream=True, answer=answer)
    reading = asyncio.create_task(stream)
    await answer.reached(450)
    killed.kill()
    with suppress(aiohttp.ClientError):
        await reading
    answers = await use_up(caller, other, customer)
    killed.start()
    await asyncio.to_thread(killed.wait_ready)

    _, most = await used(apart_office, other, customer, len(taken(answers)) + 1)
    assert most >= 450
