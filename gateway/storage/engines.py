"""SQLAlchemy's engines for the two databases, set up so that nothing hangs and nothing that was committed is lost."""

from __future__ import annotations

import os
import time
from typing import Any

from sqlalchemy import Connection, NullPool, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.storage.urls import PostgresqlServer, SqliteFile

READ_S = 1.5
"""Bound of a call in a transaction that reads. Keys are checked by such calls, and their callers are to have an answer
within about two seconds."""
WRITE_S = 10.0
"""Bound of a call in a transaction that writes, waiting for other writers included."""
BUSY_S = 1.0
"""How long one try to get hold of an SQLite file lasts: the driver's thread waits for it, and cannot be called off."""
CONNECT_S = 1.5
"""Bound of getting a connection, made or from the pool."""
MIGRATE_S = 600.0

_SQLITE_CONNECTIONS = 4
"""One writes, the others read."""
_BUSY = "SQLITE_BUSY"
_CACHED_STATEMENTS = 32
_ROWS_PER_INSERT = 50
"""An insert of n rows is a statement of its own for each n, and drivers keep prepared ones: up to 500 rows and 128
statements were a hundred megabytes."""
_BEGIN = "evenhand_begin"
"""Execution option: the statement that begins a transaction in SQLite."""


def sqlite_engine(place: SqliteFile) -> AsyncEngine:
    """Raises OSError if the file can be neither opened nor made."""
    _make_private(place)
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{place.path}",
        connect_args={"isolation_level": None, "timeout": BUSY_S, "cached_statements": _CACHED_STATEMENTS},
        pool_size=_SQLITE_CONNECTIONS,
        max_overflow=0,
        pool_timeout=WRITE_S,
        insertmanyvalues_page_size=_ROWS_PER_INSERT,
        hide_parameters=True,
    )
    _set_up_sqlite(engine, foreign_keys=True)
    return engine


def postgresql_engine(place: PostgresqlServer, pool_size: int) -> AsyncEngine:
    """The pool does not ask a connection whether it is alive before it lends it: the first statement of a transaction
    does, under a bound that the pool's own question does not have."""
    return create_async_engine(
        "postgresql+asyncpg://",
        connect_args=_asyncpg_arguments(place, CONNECT_S) | {"prepared_statement_cache_size": _CACHED_STATEMENTS},
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=CONNECT_S,
        insertmanyvalues_page_size=_ROWS_PER_INSERT,
        hide_parameters=True,
    )


def migration_engine(place: SqliteFile | PostgresqlServer) -> AsyncEngine:
    """For one connection that changes tables, and may take its time. In SQLite changing a table means making it anew,
    which foreign keys would not allow."""
    if isinstance(place, PostgresqlServer):
        arguments = _asyncpg_arguments(place, WRITE_S)
        return create_async_engine("postgresql+asyncpg://", connect_args=arguments, poolclass=NullPool)
    _make_private(place)
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{place.path}",
        connect_args={"isolation_level": None, "timeout": MIGRATE_S},
        poolclass=NullPool,
    )
    _set_up_sqlite(engine, foreign_keys=False)
    return engine


def reading(connection: AsyncConnection | AsyncEngine) -> dict[str, Any]:
    """Execution options of a connection that reads, and sees all the time what it saw first."""
    if connection.dialect.name == "postgresql":
        return {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
    return {_BEGIN: "BEGIN"}


def writing(connection: AsyncConnection | AsyncEngine) -> dict[str, Any]:
    """Execution options of a connection that writes. In SQLite it waits for other writers when it begins: one that
    reads first and then writes would be refused if another has written meanwhile."""
    return {} if connection.dialect.name == "postgresql" else {_BEGIN: "BEGIN IMMEDIATE"}


def _asyncpg_arguments(place: PostgresqlServer, connect_s: float) -> dict[str, Any]:
    return {"dsn": place.dsn, "timeout": connect_s, "server_settings": {"application_name": "evenhand"}}


def _make_private(place: SqliteFile) -> None:
    """Digests of keys lie in it; SQLite gives its companion files the same mode."""
    place.path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(place.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _set_up_sqlite(engine: AsyncEngine, *, foreign_keys: bool) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def set_up(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        # WAL: readers and the writer, in whatever processes, do not wait for each other. The file remembers it, and to
        # set it needs the file alone, so it is set only once.
        cursor.execute("PRAGMA journal_mode")
        if cursor.fetchone()[0] != "wal":
            cursor.execute("PRAGMA journal_mode = WAL")
        # FULL: a commit is on the disk. With NORMAL a power cut could bring back a revoked key, and lose ledger rows
        # whose journal is deleted already.
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        # The driver is told to leave transactions alone (isolation_level None): its own begin too late, and never
        # for what only reads.
        statement, until_s = connection.get_execution_options()[_BEGIN], time.monotonic() + WRITE_S
        while True:
            try:
                connection.exec_driver_sql(statement)
            except OperationalError as e:
                if getattr(e.orig, "sqlite_errorname", None) != _BUSY or time.monotonic() >= until_s:
                    raise
            else:
                return
