"""``evenhand migrate``: the database's tables, from settings."""

from __future__ import annotations

import asyncio
import sys

from gateway.errors import StorageDown
from gateway.settings import Settings
from gateway.storage.opening import open_database
from gateway.storage.schema import HEAD, migrate


def run(settings: Settings, revision: str | None) -> int:
    """Bring the database to a revision, the newest if none is given, and print it; the exit code.

    Raises:
        UnusableDatabase: the address or the revision is wrong, or the database belongs to a newer version.
    """
    try:
        reached = asyncio.run(_migrate(settings, revision or HEAD))
    except StorageDown as e:
        print(f"evenhand: the database does not answer: {_why(e)}", file=sys.stderr)  # noqa: T201
        return 1
    print(reached)  # noqa: T201
    return 0


async def _migrate(settings: Settings, revision: str) -> str:
    database = open_database(settings)
    try:
        return await migrate(database, revision)
    finally:
        await database.close()


def _why(error: StorageDown) -> str:
    """The driver's own words, which name host and user but never the password."""
    cause = error.__cause__
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
