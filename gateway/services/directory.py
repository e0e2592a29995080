"""Who holds which key, within which limits, and the catalogue, as this process knows them: never too old.

The storage counts changes in one number, the version. What was read at a version stays true while the version stays the
same, so it is kept; and it is used only if the version was confirmed by a query sent within the last `MAX_AGE_S`. A
change therefore reaches every process within that time, and a storage that does not answer means `StorageDown` rather
than yesterday's keys. Knows nothing of secrets, or of what a holder may do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from gateway.domain.tenancy import KeyHolder
from gateway.errors import StorageDown
from gateway.services.catalog import Listing
from gateway.services.holders import read_holder
from gateway.services.ports import Clock, Readiness
from gateway.services.stores import ChangeFeed, Storage, Work

MAX_AGE_S = 1.0
ASK_EVERY_S = 0.5
QUERY_S = 2.0
"""What the storage gets for an answer, the wait for its turn included. Who joins a query that is on its way learns what
was so up to this long ago, which is the bound that is promised for a revocation."""
UNREADY_AFTER_S = 2.0
MAX_HOLDERS = 10_000
MAX_UNKNOWN = 10_000
"""Kept apart from the holders, so that a flood of made-up keys does not push out the real ones."""
MAX_LOOKUPS = 4
"""Keys that are looked up at a time; further ones wait for `QUERY_S` at most. However many made-up keys come in, they
are no more load on the storage than that."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Directory:
    """Holders by public id, and the catalogue.

    Works without `running`, too: then every use of something older than `MAX_AGE_S` asks for the version itself.

    Args:
        feed: tells of changes at once; None leaves it to asking.
    """

    def __init__(self, storage: Storage, feed: ChangeFeed | None, clock: Clock) -> None:
        self._storage = storage
        self._feed = feed
        self._clock = clock
        self._version: int | None = None
        self._confirmed = -math.inf
        self._holders: OrderedDict[str, KeyHolder] = OrderedDict()
        self._unknown: OrderedDict[str, None] = OrderedDict()
        self._listing: Listing | None = None
        self._flights: dict[str, asyncio.Task[Any]] = {}
        self._turns = asyncio.Semaphore(MAX_LOOKUPS)
        self._news = asyncio.Event()
        self._moved = asyncio.Event()

    def cached(self, public_id: str) -> KeyHolder | None:
        """The holder if that is known for sure right now; None says nothing, and `find` has to be asked."""
        if self._clock.monotonic() - self._confirmed > MAX_AGE_S:
            return None
        return self._kept(public_id)

    async def find(self, public_id: str) -> KeyHolder | None:
        """The holder of a key with limits and top-ups, None if there is no such key. Raises `StorageDown`."""
        await self._be_sure()
        holder = self._kept(public_id)
        if holder is not None:
            return holder
        if public_id in self._unknown:
            return None
        return await self._once(f"key {public_id}", lambda: self._look_up(public_id))

    async def listing(self) -> Listing:
        """Models, aliases and prices. Raises `StorageDown`."""
        await self._be_sure()
        if self._listing is not None:
            return self._listing
        return await self._once("listing", self._load_listing)

    async def version_after(self, seen: int | None) -> int:
        """Wait, while it is `running`, until another version than this one is confirmed; None is no version."""
        while self._version is None or self._version == seen:
            await self._moved.wait()
        return self._version

    def readiness(self) -> Readiness:
        is_ready = self._clock.monotonic() - self._confirmed <= UNREADY_AFTER_S
        return Readiness(is_ready, "" if is_ready else "the database does not answer")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps asking for the version meanwhile. Entering does not wait for an answer; `readiness` tells."""
        tasks = [asyncio.create_task(self._keep_asking())]
        if self._feed is not None:
            tasks.append(asyncio.create_task(self._listen(self._feed)))
        try:
            yield
        finally:
            tasks += self._flights.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _kept(self, public_id: str) -> KeyHolder | None:
        holder = self._holders.get(public_id)
        if holder is not None:
            self._holders.move_to_end(public_id)
        return holder

    async def _be_sure(self) -> None:
        """On return what is kept was confirmed within `MAX_AGE_S`, or while this waited."""
        if self._clock.monotonic() - self._confirmed > MAX_AGE_S:
            await self._once("version", self._ask)

    async def _once(self, name: str, query: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer to the query of this name, joining one that is on its way. Each who waits can be cancelled."""
        flight: asyncio.Task[T] | None = self._flights.get(name)
        if flight is None or flight.done():
            flight = self._flights[name] = asyncio.create_task(_in_time(query()))
            flight.add_done_callback(lambda task: self._landed(name, task))
        return await asyncio.shield(flight)

    def _landed(self, name: str, flight: asyncio.Task[Any]) -> None:
        if self._flights.get(name) is flight:
            del self._flights[name]
        if not flight.cancelled():
            flight.exception()  # all who waited may be gone; an error nobody looked at would be reported

    async def _ask(self) -> None:
        sent = self._clock.monotonic()
        async with self._storage.reading() as work:
            version = await work.version()
        self._confirm(version, sent)

    async def _look_up(self, public_id: str) -> KeyHolder | None:
        async def holder_of(work: Work) -> KeyHolder | None:
            return await read_holder(work, public_id, int(self._clock.time() * 1000))

        def keep(holder: KeyHolder | None) -> None:
            if holder is None:
                _put(self._unknown, public_id, None, MAX_UNKNOWN)
            else:
                _put(self._holders, public_id, holder, MAX_HOLDERS)

        async with self._turns:
            return await self._read(holder_of, keep)

    async def _load_listing(self) -> Listing:
        async def listing_of(work: Work) -> Listing:
            return Listing.of(await work.catalog.models(), await work.catalog.aliases(), await work.catalog.prices())

        def keep(listing: Listing) -> None:
            self._listing = listing

        return await self._read(listing_of, keep)

    async def _read(self, query: Callable[[Work], Awaitable[T]], keep: Callable[[T], None]) -> T:
        """Ask for the version and something else in one transaction; keep the answer if it is of the present version.

        The version comes first: should the storage's view move between the two, the answer is newer than its label,
        and the next confirmation throws it away.
        """
        sent = self._clock.monotonic()
        async with self._storage.reading() as work:
            version = await work.version()
            answer = await query(work)
        self._confirm(version, sent)
        if version == self._version:
            keep(answer)
        return answer

    def _confirm(self, version: int, sent: float) -> None:
        """Answers may overtake each other. A lower version in a later answer is a database that was set back."""
        if version == self._version:
            self._confirmed = max(self._confirmed, sent)
        elif self._version is None or version > self._version or sent > self._confirmed:
            self._version, self._confirmed = version, sent
            self._holders.clear()
            self._unknown.clear()
            self._listing = None
            self._moved.set()
            self._moved = asyncio.Event()

    async def _keep_asking(self) -> None:
        """Not through `_once`: a query that was on its way before the news may have an answer from before."""
        is_answering = True
        while True:
            self._news.clear()
            try:
                await _in_time(self._ask())
                is_answering = True
            except StorageDown:
                if is_answering:
                    _log.warning("the database does not answer")
                is_answering = False
            except Exception:  # noqa: BLE001 - a bug of ours must not end the asking, or every request had to ask
                _log.exception("asking for the version failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_EVERY_S):
                    await self._news.wait()

    async def _listen(self, feed: ChangeFeed) -> None:
        try:
            async for _ in feed.heard():
                self._news.set()
        except Exception:  # noqa: BLE001 - a bug of ours, since a feed never ends; the asking goes on without it
            _log.exception("listening for changes failed")


async def _in_time(query: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(QUERY_S):
            return await query
    except TimeoutError:
        raise StorageDown from None


def _put(kept: OrderedDict[str, T], public_id: str, value: T, limit: int) -> None:
    kept[public_id] = value
    if len(kept) > limit:
        kept.popitem(last=False)
