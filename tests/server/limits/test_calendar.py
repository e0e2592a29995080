"""Quotas go by the calendar of the organization's own time zone, and each request counts for the day it began on."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pytest
from cluster import SharedCluster, running_cluster
from limit_kit import Customer, Held, LimitOffice, begun, eventually, known, limit_office, standings
from limit_load import Answer, Caller
from moved_clock import MovedClock

from gateway.domain.limits.policy import QuotaPeriod, QuotaRule

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "support" / "clocked_gateway_program.py"
AMOUNT = 500


@pytest.fixture(scope="module")
def clock_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clock") / "offset"


@pytest.fixture(scope="module")
def clock(clock_path: Path) -> MovedClock:
    return MovedClock(clock_path)


@pytest.fixture(scope="module")
def clocked(
    tmp_path_factory: pytest.TempPathFactory,
    smollm2_path: Path,
    free_port: Callable[[], int],
    clock: MovedClock,  # so that its file is there
    clock_path: Path,
) -> Iterator[SharedCluster]:
    """Two gateways that go by the moved clock; Redis and PostgreSQL go by the machine's, as ever."""
    folder, models = tmp_path_factory.mktemp("clocked"), smollm2_path.parents[1]
    command = (sys.executable, str(PROGRAM), str(clock_path))
    settings = {"EVENHAND_LIMITS__LEASE_S": "5"}
    with running_cluster(folder, models, free_port, settings=settings, gateway=command) as cluster:
        yield cluster


@pytest.fixture
async def office(clocked: SharedCluster, clock: MovedClock) -> AsyncIterator[LimitOffice]:
    async with limit_office(clocked, clock) as office:
        yield office


class Edge(NamedTuple):
    """The end of a period in a place, and that of the next one, whose length in hours this is.

    Attributes:
        ends, next_ends: local times of the first moments that belong to the following one.
        ids: of both periods.
    """

    zone: str
    period: QuotaPeriod
    ends: str
    next_ends: str
    hours: float
    ids: tuple[str, str]

    @property
    def ends_s(self) -> float:
        return at(self.ends, self.zone)

    @property
    def next_ends_s(self) -> float:
        return at(self.next_ends, self.zone)


def at(local: str, zone: str) -> float:
    """Seconds since the epoch of a local time."""
    return datetime.fromisoformat(local).replace(tzinfo=ZoneInfo(zone)).timestamp()


EDGES = {
    "a day in India": Edge("Asia/Kolkata", "day", "2027-01-15", "2027-01-16", 24, ("2027-01-14", "2027-01-15")),
    "the day that is an hour short in Berlin": Edge(
        "Europe/Berlin", "day", "2027-03-28", "2027-03-29", 23, ("2027-03-27", "2027-03-28")
    ),
    "the day that is half an hour longer on Lord Howe Island": Edge(
        "Australia/Lord_Howe", "day", "2027-04-04", "2027-04-05", 24.5, ("2027-04-03", "2027-04-04")
    ),
    "the day that begins at one in Santiago": Edge(
        "America/Santiago", "day", "2027-09-05T01:00", "2027-09-06", 23, ("2027-09-04", "2027-09-05")
    ),
    "the week that is an hour longer in Berlin": Edge(
        "Europe/Berlin", "week", "2027-10-25", "2027-11-01", 169, ("2027-W42", "2027-W43")
    ),
    "the day that is an hour longer in New York": Edge(
        "America/New_York", "day", "2027-11-07", "2027-11-08", 25, ("2027-11-06", "2027-11-07")
    ),
    "a month that is over in Auckland first": Edge(
        "Pacific/Auckland", "month", "2028-03-01", "2028-04-01", 744, ("2028-02", "2028-03")
    ),
}


