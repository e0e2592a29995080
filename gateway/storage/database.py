"""The database as `services.stores.Storage`: transactions, and what they find in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.errors import StorageDown
from gateway.storage import engines
from gateway.storage.admin_tokens import SqlAdminTokens
from gateway.storage.audit import SqlAudit
from gateway.storage.catalog import SqlCatalog
from gateway.storage.errors import UnusableDatabase
from gateway.storage.keys import SqlKeys
from gateway.storage.ledger import SqlLedger
from gateway.storage.limits import SqlLimits
from gateway.storage.tables import tenancy_version
from gateway.storage.tenants import SqlOrganizations, SqlTeams
from gateway.storage.transaction import Transaction, Turn, told_apart
from gateway.storage.urls import PostgresqlServer, SqliteFile, read_url

_CONNECT_SLACK_S = 0.3
"""The driver's own time-out comes first and leaves nothing behind; ours is for what it does not bound."""


class SqlWork:
    """One transaction's repositories; see `services.stores.Work`."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.organizations = SqlOrganizations(transaction)
        self.teams = SqlTeams(transaction)
        self.keys = SqlKeys(transaction)
        self.admin_tokens = SqlAdminTokens(transaction)
        self.catalog = SqlCatalog(transaction)
        self.limits = SqlLimits(transaction)
        self.audit = SqlAudit(transaction)
        self.ledger = SqlLedger(transaction)

    async def version(self) -> int:
        version: int = await self._transaction.scalar(select(tenancy_version.c.version))
        return version

    async def count_change(self) -> int:
        # The same turn as the audit's: transactions that do both, in whatever order, cannot wait for each other.
        await self._transaction.take_turn(Turn.CHANGE)
        column = tenancy_version.c.version
        version: int = await self._transaction.scalar(
            update(tenancy_version).values(version=column + 1).returning(column)
        )
        return version


class Database:
    """One process's connections, for use in one event loop. Making it connects to nothing."""

    def __init__(self, engine: AsyncEngine, place: SqliteFile | PostgresqlServer) -> None:
        self._engine = engine
        self._place = place
        self._sqlite_writer = asyncio.Lock()

    @classmethod
    def open(cls, url: str | None, home: Path, *, pool_size: int = 5) -> Self:
        """`url` as in the setting `database.url`; None is the file in the home.

        Raises:
            UnusableDatabase: the address names no database, or the file cannot be opened.
        """
        place = read_url(url, home)
        if isinstance(place, PostgresqlServer):
            return cls(engines.postgresql_engine(place, pool_size), place)
        try:
            return cls(engines.sqlite_engine(place), place)
        except OSError as e:
            raise UnusableDatabase(f"{place.path}: cannot be used as database: {e.strerror}") from e

    @property
    def is_postgresql(self) -> bool:
        return isinstance(self._place, PostgresqlServer)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[SqlWork]:
        options = engines.reading(self._engine)
        async with self._transaction(options, is_writing=False) as transaction:
            yield SqlWork(transaction)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[SqlWork]:
        options = engines.writing(self._engine)
        async with self._sqlite_turn(), self._transaction(options, is_writing=True) as transaction:
            yield SqlWork(transaction)
            await transaction.commit()

    @asynccontextmanager
    async def migrating(self) -> AsyncIterator[AsyncConnection]:
        """A connection in a transaction that no other process is in, for changing tables; commits at the end.

        Raises:
            StorageDown: the database does not answer.
        """
        engine = engines.migration_engine(self._place)
        try:
            with told_apart():
                async with engine.connect() as connection:
                    await connection.execution_options(**engines.writing(connection))
                    async with connection.begin():
                        if self.is_postgresql:
                            await connection.execute(select(func.pg_advisory_xact_lock(Turn.MIGRATE.value)))
                        yield connection
        finally:
            await engine.dispose()

    async def close(self) -> None:
        """Close the connections; nothing may be using them."""
        await self._engine.dispose()

    @asynccontextmanager
    async def _transaction(self, options: dict[str, Any], *, is_writing: bool) -> AsyncIterator[Transaction]:
        transaction = await self._begun(options, is_writing=is_writing)
        try:
            yield transaction
        finally:
            await transaction.close()

    async def _begun(self, options: dict[str, Any], *, is_writing: bool) -> Transaction:
        """A connection of the pool may have died since it was used last, with all others when the server was started
        anew; that shows in the first statement, and then another one is asked for, once."""
        for is_last in (False, True):
            transaction = await self._connected(options, is_writing=is_writing)
            try:
                await transaction.begin()
            except BaseException as e:
                await transaction.close()
                if is_last or not self.is_postgresql or transaction.is_aborted or not isinstance(e, StorageDown):
                    raise
            else:
                return transaction
        raise AssertionError("the last attempt returns or raises")

    async def _connected(self, options: dict[str, Any], *, is_writing: bool) -> Transaction:
        limit_s = engines.CONNECT_S + _CONNECT_SLACK_S if self.is_postgresql else engines.WRITE_S
        async with AsyncExitStack() as stack:
            with told_apart():
                async with asyncio.timeout(limit_s):
                    connection = await stack.enter_async_context(self._engine.connect())
            await connection.execution_options(**options)
            return Transaction(
                connection,
                give_back=stack.pop_all(),
                is_writing=is_writing,
                limit_s=engines.WRITE_S if is_writing else engines.READ_S,
                abort=await _terminator(connection) if self.is_postgresql else None,
            )

    @asynccontextmanager
    async def _sqlite_turn(self) -> AsyncIterator[None]:
        """Writers of this process queue here, in order: SQLite lets those who wait try again from time to time."""
        if self.is_postgresql:
            yield
            return
        with told_apart():
            async with asyncio.timeout(engines.WRITE_S):
                await self._sqlite_writer.acquire()
        try:
            yield
        finally:
            self._sqlite_writer.release()


async def _terminator(connection: AsyncConnection) -> Callable[[], None]:
    driver: Any = (await connection.get_raw_connection()).driver_connection  # asyncpg's
    terminate: Callable[[], None] = driver.terminate
    return terminate
