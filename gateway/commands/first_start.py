"""What ``evenhand serve`` does to the database before it starts anything: bring it up to date, fill an empty one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from gateway.clock import SystemClock
from gateway.pepper_file import load_peppers
from gateway.services import demo
from gateway.settings import Settings
from gateway.storage import schema
from gateway.storage.opening import open_database, open_feed


def first_start(settings: Settings) -> Sequence[tuple[str, str]]:
    """The keys that were made, as (team, raw key): none if there is an organization already.

    Raises:
        PepperError, UnusableDatabase: what is set up cannot work.
        StorageDown: the database does not answer.
    """
    return asyncio.run(_first_start(settings))


async def _first_start(settings: Settings) -> Sequence[tuple[str, str]]:
    peppers = load_peppers(settings)
    async with AsyncExitStack() as stack:
        database, feed = open_database(settings), open_feed(settings)
        stack.push_async_callback(database.close)
        if feed is not None:
            stack.push_async_callback(feed.close)
        await schema.migrate(database)
        keys = await demo.first_start(database, feed, peppers, SystemClock())
    return [(key.team, key.raw) for key in keys or ()]
