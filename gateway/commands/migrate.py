"""``evenhand migrate``: the database's tables, from settings."""

from __future__ import annotations

import asyncio
import sys

from gateway.commands.storage_down import explain
from gateway.errors import StorageDown
from gateway.settings import Settings
from gateway.storage.errors import MigrationRefused
from gateway.storage.opening import open_database
from gateway.storage.schema import HEAD, migrate


def run(settings: Settings, revision: str | None, *, may_lose: bool = False) -> int:
    """Bring the database to a revision, the newest if none is given, and print it; the exit code.

    Args:
        may_lose: go down, too, which deletes what only the later revision has room for.

    Raises:
        UnusableDatabase: the address or the revision is wrong, or the database belongs to a newer version.
    """
    try:
        reached = asyncio.run(_migrate(settings, revision or HEAD, may_lose))
    except StorageDown as e:
        return _refuse(explain(e, settings))
    except MigrationRefused as e:
        return _refuse(f"{e}; stop all servers, make a backup, and give --yes if that is meant")
    print(reached)  # noqa: T201
    return 0


async def _migrate(settings: Settings, revision: str, may_lose: bool) -> str:
    database = open_database(settings)
    try:
        return await migrate(database, revision, may_lose=may_lose)
    finally:
        await database.close()


def _refuse(why: str) -> int:
    print(f"evenhand: {why}", file=sys.stderr)  # noqa: T201
    return 1
