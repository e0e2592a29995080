"""A hundred thousand keys and a million ledger rows cost a request, a page of keys and a usage report what a thousand
and ten thousand do. The long profile has ten million rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from databases import PostgresServer, RedisServer
from hypothesis import settings
from many_keys import MODEL, NOW_MS, Filling, drawn, fill, organization_id, public_id, team_id

from gateway.domain.ids import OrganizationId, RequestId, TeamId
from gateway.domain.record import RequestInfo
from gateway.domain.usage import TokenUsage
from gateway.limits.memory import MemoryLimits
from gateway.limits.redis_store import RedisLimits
from gateway.services.authenticate import principal_of
from gateway.services.directory import Directory
from gateway.services.limit_store import LimitStore
from gateway.services.limiter import Limiter
from gateway.services.usage import UsageReports
from gateway.storage.database import Database
from gateway.storage.schema import migrate

FEW = Filling(num_keys=1_000, num_rows=10_000)
IS_LONG = settings.default.max_examples >= 1_000
MANY = Filling(num_keys=100_000, num_rows=10_000_000 if IS_LONG else 1_000_000)
MOST_TIMES = 2.0
REPEATS = 200

Work = Callable[[int, Filling], Awaitable[None]]
"""The n-th time that something is done in a database with so much in it."""


class FixedClock:
    def time(self) -> float:
        return NOW_MS / 1000

    def monotonic(self) -> float:
        return time.monotonic()


class Prompt:
    """A request that has been prepared; the part of it that limits ask for."""

    model = MODEL
    num_prompt_tokens = 100
    num_parts = 1
    prompt_lengths = (100,)
    output_caps = (20,)


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    if request.param == "sqlite":
        return lambda name: f"sqlite:///{tmp_path / name}.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return lambda _name: server.new_database()


@asynccontextmanager
async def filled(url: str, filling: Filling) -> AsyncIterator[Database]:
    database = Database.open(url, Path("unused"))
    try:
        await migrate(database)
        await fill(url, filling)
        yield database
    finally:
        await database.close()


async def both(one: Work, other: Work) -> float:
    """How many times as long the second takes, by the medians of runs in alternation."""
    times: tuple[list[int], list[int]] = ([], [])
    for n in range(REPEATS):
        for i, (run, filling) in enumerate(((one, FEW), (other, MANY))):
            began = time.perf_counter_ns()
            await run(n, filling)
            times[i].append(time.perf_counter_ns() - began)
    return statistics.median(times[1]) / statistics.median(times[0])


class Hub:
    """What a gateway asks of a database and of where limits are kept."""

    def __init__(self, database: Database, store: LimitStore) -> None:
        clock = FixedClock()
        self.database = database
        self.directory = Directory(database, None, clock)
        self.usage = UsageReports(database, clock)
        self.limiter = Limiter(store, clock)
        self.num_requests = 0

    async def page_of_keys(self, n: int, filling: Filling) -> None:
        async with self.database.reading() as work:
            of_team = TeamId(team_id(drawn(n, filling.num_teams)))
            assert len(await work.keys.page(after="", limit=50, team_id=of_team)) == 10
            assert len(await work.keys.page(after="", limit=50)) == 50

    async def report(self, n: int, filling: Filling) -> None:
        of_team = TeamId(team_id(drawn(n, filling.num_teams)))
        report = await self.usage.of_team(of_team)
        assert report.totals.num_requests == 10 * filling.num_rows // filling.num_keys

    async def admit(self, n: int, filling: Filling) -> None:
        """A request with a key that this process has not seen yet, from its look-up to its settlement."""
        holder = await self.directory.find(public_id(drawn(n, filling.num_keys)))
        assert holder is not None
        self.num_requests += 1
        request_id = RequestId(f"req_{filling.num_keys}_{self.num_requests}")
        info = RequestInfo(
            request_id=request_id,
            principal=principal_of(holder),
            request_class="interactive",
            endpoint="chat",
            stream=False,
        )
        grant = await self.limiter.admit(info, Prompt(), (), num_choices=1)  # type: ignore[arg-type]  # a part of one
        assert len(grant.plan.uses) == 2
        await self.limiter.settle(grant, TokenUsage(100, 20))

    async def begin(self, filling: Filling) -> None:
        """Let the store know all organizations."""
        for n in range(filling.num_organizations):
            await self.limiter.store.begin_epoch(OrganizationId(organization_id(n)), {}, ())


@pytest.mark.timeout(1800 if IS_LONG else 300)
async def test_a_hundred_thousand_keys_cost_what_a_thousand_do(
    new_url: Callable[[str], str], redis_server: RedisServer
) -> None:
    async with filled(new_url("few"), FEW) as few, filled(new_url("many"), MANY) as many:
        stores: list[tuple[str, LimitStore]] = [
            ("memory", MemoryLimits(lambda: NOW_MS)),
            ("redis", RedisLimits(redis_server.url, answer_s=5.0)),
        ]
        ratios: dict[str, float] = {}
        for name, store in stores:
            small, large = Hub(few, store), Hub(many, store)
            await large.begin(MANY)
            ratios[f"admission, {name}"] = await both(small.admit, large.admit)
            if name == "memory":
                ratios["page of keys"] = await both(small.page_of_keys, large.page_of_keys)
                ratios["usage"] = await both(small.report, large.report)
            await store.close()
    assert all(ratio <= MOST_TIMES for ratio in ratios.values()), ratios
