"""What ``evenhand serve`` does to the database: bring it up to date before it starts anything, fill an empty one after.

The first keys are made only when everything runs, by somebody who prints them at once: a start that fails would leave
keys that nobody has ever seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from gateway.clock import SystemClock
from gateway.domain.credential import Peppers
from gateway.pepper_file import load_peppers
from gateway.services import demo
from gateway.settings import Settings
from gateway.storage import schema
from gateway.storage.opening import open_database, open_feed


def prepare_database(settings: Settings) -> Peppers:
    """Bring the tables up to date; the peppers, which are made if there are none.

    Raises:
        PepperError, UnusableDatabase: what is set up cannot work.
        StorageDown: the database does not answer.
    """
    peppers = load_peppers(settings)
    asyncio.run(_migrate(settings))
    return peppers


async def _migrate(settings: Settings) -> None:
    database = open_database(settings)
    try:
        await schema.migrate(database)
    finally:
        await database.close()


def make_first_keys(settings: Settings, peppers: Peppers) -> Sequence[tuple[str, str]]:
    """The keys that were made, as (team, raw key): none if there is an organization already.

    Not for a thread with an event loop. Raises `StorageDown` as well as `UnusableDatabase`.
    """
    return asyncio.run(_make_first_keys(settings, peppers))


async def _make_first_keys(settings: Settings, peppers: Peppers) -> Sequence[tuple[str, str]]:
    async with AsyncExitStack() as stack:
        database, feed = open_database(settings), open_feed(settings)
        stack.push_async_callback(database.close)
        if feed is not None:
            stack.push_async_callback(feed.close)
        keys = await demo.first_start(database, feed, peppers, SystemClock())
    return [(key.team, key.raw) for key in keys or ()]
