"""One connection to Redis that any number of calls share. Knows nothing of what is asked.

Redis answers in the order it was asked in, so a call is a write and a place in a queue. redis-py takes a connection
from a pool, a task and two timers for each, several times the work; here it reads addresses and makes TLS contexts.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import Any, cast

import hiredis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection

_MORE = object()
_log = logging.getLogger(__name__)


class ErrorReply(Exception):
    """Redis answers, and says no."""


def _packed(words: tuple[bytes | str | int, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # its stub means a tuple of any length
    return packed


class Line:
    """
    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, as redis-py reads them.
        connect_s: for a connection to stand and to have told the time.
        answer_s: for an answer.
    """

    def __init__(self, url: str, *, connect_s: float, answer_s: float) -> None:
        self._address = ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
        self._connect_s = connect_s
        self._answer_s = answer_s
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self._wire is not None and not self._wire.is_lost

    @property
    def run_id(self) -> str:
        """Of the Redis at the other end: another one in each of its lives."""
        return "" if self._wire is None else self._wire.run_id

    async def connect(self) -> None:
        """Raises OSError, TimeoutError. Goes on if whoever waits for it gives up."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            # Whoever waits may have given up by then; asyncio would complain that nobody heard of the failure.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._connecting)

    def call(self, *words: bytes | str | int) -> asyncio.Future[Any]:
        """The answer: an int, bytes, None, or a list of them.

        Raises OSError if the connection is or gets lost, TimeoutError, ErrorReply. Except for the last, what was asked
        may be carried out all the same, now or later.
        """
        if self._wire is None:
            raise ConnectionResetError("not connected")
        return self._wire.ask(_packed(words))

    def latest_ms(self) -> int:
        """What Redis' clock says, by all that is known, when the time for a call made now is over; or a bit less."""
        return 0 if self._wire is None else self._wire.redis_ms() + int(1000 * self._answer_s)

    def heard_ms(self, redis_ms: int) -> None:
        """Redis has told the time."""
        if self._wire is not None:
            self._wire.heard_ms(redis_ms)

    def drop(self) -> None:
        """The next call connects anew."""
        if self._wire is not None:
            self._wire.lose()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._wire is not None:
            await self._wire.close()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                wire = await self._open()
                try:
                    await wire.greet(self._address)
                except BaseException:
                    wire.lose()
                    raise
            self._wire = wire
        finally:
            self._connecting = None

    async def _open(self) -> _Wire:
        loop = asyncio.get_running_loop()
        address = self._address
        if isinstance(address, UnixDomainSocketConnection):
            _, wire = await loop.create_unix_connection(lambda: _Wire(self._answer_s), address.path)
        else:
            assert isinstance(address, Connection)
            context = address.ssl_context.get() if isinstance(address, SSLConnection) else None
            _, wire = await loop.create_connection(
                lambda: _Wire(self._answer_s), address.host, address.port, ssl=context
            )
        return wire


class _Wire(asyncio.Protocol):
    def __init__(self, answer_s: float) -> None:
        self.is_lost = False
        self.run_id = ""
        self._answer_s = answer_s
        self._loop = asyncio.get_running_loop()
        self._gone = self._loop.create_future()
        self._reader = hiredis.Reader(replyError=ErrorReply, notEnoughData=_MORE)
        self._transport: asyncio.Transport
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        """With the time that each may take; those that took it stay, since their answers come all the same."""
        self._num_overdue = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ahead_ms = -math.inf

    async def greet(self, address: Any) -> None:
        """Say who we are, and ask for the time and who is there."""
        calls: list[tuple[str | int, ...]] = []
        if address.password:
            calls.append(("AUTH", address.username or "default", address.password))
        if address.db:
            calls.append(("SELECT", address.db))
        calls += [("INFO",), ("TIME",)]
        answers: list[Any] = await asyncio.gather(*(self.ask(_packed(call)) for call in calls), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, ErrorReply):
                raise ConnectionRefusedError(f"Redis takes no calls from us: {answer}")
            if isinstance(answer, BaseException):
                raise answer
        *_, info, (seconds, us) = answers
        said = dict(line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
        self.run_id = said.get("run_id", "")
        policy = said.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and said.get("maxmemory", "0") != "0":
            _log.error(
                "Redis may forget what quotas have used: its maxmemory-policy is %s, and must be noeviction", policy
            )
        self.heard_ms(int(seconds) * 1000 + int(us) // 1000)

    def ask(self, packed: bytes) -> asyncio.Future[Any]:
        if self.is_lost:
            raise ConnectionResetError("the connection to Redis is lost")
        self._transport.write(packed)
        future = self._loop.create_future()
        until = self._loop.time() + self._answer_s
        self._waiting.append((future, until))
        if self._timer is None:
            self._timer = self._loop.call_at(until, self._look)
        return future

    def heard_ms(self, redis_ms: int) -> None:
        """The least delayed news counts, since what is heard late makes the clock seem slow."""
        self._ahead_ms = max(self._ahead_ms, redis_ms - 1000 * self._loop.time())

    def redis_ms(self) -> int:
        return int(1000 * self._loop.time() + self._ahead_ms)

    def lose(self) -> None:
        self.is_lost = True
        self._transport.abort()

    async def close(self) -> None:
        self.lose()
        await self._gone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not _MORE:
                self._answered(answer)
        except hiredis.ProtocolError:
            self.lose()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  (asyncio calls it)
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        for future, _ in self._waiting:
            if not future.done():
                future.set_exception(ConnectionResetError("the connection to Redis was lost"))
        self._waiting.clear()
        self._gone.set_result(None)

    def _answered(self, answer: Any) -> None:
        if not self._waiting:  # Redis says why it closes the connection
            self.lose()
            return
        future, _ = self._waiting.popleft()
        if self._num_overdue > 0:
            self._num_overdue -= 1
        if future.done():
            return
        if isinstance(answer, ErrorReply):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _look(self) -> None:
        """Give up what has taken too long, and the connection if it takes twice as long: nobody may be there any more,
        and nothing else would tell. Loops read what has come before they run timers, so one that was held up itself
        does not give up what is there.
        """
        now = self._loop.time()
        self._timer = None
        while self._num_overdue < len(self._waiting):
            future, until = self._waiting[self._num_overdue]
            if until > now:
                self._timer = self._loop.call_at(until, self._look)
                break
            self._num_overdue += 1
            if not future.done():
                future.set_exception(TimeoutError("Redis has not answered in its time"))
        if self._num_overdue > 0:
            last = self._waiting[0][1] + self._answer_s
            if now >= last:
                self.lose()
            elif self._timer is None:
                self._timer = self._loop.call_at(last, self._look)
