"""What the administering commands share: the use cases over the configured database, and who it is that uses them."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gateway.commands.options import in_options
from gateway.errors import EvenhandError, StorageDown
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.settings import Settings
from gateway.settings_sources import load_settings

if TYPE_CHECKING:
    from gateway.storage.database import Database

T = TypeVar("T")


class CommandError(Exception):
    """A command was refused, or could not be carried out; the message is one line for people."""


def administer(config: Path | None, work: Callable[[Administration, Actor], Awaitable[T]]) -> T:
    """Do `work` with the settings' database, brought up to date; what it returns.

    Raises:
        CommandError: it is refused, or the database does not answer.
        SettingsError, PepperError, UnusableDatabase: what is set up cannot work.
    """

    async def run() -> T:
        async with opened(load_settings(config).settings) as (_, administration):
            return await work(administration, Actor(f"cli:{_user()}"))

    return asyncio.run(run())


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[tuple[Database, Administration]]:
    """The database, brought up to date, and the use cases over it. Raises as `administer`."""
    # Here, and not at the top: these take a second, which commands that need no database shall not wait.
    from gateway.clock import SystemClock
    from gateway.commands.storage_down import explain
    from gateway.pepper_file import load_peppers
    from gateway.storage import schema
    from gateway.storage.opening import open_database, open_feed
    from gateway.telemetry.logging import configure_logging

    configure_logging(settings.log.level)
    peppers = load_peppers(settings)
    try:
        async with AsyncExitStack() as stack:
            database, feed = open_database(settings), open_feed(settings)
            stack.push_async_callback(database.close)
            if feed is not None:
                stack.push_async_callback(feed.close)
            await schema.migrate(database)
            yield database, Administration.over(database, feed, peppers, SystemClock())
    except StorageDown as e:
        raise CommandError(explain(e, settings)) from e
    except EvenhandError as e:
        raise CommandError(in_options(e)) from e


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
    return name.encode("utf-8", "replace").decode()
