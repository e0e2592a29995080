"""What is committed of quotas is known a moment after a process begins, and after whatever kept it from that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from identity_kit import SteppedClock
from limit_keeping_kit import Gateway, Ledger, row_of
from limiter_kit import HARD, MODEL, ORGANIZATION, RUNNING, SOFT, limit, limited

from gateway.domain.ids import OrganizationId
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable, QuotaExceeded, StorageDown
from gateway.services import limit_keeping
from gateway.services.catalog import FixedListing
from gateway.services.limit_reports import LimitReports

ONE = limited(HARD)
DAY = "quota-tokens/day:key_1:2026-11-29:"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_keeping, "RETRY_S", 0.001)
    monkeypatch.setattr("gateway.services.limiter.REVIVAL_S", 0.05)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """That has just begun, after others that have used 700 tokens of the quota."""
    ledger = Ledger()
    before = Gateway(ledger)
    await before.store.begin_epoch(ORGANIZATION, {}, ())
    await before.limiter.note_known(ORGANIZATION)
    for _ in range(7):
        await before.end(await before.admit(ONE, 10, 90), 90)
    before.post()
    async with (gateway := Gateway(ledger)).reviving():
        yield gateway


async def until_known(gateway: Gateway, organization_id: OrganizationId = ORGANIZATION) -> None:
    async with asyncio.timeout(5):
        while organization_id not in gateway.limiter._known_to_store:  # noqa: ASYNC110  (nobody tells of it)
            await asyncio.sleep(0.001)


async def test_the_first_request_already_finds_what_is_left(gateway: Gateway) -> None:
    grant = await gateway.admit(ONE)

    assert grant.remaining == (190,)
    with pytest.raises(QuotaExceeded):
        await gateway.admit(ONE, 200)


async def test_soft_quotas_are_not_forgotten_either(gateway: Gateway) -> None:
    """They are counted under the same name; nothing waits for that."""
    soft = limited(SOFT)
    first = await gateway.admit(soft, 250, 60)
    await until_known(gateway)
    second = await gateway.admit(soft)

    assert (first.request_class, first.remaining) == ("interactive", (690,))
    assert (second.request_class, second.remaining) == ("batch", (1_000 - 700 - 310 - 110,))


async def test_without_quotas_nothing_has_to_be_found_out(gateway: Gateway) -> None:
    await gateway.admit(limited(RUNNING))

    assert (gateway.limiter.lost, gateway.limiter.unsure) == (set(), set())


async def test_what_is_left_is_told_by_what_is_committed(gateway: Gateway) -> None:
    reports = LimitReports(gateway.limiter, FixedListing())
    assert [each.remaining for each in await reports.of(limited(RUNNING))] == [2]
    assert [each.remaining for each in await reports.of(limited(SOFT, RUNNING))] == [300, 2]
    gateway.ledger.failure = StorageDown()
    gateway.store._books.clear()
    gateway.limiter.note_store_lost()
    with pytest.raises(LimitsUnavailable):
        await reports.of(ONE)


async def test_dead_processes_of_this_host_come_first(gateway: Gateway) -> None:
    is_recovered = False
    gateway.keeping.is_recovered = lambda: is_recovered
    for _ in range(3):
        with pytest.raises(LimitsUnavailable):
            await gateway.admit(ONE)
    dead = await Gateway(gateway.ledger).admit(limited())
    plan = gateway.limiter.plan(ONE, MODEL, ())
    dead.plan = plan
    gateway.ledger.post(row_of(dead, TokenUsage(10, 40)))
    is_recovered = True
    await until_known(gateway)

    assert (await gateway.admit(ONE)).remaining == (140,)


async def test_what_another_process_made_known_can_be_told_though_one_has_just_died(gateway: Gateway) -> None:
    gateway.keeping.is_recovered = lambda: False
    await gateway.store.begin_epoch(ORGANIZATION, {DAY: 700}, ())
    reports = LimitReports(gateway.limiter, FixedListing())

    assert [each.remaining for each in await reports.of(ONE)] == [300]


@pytest.mark.parametrize("failure", [StorageDown(), TimeoutError(), ZeroDivisionError("a bug")])
async def test_whatever_keeps_it_from_being_known_is_tried_again(
    gateway: Gateway, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.ledger.failure = failure
    with pytest.raises(LimitsUnavailable):
        await gateway.admit(ONE)
    assert (await gateway.admit(limited(SOFT))).request_class == "interactive", "refuses nothing"
    gateway.ledger.failure = None
    await until_known(gateway)

    assert (await gateway.admit(ONE)).remaining == (80,)
    assert ("a bug" in caplog.text) == isinstance(failure, ZeroDivisionError)


async def test_one_that_cannot_be_known_keeps_no_other_from_it(gateway: Gateway) -> None:
    bad = limited(HARD, organization_id="org_bad")
    gateway.ledger.unreadable = {bad.organization_id}
    with pytest.raises(LimitsUnavailable):
        await gateway.admit(bad)

    assert (await gateway.admit(ONE)).remaining == (190,)
    assert gateway.limiter.lost == {bad.organization_id}


async def test_a_database_that_hangs_is_asked_again(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_keeping, "STORAGE_S", 0.05)
    gateway.ledger.has_read = asyncio.Event().wait
    with pytest.raises(LimitsUnavailable):
        await gateway.admit(ONE)
    gateway.ledger.has_read = None
    await until_known(gateway)

    assert (await gateway.admit(ONE)).remaining == (190,)


async def test_what_ends_meanwhile_is_settled_as_soon_as_it_is_known(gateway: Gateway) -> None:
    soft = limited(SOFT)
    gateway.ledger.failure = StorageDown()
    grant = await gateway.admit(soft)
    gateway.limiter.note_lost(ORGANIZATION)
    await gateway.end(grant, 50)
    assert gateway.limiter.late != {}
    gateway.ledger.failure = None
    async with asyncio.timeout(5):
        while gateway.limiter.late:  # noqa: ASYNC110  (nobody tells of it)
            await asyncio.sleep(0.001)

    assert await gateway.left(soft) == [1_000 - 700 - 60]


async def test_amounts_of_periods_that_are_over_for_long_are_left_out(gateway: Gateway) -> None:
    gateway.clock.now += 86_400 + 1_600
    await gateway.admit(ONE)
    assert await gateway.left(limited(HARD)) == [890]
    yesterday = gateway.store._books[ORGANIZATION].meters.quotas[DAY]
    assert yesterday.committed == 700, "somebody may still run"
    later = Gateway(gateway.ledger, clock=SteppedClock(gateway.clock.now + 1))
    async with later.reviving():
        await later.admit(ONE)
    assert DAY not in later.store._books[ORGANIZATION].meters.quotas


async def test_many_quotas_are_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_keeping, "CHUNK", 2)
    ledger = Ledger()
    before = Gateway(ledger)
    keys = [limited(limit(HARD, scope_id=f"key_{n}"), key_id=f"key_{n}") for n in range(5)]
    await before.store.begin_epoch(ORGANIZATION, {}, ())
    await before.limiter.note_known(ORGANIZATION)
    for num, principal in enumerate(keys):
        await before.end(await before.admit(principal), num + 1)
    before.post()
    gateway = Gateway(ledger)
    async with gateway.reviving():
        await gateway.limiter.until_known(ORGANIZATION)

    assert [await gateway.left(principal) for principal in keys] == [[989 - num] for num in range(5)]
