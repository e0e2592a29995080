"""Requests that are in the ledger and that the store of limits has not taken stay in a journal until it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from keeping_kit import PROMPT_TOKENS, Process, SharedStore, customer
from metering_kit import Clock, Crash, MemoryStorage

from gateway.domain.limits.policy import QuotaRule
from gateway.journal.folder import JournalFolder
from gateway.journal.tail import JournalTail

AMOUNT, OUTPUT = 1000, 80
USED = PROMPT_TOKENS + OUTPUT
CUSTOMER = customer(QuotaRule(unit="tokens", period="day", amount=AMOUNT))
Start = Callable[[str], Process]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
async def store(clock: Clock) -> SharedStore:
    store = SharedStore(clock)
    await store.begin_epoch(CUSTOMER.organization_id, {}, ())
    return store


@pytest.fixture
def start(tmp_path: Path, store: SharedStore, ledger: MemoryStorage, clock: Clock) -> Start:
    return lambda name: Process(tmp_path, store, ledger, clock, name)


async def test_what_the_store_did_not_take_before_the_end_is_told_by_the_next_process(
    start: Start, store: SharedStore, clock: Clock, tmp_path: Path
) -> None:
    first = start("0a")
    store.away.add(CUSTOMER.organization_id)
    grant = await first.answer("r", CUSTOMER)
    await first.leave()
    store.away.clear()
    clock.now_s += 16
    await store.reap(CUSTOMER.organization_id, 10)  # its lease has run out, and nothing was reported
    second = start("0b")
    assert await second.recovery.look() == 1
    assert second.recovery.is_idle, "everything is in the ledger, so organizations can be made known again"
    await second.keeping.report()
    assert await second.recovery.look() == 0
    assert await second.left(grant) == AMOUNT - USED
    assert JournalFolder(tmp_path).writers() == ["0b"]


async def test_a_journal_goes_once_the_store_has_taken_everything(
    start: Start, store: SharedStore, tmp_path: Path
) -> None:
    process = start("0a")
    store.away.add(CUSTOMER.organization_id)
    await process.answer("r", CUSTOMER)
    store.away.clear()
    await process.limiter.settle_late(CUSTOMER.organization_id)
    await process.leave()
    assert list(JournalFolder(tmp_path).path.iterdir()) == []


async def test_a_file_stays_as_long_as_a_row_in_it_was_not_told(
    start: Start, store: SharedStore, tmp_path: Path
) -> None:
    process = start("0a")
    store.away.add(CUSTOMER.organization_id)
    await process.answer("r", CUSTOMER)
    process.journal.seal()
    assert await process.poster.drain(1) is False
    folder = JournalFolder(tmp_path)
    assert [each.number for each in folder.segments("0a")] == [1, 2]
    store.away.clear()
    await process.limiter.settle_late(CUSTOMER.organization_id)
    assert await process.poster.drain(1)
    assert [each.number for each in folder.segments("0a")] == [2]


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_process_killed_behind_the_posting_has_its_requests_told_by_the_next(
    start: Start, store: SharedStore, ledger: MemoryStorage, clock: Clock, is_told: bool
) -> None:
    first = start("0a")
    store.away.update([] if is_told else [CUSTOMER.organization_id])
    grant = await first.answer("r", CUSTOMER)
    first.journal.seal()
    ledger.crash_after = 1
    with pytest.raises(Crash):
        await first.poster.drain(1)
    first.journal.close(remove=False)
    store.away.clear()
    clock.now_s += 16
    await store.reap(CUSTOMER.organization_id, 10)
    second = start("0b")
    await second.recovery.look()
    await second.keeping.report()
    await second.keeping.report()
    assert await second.left(grant) == AMOUNT - USED
    assert await second.recovery.look() == 0


@pytest.mark.parametrize("where", ["before", "after"])
async def test_a_recovery_that_is_killed_leaves_the_telling_to_the_next(
    start: Start, store: SharedStore, ledger: MemoryStorage, clock: Clock, where: str
) -> None:
    first = start("0a")
    grant, _ = await first.begin("open", CUSTOMER)
    closed = await first.answer("closed", CUSTOMER)
    first.journal.close(remove=False)
    clock.now_s += 100  # nobody waits for engines any more
    await store.reap(CUSTOMER.organization_id, 10)
    second = start("0b")
    if where == "before":
        ledger.crash_after = 2  # the row of what was open is in the ledger, and nobody has learned of it
        with pytest.raises(Crash):
            await second.recovery.look()
    else:
        await second.recovery.look()
    second.recovery.release()
    second.journal.close(remove=True)
    third = start("0c")
    await third.recovery.look()
    assert not third.keeping.is_told(grant.info.request_id)
    await third.keeping.report()
    assert await third.recovery.look() == 0
    assert await third.left(closed) == AMOUNT - USED - PROMPT_TOKENS


async def test_looking_at_a_journal_needs_nobody_to_be_told(start: Start, store: SharedStore, tmp_path: Path) -> None:
    process = start("0a")
    store.away.add(CUSTOMER.organization_id)
    await process.answer("r", CUSTOMER)
    tail = JournalTail(JournalFolder(tmp_path), "0a", is_finished=False)
    tail.commit(tail.read())
    assert not tail.has_untold
