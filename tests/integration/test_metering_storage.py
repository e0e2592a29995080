"""Posting, usage and verification over real databases, also while they are stopped, killed and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from client_kit import until
from databases import PostgresServer
from metering_kit import MONEY_QUOTA, NOTHING_YET, NOW_MS, TOKEN_QUOTA, Clock, Finals, opening, record
from metering_program import SystemClock
from pydantic import SecretStr
from sqlalchemy import delete, insert, update

from gateway.commands.ledger import verify
from gateway.commands.migrate import run as migrate_command
from gateway.domain.audit import AuditDraft
from gateway.domain.ids import TeamId
from gateway.domain.ledger import HOUR_MS
from gateway.errors import InvalidRequest
from gateway.journal.folder import JournalFolder, new_writer_id
from gateway.journal.records import Closed, Opened
from gateway.journal.writer import JournalWriter
from gateway.services.bookkeeping import Bookkeeping
from gateway.services.metering import row_of
from gateway.services.usage import UsageReports
from gateway.services.verification import LedgerReport, verify_ledger
from gateway.settings import DatabaseSettings, Settings
from gateway.storage.database import Database
from gateway.storage.schema import migrate
from gateway.storage.tables import audit, ledger, quota_usage

TEAM = opening("any").team_id


@pytest.fixture
def books(tmp_path: Path, storage: Database) -> Bookkeeping:
    return Bookkeeping(tmp_path, storage, Finals(), SystemClock(), writer_id=new_writer_id())


def settle(books: Bookkeeping, *names: str, **opened: int) -> None:
    for name in names:
        books.recorder.opened(opening(name, **opened), NOTHING_YET)
        books.recorder.settled(record(opening(name, **opened)))


async def num_rows(database: Database) -> int:
    async with database.reading() as work:
        return (await work.ledger.totals()).num_requests


async def until_posted(database: Database, num: int) -> None:
    async with asyncio.timeout(60):
        while await num_rows(database) < num:  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.02)


async def report_of(storage: Database, home: Path) -> LedgerReport:
    return await verify_ledger(storage, JournalFolder(home))


async def test_a_settled_request_is_in_the_ledger_within_a_second(storage: Database, books: Bookkeeping) -> None:
    async with books.running():
        began_s = SystemClock().monotonic()
        settle(books, "a")
        await until_posted(storage, 1)
        assert SystemClock().monotonic() - began_s < 1
    async with storage.reading() as work:
        assert await work.ledger.rows(["a", "b"]) == [row_of(record(opening("a")))]


async def test_what_is_settled_is_committed_of_its_quotas(storage: Database, books: Bookkeeping) -> None:
    async with books.running():
        settle(books, "a", "b")
        settle(books, "long", prompt_tokens=1020)
        await until_posted(storage, 3)
    async with storage.reading() as work:
        committed = await work.ledger.committed(opening("any").organization_id, since_ms=NOW_MS)
        assert [sentence async for sentence in work.ledger.mismatches()] == []
    assert committed == {TOKEN_QUOTA.key: 3 * 28 + 1000, MONEY_QUOTA.key: 3 * 19 + 500}


@pytest.fixture
async def own_postgres(tmp_path: Path, free_port: Callable[[], int]) -> AsyncIterator[PostgresServer]:
    server = PostgresServer(tmp_path / "postgres", free_port())
    await asyncio.to_thread(server.start)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


async def test_rows_settled_while_postgresql_is_killed_stopped_and_frozen_are_posted_once(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = await asyncio.to_thread(own_postgres.new_database)
    database = Database.open(url, tmp_path)
    await migrate(database)
    books = Bookkeeping(tmp_path, database, Finals(), SystemClock(), writer_id=new_writer_id())
    num = 0

    async def load(stop: asyncio.Event) -> None:
        nonlocal num
        while not stop.is_set():
            settle(books, *(f"req_{num + i}" for i in range(10)), opened_at_ms=NOW_MS)
            num += 10
            await asyncio.sleep(0.01)

    stop = asyncio.Event()
    async with books.running():
        loading = asyncio.create_task(load(stop))
        for interrupt, repair in (
            (own_postgres.kill, own_postgres.start),
            (own_postgres.stop, own_postgres.start),
            (own_postgres.freeze, own_postgres.thaw),
        ):
            await until_posted(database, num + 1)
            await asyncio.to_thread(interrupt)
            before = num
            await until(lambda least=before + 500: num >= least, "requests are settled meanwhile")
            await asyncio.to_thread(repair)
        stop.set()
        await loading
        await until_posted(database, num)
    assert await num_rows(database) == num
    report = await report_of(database, tmp_path)
    assert (report.findings, report.num_rows, report.num_closed) == ([], num, 0)
    await database.close()


async def test_usage_is_by_hour_key_and_model_and_exact_up_to_now(storage: Database, books: Bookkeeping) -> None:
    hour_ms = NOW_MS // HOUR_MS * HOUR_MS
    reports = UsageReports(storage, Clock(now_s=(hour_ms + 1) / 1000))
    async with books.running():
        settle(books, "a", "b", opened_at_ms=hour_ms)
        settle(books, "before", opened_at_ms=hour_ms - 1000)
        settle(books, "long before", opened_at_ms=hour_ms - 25 * HOUR_MS)
        await until_posted(storage, 4)
        report = await reports.of_team(TEAM)
    assert (report.from_ms, report.until_ms) == (hour_ms - 24 * HOUR_MS, hour_ms + HOUR_MS)
    assert [(each.hour_ms, each.totals.num_requests) for each in report.hours] == [(hour_ms - HOUR_MS, 1), (hour_ms, 2)]
    totals = report.totals
    assert (totals.num_requests, totals.prompt_tokens, totals.cached_tokens) == (3, 60, 48)
    assert (totals.completion_tokens, totals.engine_us, totals.cost_microusd) == (24, 15, 57)
    older = await reports.of_team(TEAM, from_ms=hour_ms - 30 * HOUR_MS, until_ms=hour_ms - 24 * HOUR_MS)
    assert older.totals.num_requests == 1
    for nobodys in (
        reports.of_team(TeamId("team_2")),
        reports.of_team(TEAM, model="other"),
        reports.of_team(TEAM, key_id="key_2"),
    ):
        assert (await nobodys).hours == []
    assert (await reports.of_team(TEAM, model="scripted", key_id="key_1")).totals == totals
    with pytest.raises(InvalidRequest, match="must be before"):
        await reports.of_team(TEAM, from_ms=5, until_ms=5)
    with pytest.raises(InvalidRequest, match="31 days"):
        await reports.of_team(TEAM, from_ms=0, until_ms=31 * 24 * HOUR_MS + 1)


async def test_verification_beside_a_running_process_finds_nothing(
    storage: Database, books: Bookkeeping, tmp_path: Path
) -> None:
    async with books.running():
        settle(books, *(f"r{i}" for i in range(50)))
        books.recorder.opened(opening("running"), NOTHING_YET)
        report = await report_of(storage, tmp_path)
        assert report.findings == []
        assert (report.num_closed, report.num_running, report.num_to_settle) == (50, 1, 0)
        await until_posted(storage, 50)
        report = await report_of(storage, tmp_path)
        assert (report.num_rows, report.num_waiting, report.findings) == (50, 0, [])


async def test_verification_says_what_a_dead_process_has_left(storage: Database, tmp_path: Path) -> None:
    writer = JournalWriter(JournalFolder(tmp_path), new_writer_id())
    writer.append(Opened(opening("open")))
    writer.append(Closed(row_of(record(opening("closed")))))
    writer.close(remove=False)
    report = await report_of(storage, tmp_path)
    assert (report.num_to_settle, report.num_waiting, report.findings) == (1, 1, [])
    assert len(JournalFolder(tmp_path).writers()) == 1


async def test_verification_finds_values_that_differ_damage_and_a_broken_audit(
    storage: Database, tmp_path: Path
) -> None:
    rows = [row_of(record(opening(name))) for name in ("a", "b")]
    async with storage.writing() as work:
        await work.ledger.post(rows)
        for action in ("one", "two", "three"):
            await work.audit.append(
                AuditDraft(
                    at_ms=NOW_MS,
                    actor="system",
                    source="",
                    request_id="",
                    action=action,
                    object_id="",
                    before="",
                    after="",
                )
            )
    writer = JournalWriter(JournalFolder(tmp_path), new_writer_id())
    for row in rows:
        writer.append(Closed(row))
    path = JournalFolder(tmp_path).segments(writer.writer_id)[0].path
    with path.open("ab") as file:
        file.write(b"\xff" * 20)
    async with storage.writing() as work:
        await work.ledger._transaction.run(update(ledger).where(ledger.c.request_id == "a").values(completion_tokens=1))
        await work.ledger._transaction.run(delete(audit).where(audit.c.sequence == 2))
    findings = (await report_of(storage, tmp_path)).findings
    assert "request a has other values in the ledger than in the journal" in findings
    assert "audit: Entry 3 comes where 2 was expected: entries are missing." in findings
    assert any("is damaged" in finding for finding in findings)
    writer.close(remove=False)


def test_the_command_says_clean_or_what_it_found(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(home=tmp_path, database=DatabaseSettings(url=SecretStr(database_url)))
    assert migrate_command(settings, None) == 0
    assert verify(settings) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "clean"
    asyncio.run(commit_what_nobody_used(database_url))
    assert verify(settings) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "quota planted of org_1: 5 is committed, no ledger row was charged for it",
        "1 findings",
    ]
    (JournalFolder(tmp_path).path).mkdir()
    (JournalFolder(tmp_path).path / "0a-000001.journal.damaged").touch()
    assert verify(settings) == 1
    out = capsys.readouterr().out
    assert "0a-000001.journal.damaged is damaged" in out
    assert out.splitlines()[-1] == "2 findings"


async def commit_what_nobody_used(url: str) -> None:
    database = Database.open(url, Path("unused"))
    async with database.migrating() as connection:
        planted = {"key": "planted", "organization_id": "org_1", "ends_at_ms": NOW_MS, "committed": 5}
        await connection.execute(insert(quota_usage).values(planted))
    await database.close()
