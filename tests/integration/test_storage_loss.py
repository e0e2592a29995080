"""A database that is gone, hangs or is busy, and callers that are cancelled: an error in time, then on as before."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from databases import PostgresServer
from storage_kit import organization

from gateway.errors import StorageDown
from gateway.storage import engines
from gateway.storage.database import Database
from gateway.storage.schema import migrate

IN_TIME_S = 2.5
POOL_SIZE = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[PostgresServer]:
    """A PostgreSQL to kill; every test leaves it running."""
    own = PostgresServer(tmp_path_factory.mktemp("own"), free_port())
    own.start()
    try:
        yield own
    finally:
        own.stop()


@pytest.fixture
async def database(server: PostgresServer) -> AsyncIterator[Database]:
    """Migrated, and its pool full of connections that have been used."""
    opened = Database.open(server.new_database(), Path("unused"), pool_size=POOL_SIZE)
    try:
        await migrate(opened)
        await use_all(opened)
        yield opened
    finally:
        await opened.close()


async def read(database: Database) -> int:
    async with database.reading() as work:
        return await work.version()


async def write(database: Database) -> int:
    async with database.writing() as work:
        return await work.count_change()


async def use_all(database: Database) -> None:
    """Read over every connection of the pool at once."""
    barrier = asyncio.Barrier(POOL_SIZE)

    async def use() -> None:
        async with database.reading() as work:
            async with asyncio.timeout(10):
                await barrier.wait()
            await work.version()

    await asyncio.gather(*(use() for _ in range(POOL_SIZE)))


async def test_without_a_server_everything_fails_at_once_and_works_again_when_it_is_back(
    server: PostgresServer, database: Database
) -> None:
    server.kill()
    began = time.monotonic()
    for _ in range(POOL_SIZE + 2):
        for attempt in (read, write):
            with pytest.raises(StorageDown):
                await attempt(database)
    assert time.monotonic() - began < IN_TIME_S
    server.start()

    assert await write(database) == 1
    await use_all(database)


async def test_a_server_that_was_started_anew_is_not_noticed(server: PostgresServer, database: Database) -> None:
    for end in (server.stop, server.kill):
        end()
        server.start()
        await use_all(database)
        assert await write(database) > 0


async def test_a_server_that_goes_within_a_transaction_fails_it(server: PostgresServer, database: Database) -> None:
    async def lose() -> None:
        async with database.writing() as work:
            await work.organizations.add(organization())
            server.kill()
            await work.count_change()

    try:
        with pytest.raises(StorageDown):
            await lose()
    finally:
        server.start()
    async with database.reading() as work:
        assert await work.organizations.page(after="", limit=1) == []


async def test_readers_of_a_hung_server_fail_in_time(server: PostgresServer, database: Database) -> None:
    server.freeze()
    began = time.monotonic()
    try:
        results = await asyncio.gather(*(read(database) for _ in range(4 * POOL_SIZE)), return_exceptions=True)
        took_s = time.monotonic() - began
    finally:
        server.thaw()

    assert {type(result) for result in results} == {StorageDown}
    assert took_s < IN_TIME_S
    assert await read(database) == 0
    await use_all(database)


async def test_a_server_that_hangs_within_a_transaction_fails_it_in_time(
    server: PostgresServer, database: Database
) -> None:
    async def hang() -> None:
        async with database.reading() as work:
            await work.version()
            server.freeze()
            await work.version()

    began = time.monotonic()
    try:
        with pytest.raises(StorageDown):
            await hang()
        took_s = time.monotonic() - began
    finally:
        server.thaw()
    assert took_s < IN_TIME_S
    assert await read(database) == 0


async def test_a_server_that_hangs_when_a_connection_is_given_back_holds_nobody_up(
    server: PostgresServer, database: Database
) -> None:
    began = time.monotonic()
    try:
        async with database.reading() as work:
            assert await work.version() == 0
            server.freeze()
        took_s = time.monotonic() - began
    finally:
        server.thaw()
    assert took_s < IN_TIME_S
    await use_all(database)


async def test_writers_wait_longer_but_not_for_ever(
    server: PostgresServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engines.WRITE_S > engines.READ_S
    monkeypatch.setattr(engines, "WRITE_S", 0.5)
    server.freeze()
    try:
        with pytest.raises(StorageDown):
            await write(database)
    finally:
        server.thaw()
    monkeypatch.undo()
    assert await write(database) == 1


async def test_a_writer_that_waits_for_another_one_too_long_fails_and_harms_nobody(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "WRITE_S", 0.5)
    async with database.writing() as first:
        assert await first.count_change() == 1
        with pytest.raises(StorageDown):
            await write(database)
    assert await write(database) == 2


async def test_a_database_that_does_not_exist_is_down(server: PostgresServer) -> None:
    database = Database.open(f"{server.url}_none", Path("unused"))
    with pytest.raises(StorageDown) as caught:
        await read(database)
    await database.close()

    assert 'database "postgres_none" does not exist' in str(caught.value.__cause__)


async def test_a_locked_file_is_down_until_it_is_free(
    tmp_path: Path, migrated_sqlite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "WRITE_S", 0.2)
    path = shutil.copy(migrated_sqlite, tmp_path)
    database = Database.open(f"sqlite:///{path}", tmp_path)
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageDown):
            await write(database)
        assert await read(database) == 0, "readers do not mind"
        other.execute("ROLLBACK")
        assert await write(database) == 1
    finally:
        other.close()
        await database.close()


async def test_cancelling_anywhere_leaves_all_or_nothing_and_a_pool_that_works(storage: Database) -> None:
    async def add_two(n: int) -> None:
        async with storage.writing() as work:
            await work.organizations.add(organization(2 * n))
            await work.organizations.add(organization(2 * n + 1))

    num_cancelled = 0
    for n in range(1, 121):
        task = asyncio.create_task(add_two(n))
        for _ in range(n % 60):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        num_cancelled += task.cancelled()

    assert num_cancelled > 30
    await asyncio.gather(*(add_two(n) for n in range(1000, 1020)), *(read(storage) for _ in range(20)))
    async with storage.reading() as work:
        found = {int(each.id[-4:]) for each in await work.organizations.page(after="", limit=1000)}
    assert {n ^ 1 for n in found} == found
    assert found >= set(range(2000, 2040))
