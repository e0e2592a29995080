"""The database's tables brought to the revision that this version needs, or to another one.

Processes that do it at once take turns, and each move is one transaction: it happens whole or not at all.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from gateway.storage.database import Database
from gateway.storage.errors import MigrationRefused, SchemaError

HEAD = "head"
BASE = "base"
_FOLDER_IN_WHEEL = "_migrations"


def migrations_folder() -> Path:
    """Within the package where a wheel was installed, else at the root of the checkout."""
    packaged = Path(__file__).parent / _FOLDER_IN_WHEEL
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "migrations"


async def migrate(database: Database, revision: str = HEAD, *, may_lose: bool = True) -> str:
    """Go up or down to a revision (``head``: the newest, ``base``: no tables); the one it is at then.

    Args:
        may_lose: go down, too, where what only the later revision has room for is deleted.

    Raises:
        MigrationRefused: it is down, and it may not be.
        SchemaError: there is no such revision, or the database is at one that this version does not know.
        StorageDown: the database does not answer.
    """
    script = ScriptDirectory(str(migrations_folder()))
    chain = _chain(script)
    target = script.get_current_head() if revision == HEAD else revision
    if target not in chain:
        raise SchemaError(f"there is no revision {revision!r}; there are {', '.join(chain)} and {HEAD}")
    async with database.migrating() as connection:
        return await connection.run_sync(_move, chain, target, may_lose)


def newest() -> str:
    """The revision that this version needs."""
    return _chain(ScriptDirectory(str(migrations_folder())))[-1]


async def current(database: Database) -> str:
    """The revision that the database is at, ``base`` if it has no tables of ours.

    Raises:
        SchemaError: one that this version does not know.
        StorageDown: the database does not answer.
    """
    chain = _chain(ScriptDirectory(str(migrations_folder())))
    async with database.migrating() as connection:
        return await connection.run_sync(_current, chain)


def _chain(script: ScriptDirectory) -> list[str]:
    """All revisions from the first to the newest; there are no branches."""
    return [BASE, *reversed([each.revision for each in script.walk_revisions()])]


def _current(connection: Connection, chain: list[str]) -> str:
    revision = MigrationContext.configure(connection).get_current_revision() or BASE
    if revision not in chain:
        raise SchemaError(
            f"the database is at revision {revision!r}, which this version of Evenhand does not know: a newer version "
            "has been at it. Run that one, or let it bring the database back with 'evenhand migrate REVISION'."
        )
    return revision


def _move(connection: Connection, chain: list[str], target: str, may_lose: bool) -> str:
    before = _current(connection, chain)
    way = chain.index(target) - chain.index(before)
    if way < 0 and not may_lose:
        lost = "all keys, the ledger and the audit" if target == BASE else "what only the later one has room for"
        raise MigrationRefused(f"going down from revision {before} to {target} deletes {lost}")
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    if way > 0:
        command.upgrade(config, target)
    elif way < 0:
        command.downgrade(config, target)
    return target
