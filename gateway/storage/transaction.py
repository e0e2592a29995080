"""One transaction's way to the database: statements in, rows out, every failure told apart, every wait bounded.

Repositories know only this. Knows nothing of tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from enum import IntEnum
from typing import Any, cast

from sqlalchemy import Executable, Select, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import Conflict, StorageDown
from gateway.storage.errors import ANY_FAILURE, is_duplicate, may_pass

Row = Mapping[str, Any]
"""Column → value."""
Parameters = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

_IDLE_MS = "30000"
"""A transaction whose process does nothing for so long, because it is stopped, say, is ended by PostgreSQL: others may
wait for it."""
LONG_S = 600.0
"""Bound of each wait for a statement that looks at the whole ledger."""


class Turn(IntEnum):
    """What only one transaction at a time may do: the numbers of PostgreSQL's advisory locks in our database."""

    CHANGE = 0x6576_6801
    ROLL_UP = 0x6576_6802
    MIGRATE = 0x6576_6803


class Transaction:
    """Statements of one transaction, one at a time. Every method raises `StorageDown` if the database does not answer.

    Attributes:
        is_postgresql: else it is SQLite, whose writers take turns anyway.
        is_writing: it may change something.
        is_aborted: a call took too long, so the connection was cut.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        *,
        give_back: AsyncExitStack,
        is_writing: bool,
        limit_s: float,
        abort: Callable[[], None] | None,
    ) -> None:
        """
        Args:
            give_back: gives the connection back to where it came from.
            limit_s: bound of a call, unless it says otherwise.
            abort: cuts the connection, whereupon a call that waits for it fails at once; this is what happens to a call
                that takes too long. None where calls cannot hang.
        """
        self.is_postgresql = connection.dialect.name == "postgresql"
        self.is_writing = is_writing
        self.is_aborted = False
        self._connection = connection
        self._give_back = give_back
        self._limit_s = limit_s
        self._abort = abort

    async def begin(self) -> None:
        """Called first, and once."""
        with self._bounded():
            await self._connection.begin()
            if self.is_postgresql:
                limit_ms = str(int(self._limit_s * 1000))
                settings = {"idle_in_transaction_session_timeout": _IDLE_MS, "lock_timeout": limit_ms}
                await self._connection.execute(
                    select(*(func.set_config(name, value, True) for name, value in settings.items()))
                )

    async def commit(self) -> None:
        with self._bounded():
            await self._connection.commit()

    async def close(self) -> None:
        """Give the connection back; what is not committed is undone. Cancelling does not keep it from that.

        Never raises for the database: nobody can do more about a connection that is lost now.
        """
        with suppress(StorageDown), self._bounded():
            await self._give_back.aclose()

    async def rows(self, statement: Executable, *, limit_s: float | None = None) -> Sequence[Row]:
        with self._bounded(limit_s):
            return cast("Sequence[Row]", (await self._connection.execute(statement)).mappings().all())

    async def row(self, statement: Executable) -> Row | None:
        """The only row, or None."""
        with self._bounded():
            return cast("Row | None", (await self._connection.execute(statement)).mappings().one_or_none())

    async def scalar(self, statement: Executable) -> Any:
        """The only value of the only row."""
        with self._bounded():
            return (await self._connection.execute(statement)).scalar_one()

    async def run(self, statement: Executable, parameters: Parameters = None) -> int:
        """How many rows it was about."""
        with self._bounded():
            return (await self._connection.execute(statement, parameters)).rowcount

    async def run_returning(self, statement: Executable, parameters: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """What the statement returns, first column only, over all sets of parameters."""
        with self._bounded():
            return (await self._connection.execute(statement, parameters)).scalars().all()

    async def run_unique(self, statement: Executable, conflict: str) -> int:
        """As `run`; raises `Conflict` with that message if a unique key refuses. The transaction goes on either way."""
        try:
            with self._bounded():
                async with self._connection.begin_nested():
                    return (await self._connection.execute(statement)).rowcount
        except IntegrityError as e:
            if is_duplicate(e):
                raise Conflict(conflict) from None
            raise

    async def stream(self, statement: Executable) -> AsyncIterator[Row]:
        """Rows as they come, for answers that do not fit in memory."""
        with self._bounded(LONG_S):
            result = (await self._connection.stream(statement)).mappings()
        try:
            while True:
                with self._bounded(LONG_S):
                    rows = await result.fetchmany(500)
                if not rows:
                    return
                for row in rows:
                    yield cast("Row", row)
        finally:
            with self._bounded():
                await result.close()

    def insert(self, table: Table) -> postgresql.Insert | sqlite.Insert:
        """An insert that knows ON CONFLICT: both databases spell it alike, SQLAlchemy has one each."""
        return postgresql.insert(table) if self.is_postgresql else sqlite.insert(table)

    def locking(self, statement: Select[Any]) -> Select[Any]:
        """Where it may change something: the rows stay as they were read until it ends, so that of two changes to one
        object the second sees the first."""
        return statement.with_for_update() if self.is_writing else statement

    async def take_turn(self, turn: Turn) -> None:
        """Wait until no other transaction has the turn, and keep it to the end. Taking it again is free."""
        if self.is_postgresql:
            await self.scalar(select(func.pg_advisory_xact_lock(turn.value)))

    async def try_turn(self, turn: Turn) -> bool:
        """As `take_turn`, but do not wait; whether it has the turn."""
        if self.is_postgresql:
            return bool(await self.scalar(select(func.pg_try_advisory_xact_lock(turn.value))))
        return True

    @contextmanager
    def _bounded(self, limit_s: float | None = None) -> Iterator[None]:
        timer = None
        if self._abort is not None:
            timer = asyncio.get_running_loop().call_later(limit_s or self._limit_s, self._cut)
        try:
            with told_apart():
                yield
        finally:
            if timer is not None:
                timer.cancel()

    def _cut(self) -> None:
        assert self._abort is not None
        self.is_aborted = True
        self._abort()


@contextmanager
def told_apart() -> Iterator[None]:
    """Turn failures that may pass into `StorageDown`, with the cause; leave the others as they are."""
    try:
        yield
    except ANY_FAILURE as e:
        if may_pass(e):
            raise StorageDown from e
        raise
