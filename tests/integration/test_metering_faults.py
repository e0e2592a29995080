"""The end of a process whose SQLite file another one has locked, and `ledger verify` where it can say little."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest
from metering_kit import NOTHING_YET, Finals, opening, record
from metering_program import SystemClock
from pydantic import SecretStr

from gateway.commands.ledger import verify
from gateway.commands.migrate import run as migrate_command
from gateway.journal.folder import JournalFolder, new_writer_id
from gateway.services.bookkeeping import Bookkeeping
from gateway.settings import DatabaseSettings, Settings
from gateway.storage.database import Database
from gateway.storage.engines import BUSY_S
from gateway.storage.schema import BASE, migrate, newest
from gateway.storage.urls import FILE_NAME


async def test_a_locked_sqlite_file_holds_up_the_end_of_a_process_for_little_more_than_the_drain(
    tmp_path: Path,
) -> None:
    database = Database.open(None, tmp_path)
    await migrate(database)
    drain_s = 0.5
    books = Bookkeeping(tmp_path, database, Finals(), SystemClock(), writer_id=new_writer_id(), drain_s=drain_s)
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    try:
        async with books.running():
            other.execute("BEGIN IMMEDIATE")
            books.recorder.opened(opening("r"), NOTHING_YET)
            books.recorder.settled(record(opening("r")))
            async with asyncio.timeout(10):
                while not database._sqlite_writer.locked():  # noqa: ASYNC110 - nobody tells that posting has begun
                    await asyncio.sleep(0.01)
            began_s = time.monotonic()
        await database.close()
        assert time.monotonic() - began_s < drain_s + 2 * BUSY_S + 0.5
    finally:
        other.close()
    assert len(JournalFolder(tmp_path).writers()) == 1  # left to the next process


async def test_a_writer_waits_longer_for_a_locked_sqlite_file_than_one_try_lasts(tmp_path: Path) -> None:
    database = Database.open(None, tmp_path)
    await migrate(database)
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    asyncio.get_running_loop().call_later(2.2 * BUSY_S, other.close)
    async with database.writing() as work:
        await work.count_change()
    await database.close()


def test_verification_says_that_there_is_no_database_yet_and_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(Settings(home=tmp_path)) == 1
    assert capsys.readouterr().err == f"evenhand: there is no database yet at {tmp_path / FILE_NAME}\n"
    assert list(tmp_path.iterdir()) == []


def test_verification_does_not_migrate(database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(home=tmp_path, database=DatabaseSettings(url=SecretStr(database_url)))
    assert migrate_command(settings, BASE, may_lose=True) == 0
    capsys.readouterr()
    for _ in range(2):
        assert verify(settings) == 1
        assert capsys.readouterr().err == (
            f"evenhand: the database is at revision base, this version needs {newest()}: run evenhand migrate\n"
        )


@pytest.mark.parametrize("name", ["0a.lock", "0a-000001.journal"])
def test_verification_says_in_one_line_that_a_journal_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    settings = Settings(home=tmp_path)
    assert migrate_command(settings, None) == 0
    folder = JournalFolder(tmp_path)
    folder.create()
    (folder.path / name).mkdir()
    assert verify(settings) == 1
    assert capsys.readouterr().err == (f"evenhand: the journals cannot be read: {folder.path / name}: Is a directory\n")
