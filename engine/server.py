"""The engine's loop: take in messages, let the core take a step, send each client its own outputs.

One thread does all of it, so nothing here is locked. Knows the protocol; nothing of sockets (a `ServerCarrier` moves
frames), of who is owed what (`outbox.py`), or of models (a `Core` decides and computes).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from engine.carriers.port import ServerCarrier
from engine.errors import ProtocolError, RequestRejected
from engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    ChargeExternal,
    CollectFinals,
    Finals,
    Hello,
    Output,
    Ping,
    Pong,
    RaiseCap,
    Ready,
    Rejected,
    SetWeight,
    StandingQuery,
    StandingReply,
    Stats,
    StatsQuery,
    Submit,
    ToEngine,
    decode_to_engine,
)
from engine.outbox import Outbox
from engine.sessions import Session
from engine.standing import Standing

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 1000
"""Most messages taken in between two steps, so that a flood of them cannot hold up the steps."""

FINALS_PER_MESSAGE = 1000

SWEEP_INTERVAL_S = 1.0

RETRY_INTERVAL_S = 0.05
"""How often an idle engine offers a slow client what it owes it."""


class Core(Protocol):
    """What the server asks of the engine's core (`engine.core.EngineCore`)."""

    @property
    def has_work(self) -> bool:
        """A step would compute something or has outputs to tell; False while all requests wait for `raise_cap`."""
        ...

    def submit(self, message: Submit) -> None:
        """Raises `RequestRejected`."""
        ...

    def abort(self, request_id: str) -> None: ...

    def raise_cap(self, request_id: str, output_cap: int) -> None: ...

    def set_weight(self, node_id: str, weight: int) -> None: ...

    def charge_external(self, node_id: str, cost_us: int) -> None: ...

    def step(self) -> list[Output]: ...

    def stats(self) -> Stats: ...

    def standing(self, *request_ids: str) -> Standing:
        """Of the one that is furthest behind; phase ``unknown`` if none of them is here."""
        ...

    def check_integrity(self) -> None:
        """Raises when an invariant is broken."""
        ...


class _SubmitId(msgspec.Struct, frozen=True, tag="submit"):
    """The part of a `Submit` by which a malformed one can still be answered."""

    request_id: str