@pytest.mark.parametrize("name", EDGES)
async def test_what_is_used_up_before_midnight_is_there_again_at_midnight(
    clocked: SharedCluster, clock: MovedClock, office: LimitOffice, caller: Caller, name: str
) -> None:
    """A stream begins, the rest is used up, and nothing is to be had until a second before the end, at either gateway.
    At the end all of it is there again, less nothing: the stream, which runs on, counts for the period it began in.

    What breaks it: days in UTC; days of 24 hours; a period that is that of the settlement; a plan, or a refusal, that
    is remembered beyond the end."""
    edge = EDGES[name]
    assert edge.next_ends_s - edge.ends_s == edge.hours * 3600
    clock.move_to(edge.ends_s - 60)
    quota = Held("organization", QuotaRule(unit="tokens", period=edge.period, amount=AMOUNT))
    customer = await office.customer(quota, time_zone=edge.zone)
    await begun(clocked, customer)
    async with caller.running(clocked.gateways[0].url, customer.key, prompt=20, output=380) as over:
        # What the stream has reserved, and two requests of 50 that run before the end.
        used = await each_asks(clocked, caller, customer, prompt=20, output=30)
        assert [answer.status for answer in used] == [200, 200]
        clock.move_to(edge.ends_s - 1)
        refused = await each_asks(clocked, caller, customer, prompt=20, output=1)
        clock.move_to(edge.ends_s)
        new = await each_asks(clocked, caller, customer, prompt=20, output=230)
        left = [(await standings(each.url, customer.key)) for each in clocked.gateways]
        refused_again = await each_asks(clocked, caller, customer, prompt=20, output=1)
        await over.end()

    for answer in refused:
        assert (answer.status, answer.code) == (429, "insufficient_quota")
        assert 0 < int(answer.headers["retry-after-ms"]) <= 1000, "until it ends"
    assert [(answer.status, answer.output, answer.is_clamped) for answer in new] == [(200, 230, False)] * 2
    for look in left:
        found = look.find(quota.rule.name, "organization")
        assert (found["remaining"], found["period"]) == (0, edge.ids[1])
        assert found["period_ends_at"] == datetime.fromtimestamp(edge.next_ends_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert {answer.code for answer in refused_again} == {"insufficient_quota"}
    for answer in refused_again:
        assert int(answer.headers["retry-after-ms"]) == pytest.approx(edge.hours * 3_600_000, abs=20_000)
    rows = await office.settled(customer, 5)
    of_period = dict.fromkeys(edge.ids, 0)
    for row in rows:
        [charge] = row.charges
        [period_id] = [each for each in edge.ids if f":{each}:" in charge.key]
        of_period[period_id] += charge.units
        assert charge.ends_at_ms == 1000 * (edge.ends_s if period_id == edge.ids[0] else edge.next_ends_s)
        assert (row.opened_at_ms < 1000 * edge.ends_s) == (period_id == edge.ids[0])
    [over_row] = [row for row in rows if row.request_id == over.answer.request_id]
    assert over_row.closed_at_ms >= 1000 * edge.ends_s, "it was meant to end in the next period"
    assert of_period == {edge.ids[0]: AMOUNT, edge.ids[1]: AMOUNT}
    assert sorted((await office.committed(customer)).values()) == [AMOUNT, AMOUNT]


async def each_asks(
    cluster: SharedCluster, caller: Caller, customer: Customer, *, prompt: int, output: int
) -> list[Answer]:
    """At one gateway after the other."""
    return [
        await caller.ask(each.url, customer.key, prompt=prompt, output=output, stream=True) for each in cluster.gateways
    ]


async def test_what_is_given_back_after_midnight_is_given_back_to_its_day(
    clocked: SharedCluster, clock: MovedClock, office: LimitOffice, caller: Caller
) -> None:
    """Two streams have reserved a day to its end. After midnight one leaves, and the other goes on with what that one
    has not used, until its own day is used up; the new day, of which all is left, gives it nothing."""
    zone, amount = "Asia/Kolkata", 2_000
    midnight_s = at("2027-05-01", zone)
    quota = Held("team", QuotaRule(unit="tokens", period="day", amount=amount))
    clock.move_to(midnight_s - 60)
    customer = await office.customer(quota, time_zone=zone)
    await begun(clocked, customer)
    urls = [gateway.url for gateway in clocked.gateways]
    async with (
        caller.running(urls[0], customer.key, prompt=20, output=980) as leaves,
        caller.running(urls[1], customer.key, prompt=20, output=4_000) as stays,
    ):
        clock.move_to(midnight_s + 1)
        await leaves.leave()
        answer = await stays.end()
        left = [(await standings(url, customer.key)).left(quota.rule.name, "team") for url in urls]

    rows = {row.request_id: row for row in await office.settled(customer, 2)}
    left_row = rows[leaves.answer.request_id]
    assert left == [amount, amount]
    assert answer.causes == {0: "quota_exceeded"}
    assert answer.total == amount - left_row.prompt_tokens - left_row.completion_tokens > amount // 2
    assert {charge.ends_at_ms for row in rows.values() for charge in row.charges} == {1000 * midnight_s}
    assert list((await office.committed(customer)).values()) == [amount]


async def test_a_top_up_is_for_one_day_only(
    clocked: SharedCluster, clock: MovedClock, office: LimitOffice, caller: Caller
) -> None:
    zone = "America/Los_Angeles"
    midnight_s = at("2027-06-01", zone)
    quota = Held("key", QuotaRule(unit="tokens", period="day", amount=100))
    clock.move_to(midnight_s - 3600)
    customer = await office.customer(quota, time_zone=zone)
    await begun(clocked, customer)
    url = clocked.gateways[0].url
    assert (await caller.ask(url, customer.key, prompt=20, output=80)).is_taken
    assert (await caller.ask(url, customer.key, prompt=20, output=80)).code == "insufficient_quota"
    await office.top_up(customer, quota, 100)
    await known(clocked, customer, lambda look: look.left(quota.rule.name) == 100, "the top-up")

    answers = [await caller.ask(url, customer.key, prompt=20, output=80) for _ in range(2)]
    clock.move_to(midnight_s)
    answers += [await caller.ask(url, customer.key, prompt=20, output=80) for _ in range(2)]

    assert [answer.status for answer in answers] == [200, 429, 200, 429]
    assert (await standings(url, customer.key)).find(quota.rule.name)["amount"] == 100


async def test_a_request_costs_what_it_cost_when_it_began(
    clocked: SharedCluster, clock: MovedClock, office: LimitOffice, caller: Caller
) -> None:
    """From noon on a token costs twice as much. What began before is charged, and cut, by the old price, though it ends
    after; the quota of money is used up exactly by both."""
    noon_s = at("2027-07-01T12:00", "UTC")
    clock.move_to(noon_s - 3600)
    await office.price(prompt=1_000_000, cached=1_000_000, completion=1_000_000)
    clock.move_to(noon_s - 30)
    quota = Held("team", QuotaRule(unit="microusd", period="day", amount=1_000))
    customer, somebody = await office.customer(quota), await office.customer()
    await begun(clocked, customer)
    url, other = (gateway.url for gateway in clocked.gateways)
    async with caller.running(url, customer.key, prompt=20, output=580) as before:
        clock.move_to(noon_s)
        await office.price(prompt=2_000_000, cached=2_000_000, completion=2_000_000)
        clock.move_to(noon_s + 1)

        async def costs_more() -> bool:
            await caller.ask(other, somebody.key, prompt=20, output=1)
            return 42 in {row.cost_microusd for row in await office.rows(somebody)}

        await eventually(costs_more, "the new price holds")
        left = (await standings(other, customer.key)).left(quota.rule.name, "team")
        after = await caller.ask(other, customer.key, prompt=20, output=1_000)
        await before.end()

    rows = {row.request_id: row for row in await office.settled(customer, 2)}
    assert (before.answer.total, rows[before.answer.request_id].cost_microusd) == (600, 600)
    assert rows[after.request_id].cost_microusd == 2 * after.total == left
    assert after.is_clamped
    assert sum(row.cost_microusd for row in rows.values()) == 1_000
