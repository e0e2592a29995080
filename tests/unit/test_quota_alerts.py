"""Administrators are told what a quota has reached once that is in the ledger, whichever process has posted it."""

from __future__ import annotations

from pathlib import Path

import pytest
from keeping_kit import Process, SharedStore, customer
from metering_kit import Clock, MemoryStorage

from gateway.domain.limits.policy import QuotaRule
from gateway.errors import LimitExceeded, StorageDown
from gateway.services import limiter, quota_alerts

WHO = customer(QuotaRule(unit="tokens", period="day", amount=100, alerts=(50, 100)))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(clock: Clock) -> SharedStore:
    store = SharedStore(clock)
    await store.begin_epoch(WHO.organization_id, {}, ())
    return store


@pytest.fixture
def ledger() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def process(tmp_path: Path, store: SharedStore, ledger: MemoryStorage, clock: Clock) -> Process:
    return Process(tmp_path, store, ledger, clock, "0a")


def told(ledger: MemoryStorage) -> list[int]:
    return [percent for _, percent in ledger.alerts]


async def test_what_one_long_request_uses_up_is_told_when_it_is_posted(process: Process, ledger: MemoryStorage) -> None:
    running = await process.begin("r", WHO)
    assert await process.alerts.look() == 0
    await process.end(*running, completion_tokens=80)
    assert await process.alerts.look() == 0
    await process.poster.drain(1)
    assert await process.alerts.look() == 2
    assert told(ledger) == [50, 100]
    assert await process.alerts.look() == 0


async def test_what_could_not_be_looked_at_is_looked_at_later(process: Process, ledger: MemoryStorage) -> None:
    await process.answer("r", WHO)
    await process.poster.drain(1)
    ledger.is_down = True
    with pytest.raises(StorageDown):
        await process.alerts.look()
    ledger.is_down = False
    await process.alerts.look()
    assert told(ledger) == [50, 100]


async def test_rows_of_a_dead_process_are_told_of_once_the_quota_is_known_even_by_a_refusal(
    tmp_path: Path, process: Process, store: SharedStore, ledger: MemoryStorage, clock: Clock
) -> None:
    await process.answer("r", WHO)
    process.journal.close(remove=False)
    second = Process(tmp_path, store, ledger, clock, "0b")
    await second.recovery.look()
    assert await second.alerts.look() == 0
    with pytest.raises(LimitExceeded):
        await second.answer("refused", WHO)
    await second.alerts.look()
    assert told(ledger) == [50, 100]


async def test_what_is_posted_last_is_looked_at_on_leaving(process: Process, ledger: MemoryStorage) -> None:
    async with process.alerts.running():
        await process.answer("r", WHO)
        await process.poster.drain(1)
    assert told(ledger) == [50, 100]


async def test_quotas_that_nobody_knows_are_forgotten_with_their_period(
    tmp_path: Path, process: Process, store: SharedStore, ledger: MemoryStorage, clock: Clock
) -> None:
    await process.answer("r", WHO)
    process.journal.close(remove=False)
    second = Process(tmp_path, store, ledger, clock, "0b")
    await second.recovery.look()
    assert len(second.alerts._charged) == 1
    clock.now_s += 2 * 86_400
    await second.alerts.look()
    assert second.alerts._charged == {}


async def test_what_is_kept_is_bounded(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_alerts, "MOST_CHARGED", 2)
    monkeypatch.setattr(limiter, "MOST_QUOTAS", 2)
    days = [1, 2, 3]
    for day in days:
        who = customer(QuotaRule(unit="tokens", period="day", amount=1000, is_hard=False))
        await process.answer(f"r{day}", who)
        process.clock.now_s += 86_400
    await process.poster.drain(1)
    assert list(process.alerts._charged) == list(process.limiter.quotas)
    assert len(process.limiter.quotas) == 2