class EngineServer:
    """Serves one core to any number of clients until `stop`.

    A client begins with `Hello`; each request belongs to the client that submitted it. When a client vanishes, or is
    silent for client_timeout_s, its requests are aborted and their final counts kept until it collects them. When it
    stays but does not read, the requests whose outputs found its queue full are aborted, and it is told so as soon as
    there is room.

    Args:
        card: sent to every client; its engine_id is what clients must ask for.
        max_finals: most final counts kept, for all clients together.
        max_owed: most answers kept for a client that does not read, before it is taken for dead.
        linger_s: how long the last messages may take to leave when the engine does.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        core: Core,
        carrier: ServerCarrier,
        card: Ready,
        *,
        client_timeout_s: float = 10.0,
        max_finals: int = 100_000,
        max_owed: int = 10_000,
        linger_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._carrier = carrier
        self._card = card
        self._linger_s = linger_s
        self._clock = clock
        self._outbox = Outbox(
            card.engine_id,
            carrier,
            core.abort,
            client_timeout_s=client_timeout_s,
            max_finals=max_finals,
            max_owed=max_owed,
        )
        self._stopping = False
        self._checked = False
        self._sweep_interval_s = min(SWEEP_INTERVAL_S, client_timeout_s / 2)
        self._next_sweep_s = 0.0

    def run(self) -> bool:
        """Listen and serve until `stop`, and return True; every request in flight ends with an in-band error.

        Whatever the core raises ends the loop the same way, is logged with its traceback, and makes this return False:
        the core's state cannot be trusted any more. Raises `ConfigError` if the carrier cannot listen.
        """
        self._carrier.open()
        try:
            try:
                while not self._stopping:
                    self._turn()
            except Exception:
                # Anything at all: clients must hear of the end before the process leaves.
                logger.exception("the engine failed with %d requests in flight", self._outbox.num_flights)
                self._outbox.end_all("the engine failed; its operator's log says why")
                return False
            self._outbox.end_all("the engine is shutting down")
            return True
        finally:
            self._carrier.close(self._linger_s)

    def stop(self) -> None:
        """Make `run` return soon. May be called from any thread and from a signal handler."""
        self._stopping = True
        self._carrier.wake()

    def _turn(self) -> None:
        received = self._carrier.receive(self._patience_s(), MESSAGES_PER_TURN)
        for peer, frame in received:
            self._take(peer, frame)
        now_s = self._clock()
        # Only with an empty inbox: signs of life may be waiting in it.
        if now_s >= self._next_sweep_s and len(received) < MESSAGES_PER_TURN:
            self._next_sweep_s = now_s + self._sweep_interval_s
            self._outbox.sweep(now_s)
        self._outbox.pay()
        if self._core.has_work:
            self._checked = False
            self._outbox.deliver(self._core.step())
        elif not self._checked:
            self._core.check_integrity()
            self._checked = True

    def _patience_s(self) -> float | None:
        """How long to wait for messages: not at all while there is work, without end when nobody is there."""
        if self._core.has_work or not self._checked:
            return 0.0
        if self._outbox.owes:
            return RETRY_INTERVAL_S
        return self._sweep_interval_s if self._outbox.has_sessions else None

    def _take(self, peer: bytes, frame: bytes) -> None:
        try:
            message = decode_to_engine(frame)
        except ProtocolError as e:
            self._refuse_undecodable(peer, frame, e)
            return
        if message.engine_id != self._card.engine_id:
            self._outbox.refuse(peer, f"this is engine '{self._card.engine_id}', not '{message.engine_id}'")
            return
        if isinstance(message, Hello):
            self._on_hello(peer, message)
            return
        session = self._outbox.session(peer)
        if session is None:
            self._outbox.refuse(peer, "a client must say hello first, and again after a long silence")
            return
        session.heard_s = self._clock()
        self._on_message(session, message)

    def _on_message(self, session: Session, message: ToEngine) -> None:
        match message:
            case Submit():
                self._on_submit(session, message)
            case Abort(request_id=request_id):
                if request_id in session.flights:
                    self._core.abort(request_id)
            case RaiseCap(request_id=request_id, output_cap=output_cap):
                if request_id in session.flights:
                    self._core.raise_cap(request_id, output_cap)
            case SetWeight(node_id=node_id, weight=weight):
                self._core.set_weight(node_id, weight)
            case ChargeExternal(node_id=node_id, cost_us=cost_us):
                self._core.charge_external(node_id, cost_us)
            case StatsQuery(query_id=query_id):
                stats = self._core.stats()
                self._outbox.reply(
                    session, msgspec.structs.replace(stats, engine_id=self._card.engine_id, query_id=query_id)
                )
            case StandingQuery(query_id=query_id, request_id=request_id, other_ids=other_ids):
                standing = self._core.standing(request_id, *other_ids)
                self._outbox.reply(session, StandingReply(self._card.engine_id, query_id, standing))
            case CollectFinals(acknowledge=acknowledge, client_id=client_id):
                self._on_collect(session, client_id or session.client_id, acknowledge)
            case Ping(num_received=num_received):
                session.has_read(num_received)
                self._outbox.reply(session, Pong(self._card.engine_id))

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            reason = f"this engine speaks protocol version {PROTOCOL_VERSION}, not {hello.version}"
            self._outbox.refuse(peer, reason)
            return
        session = self._outbox.welcome(hello.client_id, peer, self._clock())
        session.heard_s = self._clock()
        self._outbox.reply(session, self._card)

    def _on_collect(self, session: Session, client_id: str, acknowledge: Sequence[str]) -> None:
        finals = self._outbox.finals
        finals.acknowledge(client_id, acknowledge)
        page = finals.page(client_id, FINALS_PER_MESSAGE)
        is_complete = len(page) == finals.num_kept(client_id) and not self._outbox.may_owe_finals(client_id)
        self._outbox.reply(session, Finals(self._card.engine_id, page, is_complete))

    def _on_submit(self, session: Session, submit: Submit) -> None:
        try:
            self._admit(submit)
        except RequestRejected as e:
            rejected = Rejected(self._card.engine_id, submit.request_id, e.code, str(e))
            self._outbox.must_tell(session, rejected)
            return
        self._outbox.begin(submit, session)

    def _admit(self, submit: Submit) -> None:
        if self._outbox.is_flying(submit.request_id):
            raise RequestRejected("duplicate_request", f"request '{submit.request_id}' is already running")
        if submit.num_choices < 1:
            raise RequestRejected("invalid_request", f"num_choices must be at least 1, not {submit.num_choices}")
        self._core.submit(submit)

    def _refuse_undecodable(self, peer: bytes, frame: bytes, error: ProtocolError) -> None:
        """Answer a malformed `Submit` as one request, so that its client's other requests do not suffer from it."""
        session = self._outbox.session(peer)
        if session is None:
            self._outbox.refuse(peer, str(error))
            return
        session.heard_s = self._clock()
        try:
            request_id = msgspec.msgpack.decode(frame, type=_SubmitId).request_id
        except (msgspec.DecodeError, RecursionError):
            self._outbox.refuse(peer, str(error))
            return
        self._outbox.must_tell(session, Rejected(self._card.engine_id, request_id, "invalid_request", str(error)))
