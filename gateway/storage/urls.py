"""The setting `database.url`, read: SQLite and a file, or PostgreSQL and what its driver is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gateway.storage.errors import UnusableDatabase

FILE_NAME = "evenhand.db"
"""In the home, if no other place is chosen."""


@dataclass(frozen=True, slots=True)
class SqliteFile:
    path: Path


@dataclass(frozen=True, slots=True)
class PostgresqlServer:
    """`dsn` is what libpq calls a connection URI, so `sslmode`, several hosts and so on mean what they mean there."""

    dsn: str = field(repr=False)


def read_url(url: str | None, home: Path) -> SqliteFile | PostgresqlServer:
    """Where the database is; None is the file in the home.

    Raises:
        UnusableDatabase: no such kind of database, or no file or server is named. Does not quote the address, which
            may hold a password.
    """
    if url is None:
        return SqliteFile(home / FILE_NAME)
    scheme, separator, rest = url.partition("://")
    kind, _, driver = scheme.partition("+")
    if separator and kind in ("postgresql", "postgres") and driver in ("", "asyncpg"):
        return PostgresqlServer(_checked(f"postgresql://{rest}"))
    if separator and kind == "sqlite" and driver in ("", "aiosqlite"):
        path = unquote(rest.removeprefix("/"))
        if not rest.startswith("/") or path in ("", ":memory:") or "?" in rest:
            raise UnusableDatabase("database.url: SQLite needs a file and nothing else, as in sqlite:////folder/file")
        return SqliteFile(Path(path))
    raise UnusableDatabase("database.url: begins neither with postgresql:// nor with sqlite:////")


def _checked(dsn: str) -> str:
    try:
        parts = urlsplit(dsn)
        named = parts.path.strip("/") or "dbname=" in parts.query or "database=" in parts.query
        _ = "," in parts.netloc or parts.port  # several hosts have ports of their own, which the driver reads
    except ValueError:
        raise UnusableDatabase(
            "database.url: is no address; characters like @ / : in a password are written %40 …"
        ) from None
    if not named:
        raise UnusableDatabase("database.url: names no database, as in postgresql://user:password@host/evenhand")
    return dsn
