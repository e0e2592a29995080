"""Administrators are told once, over all processes, that a quota has reached one of its percentages in the ledger."""

from __future__ import annotations

import asyncio
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from identity_kit import SteppedClock
from limiter_kit import MODEL, NOW_S, ORGANIZATION, limit, top_up
from storage_kit import charge, ledger_row

from gateway.domain.ids import OrganizationId
from gateway.domain.ledger import LedgerRow
from gateway.domain.limits.plan import Metered, plan_of
from gateway.domain.limits.policy import Limit, QuotaRule, TopUp
from gateway.errors import StorageDown
from gateway.services import quota_alerts
from gateway.services.quota_alerts import QuotaAlerts
from gateway.storage.database import Database

DAY = "quota-tokens/day:key_1:2026-11-29:"
RULE = QuotaRule(unit="tokens", period="day", amount=1_000, alerts=(50, 80, 100))
END_MS = int(NOW_S * 1000) + 1_600_000


class Process:
    """One of those that answer requests."""

    def __init__(self, storage: Any, *limits: Limit, top_ups: tuple[TopUp, ...] = ()) -> None:
        self.clock = SteppedClock(NOW_S)
        self.quotas: dict[str, tuple[OrganizationId, Metered]] = {}
        self.alerts = QuotaAlerts(storage, self.clock, self.quotas.get)
        self.hold(*limits, top_ups=top_ups)

    def hold(self, *limits: Limit, top_ups: tuple[TopUp, ...] = ()) -> None:
        """Requests are held to these from now on."""
        now_ms = int(self.clock.time() * 1000)
        plan = plan_of(limits, top_ups, (), zone=ZoneInfo("UTC"), model=MODEL, now_ms=now_ms)
        self.quotas.update((each.use.meter.key, (ORGANIZATION, each)) for each in plan.metered)

    async def look(self, *rows: LedgerRow) -> int:
        """After it has posted these, or somebody else has."""
        self.alerts.posted(rows)
        return await self.alerts.look()


async def used(storage: Database, num_tokens: int, key: str = DAY, **fields: Any) -> LedgerRow:
    async with storage.writing() as work:
        number = (await work.ledger.totals()).num_requests + 1
        charges = (charge(key, num_tokens, **{"ends_at_ms": END_MS} | fields),)
        row = ledger_row(number, organization_id=ORGANIZATION, charges=charges)
        await work.ledger.post([row])
    return row


async def told(storage: Database) -> list[tuple[str, int]]:
    async with storage.reading() as work:
        return sorted((key, percent) for key, percent, _ in await work.limits.alerts(ORGANIZATION, limit=99))


async def test_each_percentage_is_told_once_by_whoever_sees_it_first(
    storage: Database, caplog: pytest.LogCaptureFixture
) -> None:
    quota = limit(RULE)
    one, other = Process(storage, quota), Process(storage, quota)
    row = await used(storage, 499)
    assert [await one.look(row), await other.look(row)] == [0, 0]
    row = await used(storage, 310)
    assert sum(await asyncio.gather(one.look(row), other.look(row))) == 2
    assert [await one.look(row), await other.look(row), await Process(storage, quota).look(row)] == [0, 0, 0]
    row = await used(storage, 500)
    assert [await other.look(row), await one.look(row)] == [1, 0]

    assert await told(storage) == [(DAY, 50), (DAY, 80), (DAY, 100)]
    assert [record.getMessage() for record in caplog.records] == [
        "quota quota-tokens/day of key key_1 has reached 50 %: 809 of 1000",
        "quota quota-tokens/day of key key_1 has reached 80 %: 809 of 1000",
        "quota quota-tokens/day of key key_1 has reached 100 %: 1309 of 1000",
    ]


async def test_percents_are_of_the_amount_with_its_top_ups(storage: Database) -> None:
    quota = limit(RULE)
    process = Process(storage, quota, top_ups=(top_up(1_000, of=quota, period_id="2026-11-29"),))
    row = await used(storage, 900)

    assert await process.look(row) == 0
    process.hold(quota, top_ups=(top_up(800, of=quota, period_id="2026-11-29"),))
    assert await process.look(row) == 1
    assert await told(storage) == [(DAY, 50)]


async def test_a_new_period_is_told_of_anew_and_what_is_only_counted_as_well(storage: Database) -> None:
    shadow = limit(QuotaRule(unit="tokens", period="day", amount=10, alerts=(100, 300)), is_shadow=True)
    nothing = limit(QuotaRule(unit="tokens", period="week", amount=0, alerts=(1,)))
    process = Process(storage, shadow, nothing)
    assert await process.look(await used(storage, 20)) == 1
    assert await process.look(await used(storage, 1, "quota-tokens/week:key_1:2026-W48:")) == 1
    process.clock.now += 86_400
    process.hold(shadow)
    row = await used(storage, 30, DAY.replace("29", "30"), ends_at_ms=END_MS + 86_400_000)

    assert await process.look(row) == 2


async def test_what_was_told_is_not_written_again_and_what_was_not_charged_not_read(storage: Database) -> None:
    process = Process(storage, limit(RULE))
    row = await used(storage, 1_000)
    assert await process.look(row) == 3
    num_asked = 0
    reading = storage.reading

    def counted() -> Any:
        nonlocal num_asked
        num_asked += 1
        return reading()

    storage.writing = counted  # type: ignore[method-assign]
    for _ in range(3):
        assert await process.look(row) == 0
    assert num_asked == 0
    storage.reading = counted  # type: ignore[method-assign]
    assert await process.look() == 0
    assert num_asked == 0


async def test_it_goes_on_by_itself_through_outages_and_bugs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quota_alerts, "EVERY_S", 0.001)
    failures: list[Exception] = [StorageDown(), ZeroDivisionError("a bug")]
    has_seen = asyncio.Event()

    class Failing:
        def reading(self) -> Any:
            if not failures:
                has_seen.set()
                raise StorageDown
            raise failures.pop()

    process = Process(Failing(), limit(RULE))
    process.alerts.posted([ledger_row(1, charges=(charge(DAY, 1, ends_at_ms=END_MS),))])
    async with process.alerts.running(), asyncio.timeout(5):
        await has_seen.wait()

    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
