"""The gateway's line to one engine: kept up for as long as the gateway runs, whatever the engine process does.

One task connects, says hello, reads until the connection is lost, and begins again after a pause. Everything that was
in flight on a lost connection fails at once; the engine on the other end of a new connection knows nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.carriers.port import Channel, ClientCarrier
from engine.errors import EngineUnavailable, ProtocolError, RequestRejected
from engine.heartbeat import Heartbeat
from engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    CollectFinals,
    Finals,
    FromEngine,
    Hello,
    Output,
    Outputs,
    Ping,
    Pong,
    RaiseCap,
    Ready,
    Refused,
    Rejected,
    StandingQuery,
    StandingReply,
    Stats,
    StatsQuery,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)
from engine.standing import Standing
from engine.stream import OutputStream

logger = logging.getLogger(__name__)


_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """How patient a link is, in seconds.

    Attributes:
        ping_interval_s: between signs of life to the engine.
        silence_limit_s: an engine that says nothing for so long is taken for lost. Longer than any step, as an engine
            answers between steps only; a process that dies is noticed at once, without it.
        abort_timeout_s: for an abort to be confirmed.
        connect_timeout_s: for a connection to come about.
        backoff_min_s: pause before the first attempt to reconnect; doubles up to backoff_max_s.
    """

    ping_interval_s: float = 1.0
    silence_limit_s: float = 15.0
    abort_timeout_s: float = 15.0
    connect_timeout_s: float = 5.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0


class EngineLink:
    """One engine of a pool: its name, and the carrier that reaches it. Used from one event loop.

    Attributes:
        card: what the engine said of itself when it was last up; None if it never was.
    """

    def __init__(self, engine_id: str, carrier: ClientCarrier, *, times: LinkTimes | None = None) -> None:
        self.engine_id = engine_id
        self.card: Ready | None = None
        self._carrier = carrier
        self._times = times or LinkTimes()
        self._task: asyncio.Task[None] | None = None
        self._on_change: Callable[[], None] = _nobody
        self._client_id = ""
        self._channel: Channel | None = None
        self._up = False
        self._down_because = "it has not answered yet"
        self._num_received = 0
        self._backoff_s = self._times.backoff_min_s
        self._streams: dict[str, OutputStream] = {}
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[Stats | StandingReply]] = {}
        self._finals: deque[asyncio.Future[Finals]] = deque()

    @property
    def is_up(self) -> bool:
        """The engine has answered on the present connection."""
        return self._up

    @property
    def down_because(self) -> str:
        """Why the link is not up; for people."""
        return self._down_because

    def start(self, client_id: str, on_change: Callable[[], None]) -> None:
        """Begin to connect; on_change is called whenever `is_up` or `card` changes."""
        assert self._task is None, "a link is started once"
        self._client_id = client_id
        self._on_change = on_change
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"engine-link-{self.engine_id}")

    async def close(self) -> None:
        """End the connection; streams still open raise `EngineUnavailable`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._carrier.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> OutputStream:
        """Raises `EngineUnavailable` when the link is down, `RequestRejected` when the id is already in flight here."""
        request_id = submit.request_id
        if request_id in self._streams:
            raise RequestRejected("duplicate_request", f"request '{request_id}' is already running")
        self.send(submit)
        stream = OutputStream(request_id, submit.num_choices, self, self._times.abort_timeout_s)
        self._streams[request_id] = stream
        return stream

    def send(self, message: ToEngine) -> None:
        """Raises `EngineUnavailable` when the link is down."""
        if not self._up or self._channel is None:
            raise EngineUnavailable(f"engine '{self.engine_id}' is down: {self._down_because}")
        self._channel.send(encode(message))

    def abort(self, request_id: str) -> None:
        # On a lost connection the engine aborts by itself, and the stream fails once the reader has seen the loss.
        with contextlib.suppress(EngineUnavailable):
            self.send(Abort(self.engine_id, request_id))

    def raise_cap(self, request_id: str, output_cap: int) -> None:
        with contextlib.suppress(EngineUnavailable):  # as in `abort`
            self.send(RaiseCap(self.engine_id, request_id, output_cap))

    def has(self, request_id: str) -> bool:
        """The request was submitted here and has not ended."""
        return request_id in self._streams

    def forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    # --- questions --------------------------------------------------------------------------------------------------

    async def stats(self) -> Stats:
        """Raises `EngineUnavailable` when the link is down or goes down."""
        answer = await self._answer_to(StatsQuery(self.engine_id, next(self._query_ids)))
        assert isinstance(answer, Stats), "an answer has the number of its question"
        return answer

    async def standing(self, request_id: str, other_ids: Sequence[str]) -> Standing:
        """Raises `EngineUnavailable` when the link is down or goes down."""
        query = StandingQuery(self.engine_id, next(self._query_ids), request_id, tuple(other_ids))
        answer = await self._answer_to(query)
        assert isinstance(answer, StandingReply), "an answer has the number of its question"
        return answer.standing

    async def _answer_to(self, query: StatsQuery | StandingQuery) -> Stats | StandingReply:
        self.send(query)
        answer: asyncio.Future[Stats | StandingReply] = asyncio.get_running_loop().create_future()
        self._queries[query.query_id] = answer
        try:
            return await answer
        finally:
            self._queries.pop(query.query_id, None)

    async def collect_finals(self, acknowledge: Sequence[str], client_id: str = "") -> Finals:
        """Of this client, or of the one that is named. Raises `EngineUnavailable` when the link is or goes down."""
        self.send(CollectFinals(self.engine_id, tuple(acknowledge), client_id))
        answer: asyncio.Future[Finals] = asyncio.get_running_loop().create_future()
        self._finals.append(answer)
        return await answer

    # --- the connection ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._connect_and_serve()
                except EngineUnavailable as e:
                    self._go_down(str(e))
                except Exception:
                    # A bug of ours, or of a carrier. Streams must not hang because of it, nor the gateway stay cut off.
                    logger.exception("the link to engine %s failed", self.engine_id)
                    self._go_down("the gateway's link to it failed")
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(self._backoff_s * 2, self._times.backoff_max_s)
        finally:
            self._go_down("the gateway is closing", is_closing=True)

    async def _connect_and_serve(self) -> None:
        """Returns never; raises `EngineUnavailable` when the connection does not come about, or is lost."""
        channel = self._channel = await self._carrier.connect(self._times.connect_timeout_s)
        self._num_received = 0
        silence = f"it has said nothing for {self._times.silence_limit_s:g} s"
        heartbeat = Heartbeat(
            self._times.ping_interval_s,
            self._times.silence_limit_s,
            beat=self._ping,
            on_silence=functools.partial(channel.close, silence),
        )
        try:
            channel.send(encode(Hello(self.engine_id, self._client_id)))
            while True:
                for frame in await channel.receive():
                    self._num_received += 1
                    self._take(_decoded(frame))
                heartbeat.heard()
                # More may have come already: let the readers of streams have their turn first.
                await asyncio.sleep(0)
        finally:
            self._channel = None
            heartbeat.stop()
            channel.close()

    def _ping(self) -> None:
        with contextlib.suppress(EngineUnavailable):  # the reader sees the loss as well, and says so
            self.send(Ping(self.engine_id, self._num_received))

    def _take(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs=outputs):
                for output in outputs:
                    self._hand_over(output)
            case Rejected(request_id=request_id, code=code, message=text):
                rejected = self._streams.pop(request_id, None)
                if rejected is not None:
                    rejected.fail(RequestRejected(code, text))
            case Ready():
                self._come_up(message)
            case Stats(query_id=query_id) | StandingReply(query_id=query_id):
                _resolve(self._queries.pop(query_id, None), message)
            case Finals():
                _resolve(self._finals.popleft() if self._finals else None, message)
            case Refused(reason=reason):
                raise EngineUnavailable(f"it refuses this gateway: {reason}")
            case Pong():
                pass

    def _hand_over(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:
            stream.feed(output)
            if stream.ended:
                del self._streams[output.request_id]

    def _come_up(self, card: Ready) -> None:
        if card.version != PROTOCOL_VERSION:
            raise EngineUnavailable(f"it speaks protocol version {card.version}, this gateway {PROTOCOL_VERSION}")
        if self._up and self.card is not None and self.card.incarnation != card.incarnation:
            self._fail_all("it was replaced by another process")
        self.card = card
        self._up = True
        self._backoff_s = self._times.backoff_min_s
        logger.info("engine %s is up and serves %s", self.engine_id, card.model)
        self._on_change()

    def _go_down(self, reason: str, *, is_closing: bool = False) -> None:
        was_up, self._up, self._down_because = self._up, False, reason
        self._fail_all(reason)
        if was_up:
            if is_closing:
                logger.info("the connection to engine %s is closed", self.engine_id)
            else:
                logger.warning("engine %s is down: %s", self.engine_id, reason)
            self._on_change()

    def _fail_all(self, reason: str) -> None:
        """Everything in flight is lost."""
        text = f"engine '{self.engine_id}' was lost: {reason}"
        for stream in self._streams.values():
            stream.fail(EngineUnavailable(text))
        self._streams.clear()
        for asked in self._queries.values():
            _fail(asked, text)
        for asked_finals in self._finals:
            _fail(asked_finals, text)
        self._queries.clear()
        self._finals.clear()


def _decoded(frame: bytes) -> FromEngine:
    try:
        return decode_from_engine(frame)
    except ProtocolError as e:
        raise EngineUnavailable(f"it speaks another protocol: {e}") from e


def _resolve(answer: asyncio.Future[_Answer] | None, value: _Answer) -> None:
    """Nobody may wait any more: the question was given up."""
    if answer is not None and not answer.done():
        answer.set_result(value)


def _fail(answer: asyncio.Future[_Answer], reason: str) -> None:
    if not answer.done():
        answer.set_exception(EngineUnavailable(reason))


def _nobody() -> None:
    """No pool is listening yet."""
