"""What can be wrong with a database that no retry would cure, and which failures of SQLAlchemy a retry may cure."""

from __future__ import annotations

from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

_OUR_BUGS = ("22", "23", "42", "54")
"""Classes of SQLSTATE that blame the statement, not the moment: data, constraints, syntax or rights, size."""
_UNIQUE_POSTGRESQL = "23505"
_WRONG_SQLITE = "SQLITE_ERROR"
"""A missing table, say; a locked file, a full disk and so on have names of their own."""
_UNIQUE_SQLITE = ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY")

ANY_FAILURE = (SQLAlchemyError, OSError)
"""What a call into the database may raise. A refused connection is an OSError, and so is a time-out."""


class UnusableDatabase(Exception):
    """The database cannot be used, and waiting will not help; the message is one line for people."""


class SchemaError(UnusableDatabase):
    """The database's tables are not those that this version needs."""


class MigrationRefused(Exception):
    """Going there would drop tables, and nobody has said that this is meant."""


def may_pass(error: BaseException) -> bool:
    """Whether a failed call means that the database does not answer now, rather than that the call was wrong.

    Lost and refused connections, time-outs, deadlocks, a full disk and a server that starts or stops.
    """
    if isinstance(error, DBAPIError):
        if error.connection_invalidated:
            return True
        state = getattr(error.orig, "sqlstate", None)
        return not (
            isinstance(error, DataError | IntegrityError | ProgrammingError | NotSupportedError)
            or (state is not None and state.startswith(_OUR_BUGS))
            or getattr(error.orig, "sqlite_errorname", None) == _WRONG_SQLITE
        )
    return isinstance(error, PoolTimeout | OSError)


def is_duplicate(error: IntegrityError) -> bool:
    """Whether it was a unique or primary key that refused."""
    cause = error.orig
    return (
        getattr(cause, "sqlstate", None) == _UNIQUE_POSTGRESQL
        or getattr(cause, "sqlite_errorname", None) in _UNIQUE_SQLITE
    )
