"""What is done for limits besides requests: leases, settlements that are late, and what a store has lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from keeping_kit import Process, SharedStore, customer
from metering_kit import Clock, MemoryStorage

from gateway.domain.limits.policy import Concurrency, QuotaRule
from gateway.errors import LimitsUnavailable
from gateway.services import limit_keeping
from gateway.services.limit_keeping import ORGANIZATIONS_AT_A_TIME

NAMES = [f"org_{i}" for i in range(3 * ORGANIZATIONS_AT_A_TIME)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> SharedStore:
    return SharedStore(clock)


@pytest.fixture
def ledger() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def process(tmp_path: Path, store: SharedStore, ledger: MemoryStorage, clock: Clock) -> Process:
    return Process(tmp_path, store, ledger, clock, "0a")


async def test_leases_of_others_are_renewed_if_one_organization_gets_no_answer(
    process: Process, store: SharedStore
) -> None:
    for name in NAMES:
        await process.begin(f"r-{name}", customer(Concurrency(amount=5), organization_id=name))
    store.away.update(NAMES[:ORGANIZATIONS_AT_A_TIME])
    await process.keeping.report()
    assert sorted(store.reported) == sorted(NAMES[ORGANIZATIONS_AT_A_TIME:])


async def test_late_settlements_of_others_are_told_if_one_organization_gets_no_answer(
    process: Process, store: SharedStore
) -> None:
    store.away.update(NAMES)
    for name in NAMES:
        await process.answer(f"r-{name}", customer(Concurrency(amount=5), organization_id=name))
    store.away.intersection_update(NAMES[:1])
    await process.keeping.report()
    assert list(process.limiter.late) == NAMES[:1]


async def test_every_round_begins_with_another_organization(process: Process, store: SharedStore) -> None:
    for name in NAMES:
        await process.begin(f"r-{name}", customer(Concurrency(amount=5), organization_id=name))
    firsts = set()
    for _ in NAMES:
        store.reported.clear()
        await process.keeping.report()
        firsts.add(store.reported[0])
    assert firsts == set(NAMES)


async def test_a_bug_with_one_organization_keeps_no_other_from_being_made_known(
    process: Process, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = QuotaRule(unit="tokens", period="day", amount=100)
    for name in NAMES:
        process.limiter.note_lost(customer(quota, organization_id=name).organization_id)
    held = store.held

    async def broken(organization_id: str) -> object:
        if organization_id == NAMES[0]:
            raise RuntimeError
        return await held(customer(organization_id=organization_id).organization_id)

    monkeypatch.setattr(store, "held", broken)
    await process.keeping.revive()
    assert process.limiter.lost == {NAMES[0]}


@pytest.mark.parametrize("is_posted", [False, True])
async def test_what_was_settled_and_not_posted_is_told_to_a_store_that_was_lost(
    process: Process, store: SharedStore, is_posted: bool
) -> None:
    who = customer(QuotaRule(unit="tokens", period="day", amount=1000))
    await store.begin_epoch(who.organization_id, {}, ())
    grant = await process.answer("r", who, completion_tokens=80)
    if is_posted:
        await process.poster.drain(1)
    store.lose()
    process.limiter.note_lost(who.organization_id)
    await process.keeping.revive()
    assert await process.left(grant) == 900
    await process.poster.drain(1)
    assert process.limiter.unposted == {}
    store.lose()
    process.limiter.note_lost(who.organization_id)
    await process.keeping.revive()
    assert await process.left(grant) == 900


@pytest.mark.parametrize("is_posted", [False, True])
async def test_what_another_process_has_settled_and_not_posted_is_reserved_while_the_ledger_is_read(
    tmp_path: Path, process: Process, store: SharedStore, ledger: MemoryStorage, clock: Clock, is_posted: bool
) -> None:
    who = customer(QuotaRule(unit="tokens", period="day", amount=1000))
    other = Process(tmp_path, store, ledger, clock, "0b")
    other.keeping.is_recovered = lambda: False  # so that it leaves the reading to the first
    await store.begin_epoch(who.organization_id, {}, ())
    await other.keeping.look_at_store()
    grant = await other.answer("r", who, completion_tokens=80)
    store.lose()
    await other.keeping.look_at_store()
    await other.keeping.revive()
    if is_posted:
        await other.poster.drain(1)
    process.limiter.note_lost(who.organization_id)
    await process.keeping.revive()
    assert await process.left(grant) <= 900
    await other.keeping.revive()
    await other.poster.drain(1)
    assert await process.left(grant) == 900
    assert (other.limiter.late, other.limiter.unposted, other.limiter.untold) == ({}, {}, set())


async def test_what_ends_while_the_ledger_is_read_is_counted_once(
    process: Process, store: SharedStore, ledger: MemoryStorage
) -> None:
    who = customer(QuotaRule(unit="tokens", period="day", amount=1000))
    await store.begin_epoch(who.organization_id, {}, ())
    running = await process.begin("running", who)
    await process.answer("settled", who, completion_tokens=80)
    store.lose()
    process.limiter.note_lost(who.organization_id)

    async def posted() -> None:
        await process.end(*running, completion_tokens=180)
        await process.poster.drain(1)

    ledger.before_reading.append(posted)
    await process.keeping.revive()
    assert await process.left(running[0]) == 700
    assert (process.limiter.late, process.limiter.unposted, process.limiter.untold) == ({}, {}, set())


async def test_late_settlements_that_were_posted_before_they_were_told_are_not_kept(
    process: Process, store: SharedStore
) -> None:
    who = customer(QuotaRule(unit="tokens", period="day", amount=1000, is_hard=False))
    store.away.add(who.organization_id)
    await process.answer("r", who)
    await process.poster.drain(1)
    store.away.clear()
    await process.keeping.report()
    assert (process.limiter.unposted, process.limiter.untold) == ({}, set())


@pytest.mark.parametrize("is_shadow", [False, True])
async def test_a_quota_that_refuses_nothing_is_remembered_over_a_restart(
    tmp_path: Path, process: Process, ledger: MemoryStorage, clock: Clock, is_shadow: bool
) -> None:
    who = customer(QuotaRule(unit="tokens", period="day", amount=1000, is_hard=is_shadow), is_shadow=is_shadow)
    await process.answer("r", who, completion_tokens=80)
    await process.leave()
    second = Process(tmp_path, SharedStore(clock), ledger, clock, "0b")
    grant, opening = await second.begin("running", who)
    assert second.limiter.has_lost.is_set()
    await second.end(*(await second.begin("meanwhile", who)), completion_tokens=180)
    assert second.limiter.late == {}, "nothing waits for what is committed"
    await second.keeping.revive()
    assert await second.left(grant) == 1000 - 100 - 200 - 120
    await second.end(grant, opening, completion_tokens=80)
    assert await second.left(grant) == 1000 - 100 - 200 - 100
    assert not second.limiter.unsure


async def test_a_soft_quota_is_told_to_a_store_that_was_lost(process: Process, store: SharedStore) -> None:
    who = customer(QuotaRule(unit="tokens", period="day", amount=150, is_hard=False))
    await process.keeping.look_at_store()
    await process.answer("first", who, completion_tokens=80)
    await process.keeping.revive()
    await process.answer("second", who, completion_tokens=80)
    await process.poster.drain(1)
    assert not process.limiter.unsure
    store.lose()
    await process.keeping.look_at_store()
    await process.answer("third", who, completion_tokens=10)
    await process.keeping.revive()
    grant = await process.answer("fourth", who, completion_tokens=10)
    assert grant.request_class == "batch"
    assert await process.left(grant) == 150 - 100 - 100 - 30 - 30


async def test_nothing_is_asked_of_a_store_for_a_soft_quota_before_all_have_noticed_its_loss(
    process: Process, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def age_ms() -> int:
        return 10

    monkeypatch.setattr(store, "age_ms", age_ms)
    who = customer(QuotaRule(unit="tokens", period="day", amount=150, is_hard=False))
    await process.answer("r", who)
    await process.keeping.revive()
    assert process.limiter.unsure == {who.organization_id}


async def test_organizations_are_made_known_again_though_the_store_was_away_when_they_were_lost(
    process: Process, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = customer(QuotaRule(unit="tokens", period="day", amount=150))
    age_ms, answers = store.age_ms, iter([LimitsUnavailable()])

    async def away_at_first() -> int | None:
        for error in answers:
            raise error
        return await age_ms()

    monkeypatch.setattr(store, "age_ms", away_at_first)
    monkeypatch.setattr(limit_keeping, "RETRY_S", 0.001)
    async with process.keeping.running(), asyncio.timeout(5):
        grant = await process.answer("r", who)
        assert await process.left(grant) == 50
