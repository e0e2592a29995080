"""Answering a call: as server-sent events while it runs, or whole when it is over.

Both are ASGI applications that a handler returns, so they run in the request's own task, own the call from start to
settlement, and notice a client that leaves at any moment. Bytes in, bytes out: what an event looks like on the wire is
the writer's business, so every protocol streams through here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import structlog
from litestar.types import Receive, Scope, Send

from gateway.domain.events import GenerationEvent
from gateway.domain.usage import TokenUsage
from gateway.errors import ClientGone, EvenhandError, InternalError, Unavailable
from gateway.services.call import Call
from gateway.web.disconnect import ClientWatch
from gateway.web.errors import error_body, error_headers
from gateway.web.limit_headers import limit_headers

_log = structlog.get_logger()

LAST_WORD_S = 1.0
"""How long a stream that is cut by our shutdown waits for its reader to take the reason."""

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class StreamWriter(Protocol):
    """One protocol's events, as complete bytes of server-sent events."""

    @property
    def heartbeat(self) -> bytes: ...

    def write(self, events: Sequence[GenerationEvent]) -> bytes:
        """May be empty if there is nothing to tell."""

    def finish(self, usage: TokenUsage) -> bytes:
        """What comes after the last event."""

    def error(self, error: EvenhandError) -> bytes:
        """What ends a stream that cannot be completed."""


class AnswerWriter(Protocol):
    """One protocol's answer in one piece."""

    def add(self, events: Sequence[GenerationEvent]) -> None: ...

    def finish(self, usage: TokenUsage) -> bytes: ...


class EventStream:
    """Streams a call.

    The headers go out, with a first heartbeat, as soon as the engine has the request. Until then an error is an answer
    with its status; from then on it is an event in the stream, so that no stream ever just stops.
    """

    def __init__(self, call: Call, writer: StreamWriter, heartbeat_s: float) -> None:
        self._call = call
        self._writer = writer
        self._heartbeat_s = heartbeat_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        channel = _Channel(send, self._writer.heartbeat, self._heartbeat_s)
        try:
            async with self._call as call, ClientWatch(receive), channel.with_headers(limit_headers(call.grant)):
                await channel.relay(call, self._writer.write)
                await channel.close(self._writer.finish(call.usage))
        except ClientGone:
            return
        except asyncio.CancelledError:
            await self._say_why(channel, Unavailable("The server is shutting down."))
            raise
        except Exception as e:
            if not channel.has_begun:
                raise
            if not isinstance(e, EvenhandError):
                # Our own bug. The framework could no longer answer, since the headers are out.
                _log.error("stream.failed", exc_info=e)
            if channel.is_open:
                await channel.close(self._writer.error(e if isinstance(e, EvenhandError) else InternalError()))

    async def _say_why(self, channel: _Channel, error: EvenhandError) -> None:
        if channel.is_open:
            last_word = asyncio.ensure_future(channel.close(self._writer.error(error)))
            await asyncio.wait({last_word}, timeout=LAST_WORD_S)
            last_word.cancel()


class WholeAnswer:
    """Runs a call to its end and answers with JSON. An error on the way is an answer with its status."""

    def __init__(self, call: Call, writer: AnswerWriter) -> None:
        self._call = call
        self._writer = writer

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        try:
            async with self._call as call:
                async with ClientWatch(receive):
                    async for events in call:
                        self._writer.add(events)
                body = self._writer.finish(call.usage)
                headers = [
                    (b"content-type", b"application/json"),
                    (b"content-length", b"%d" % len(body)),
                    *limit_headers(call.grant),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                has_begun = True
                await send({"type": "http.response.body", "body": body, "more_body": False})
        except ClientGone:
            return
        except asyncio.CancelledError:
            if not has_begun:
                await _say_shutdown(send)
            raise


async def _say_shutdown(send: Send) -> None:
    """The answer of a request that our shutdown cuts before it has begun to answer."""
    error = Unavailable("The server is shutting down.")
    headers = [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    headers.append((b"content-type", b"application/json"))

    async def answer() -> None:
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": error_body(error), "more_body": False})

    last_word = asyncio.ensure_future(answer())
    await asyncio.wait({last_word}, timeout=LAST_WORD_S)
    last_word.cancel()


class _Channel:
    """The sending side of one stream: one write at a time, and a sign of life when it has been quiet.

    Entering it sends the headers; inside it has heartbeats; it can be closed with a last word inside or afterwards. The
    heartbeat is a timer and costs nothing per write. A write that waits for a slow reader holds up the call, whose
    events wait in the engine's client; a heartbeat is left out then.

    Attributes:
        has_begun: the headers are out or on their way.
        is_open: it can still be written to.
    """

    def __init__(self, send: Send, heartbeat: bytes, heartbeat_s: float) -> None:
        self._send = send
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        self._is_writing = False
        self._written_at = 0.0
        self._headers: Sequence[tuple[bytes, bytes]] = _STREAM_HEADERS
        self.has_begun = False
        self.is_open = False

    def with_headers(self, headers: Sequence[tuple[bytes, bytes]]) -> Self:
        """To be sent besides those of every stream."""
        if headers:
            self._headers = [*_STREAM_HEADERS, *headers]
        return self

    async def __aenter__(self) -> None:
        self.has_begun = self.is_open = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self.write(self._heartbeat)
        self._timer = self._loop.call_later(self._heartbeat_s, self._on_timer)

    async def relay(
        self, events: AsyncIterator[Sequence[GenerationEvent]], encode: Callable[[Sequence[GenerationEvent]], bytes]
    ) -> None:
        """Write what the events are as bytes, to their end. The same as `write` for each, without a call for each."""
        send, time = self._send, self._loop.time
        async for some in events:
            data = encode(some)
            if not data:
                continue
            if self._beat is not None:
                await asyncio.wait({self._beat})
                self._beat = None
            self._is_writing = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._is_writing = False
            self._written_at = time()

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if self._beat is not None:
            await asyncio.wait({self._beat})
            self._beat = None
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_writing = False
        self._written_at = self._loop.time()

    async def close(self, data: bytes) -> None:
        """The last write; the stream is complete afterwards."""
        self.is_open = False
        await self.write(data, more=False)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()

    def _on_timer(self) -> None:
        due = self._written_at + self._heartbeat_s
        now = self._loop.time()
        if now >= due:
            due = now + self._heartbeat_s
            is_busy = self._is_writing or (self._beat is not None and not self._beat.done())
            if not is_busy:
                self._beat = self._loop.create_task(self._send_heartbeat())
        self._timer = self._loop.call_at(due, self._on_timer)

    async def _send_heartbeat(self) -> None:
        await self._send({"type": "http.response.body", "body": self._heartbeat, "more_body": True})
        self._written_at = self._loop.time()
