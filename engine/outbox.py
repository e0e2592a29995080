"""Who the engine's clients are, which requests are theirs, and how they are told.

The rule: no end of a request is ever lost in silence. What a client cannot be told in time is told when it reads again,
or kept until it collects it. Knows nothing of the core but how to abort; one thread uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from engine.carriers.port import Delivery, ServerCarrier
from engine.finals import FinalStore
from engine.messages import FromEngine, Output, Outputs, Pong, Refused, Submit, encode
from engine.sessions import Flight, Session

logger = logging.getLogger(__name__)

PROBE_AFTER = 0.2
"""Of the client time-out: a client silent for so long is sent a `Pong`. If it is gone, the carrier says so."""


class Outbox:
    """Sessions, flights and final counts of one engine.

    Args:
        abort: ends a request in the core; its last outputs come through `deliver` later.
        max_finals: most final counts kept, for all clients together.
        max_owed: most frames owed to a client that does not read, before it is taken for dead.
    """

    def __init__(
        self,
        engine_id: str,
        carrier: ServerCarrier,
        abort: Callable[[str], None],
        *,
        client_timeout_s: float,
        max_finals: int,
        max_owed: int,
    ) -> None:
        self._engine_id = engine_id
        self._carrier = carrier
        self._abort = abort
        self._client_timeout_s = client_timeout_s
        self._max_finals = max_finals
        self._max_owed = max_owed
        self._sessions: dict[bytes, Session] = {}
        self._clients: dict[str, Session] = {}
        self._flights: dict[str, Flight] = {}
        self.finals = FinalStore(max_finals)

    # --- who is there -----------------------------------------------------------------------------------------------

    def session(self, peer: bytes) -> Session | None:
        """The session of a connection that has said hello and was not lost since."""
        return self._sessions.get(peer)

    @property
    def has_sessions(self) -> bool:
        return bool(self._sessions)

    @property
    def owes(self) -> bool:
        """Some client is owed frames that its full queue did not take."""
        return any(session.owed for session in self._sessions.values())

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    def is_flying(self, request_id: str) -> bool:
        return request_id in self._flights

    def may_owe_finals(self, client_id: str) -> bool:
        """The client is connected, or requests of it have not ended: there may be more final counts of it later."""
        return client_id in self._clients or any(
            flight.session.client_id == client_id for flight in self._flights.values()
        )

    def welcome(self, client_id: str, peer: bytes, now_s: float) -> Session:
        """The client's session on this connection; an earlier connection of the same client is lost by it."""
        session = self._clients.get(client_id)
        if session is not None and session.peer == peer:
            return session
        for old in (session, self._sessions.get(peer)):
            if old is not None:
                self._lose(old, "it has connected again")
        session = Session(client_id, peer, now_s)
        self._sessions[peer] = self._clients[client_id] = session
        logger.info("client %s is here", client_id)
        return session

    def begin(self, submit: Submit, session: Session) -> None:
        """The core has taken this request."""
        flight = Flight(submit, session)
        self._flights[submit.request_id] = session.flights[submit.request_id] = flight

    def sweep(self, now_s: float) -> None:
        """Find clients that have vanished. Signs of life that have come must have been taken in before."""
        for session in list(self._sessions.values()):
            silent_s = now_s - session.heard_s
            if silent_s > self._client_timeout_s:
                self._lose(session, f"it has been silent for {silent_s:.1f} s")
            elif silent_s > PROBE_AFTER * self._client_timeout_s:
                self.reply(session, Pong(self._engine_id))

    # --- what they are told -----------------------------------------------------------------------------------------

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Send one step's outputs, to each client its own in one message."""
        batches: dict[bytes, list[tuple[Flight, Output]]] = {}
        over: list[Flight] = []
        for output in outputs:
            flight = self._flights[output.request_id]
            flight.note(output)
            if flight.num_open == 0:
                over.append(flight)
            if not flight.muted:
                batches.setdefault(flight.session.peer, []).append((flight, output))
        for batch in batches.values():
            self._send_batch(batch[0][0].session, batch)
        for flight in over:
            self._close(flight)

    def reply(self, session: Session, message: FromEngine) -> None:
        """Answer a question; a client that does not read its answers may ask again."""
        self._send(session, encode(message))

    def must_tell(self, session: Session, message: FromEngine) -> None:
        """Send it now, or as soon as there is room."""
        session.owed.append(encode(message))
        self._pay(session)

    def pay(self) -> None:
        """Offer every client what it is owed."""
        for session in [s for s in self._sessions.values() if s.owed]:
            self._pay(session)

    def refuse(self, peer: bytes, reason: str) -> None:
        logger.warning("refused a message: %s", reason)
        self._carrier.send(peer, encode(Refused(self._engine_id, reason)))

    def end_all(self, error: str) -> None:
        """Tell every client that its requests have ended, as well as its queue takes it; nothing is aborted."""
        for session in list(self._sessions.values()):
            ends = [end for flight in session.flights.values() for end in flight.untold(error)]
            if ends:
                self.must_tell(session, Outputs(self._engine_id, tuple(ends)))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _send_batch(self, session: Session, batch: Sequence[tuple[Flight, Output]]) -> None:
        message = Outputs(self._engine_id, tuple(output for _, output in batch))
        delivery = self._send(session, encode(message))
        if delivery is Delivery.SENT:
            for flight, output in batch:
                flight.told(output)
            return
        concerned = {flight.request_id: flight for flight, _ in batch}
        if delivery is Delivery.FULL:
            logger.warning("client %s does not read; its requests end: %s", session.client_id, ", ".join(concerned))
        for flight in concerned.values():
            self._mute(flight)

    def _send(self, session: Session, frame: bytes) -> Delivery:
        if not session.alive:
            return Delivery.GONE
        delivery = self._carrier.send(session.peer, frame)
        if delivery is Delivery.SENT:
            session.sent()
        elif delivery is Delivery.GONE:
            self._lose(session, "its connection is gone")
        return delivery

    def _pay(self, session: Session) -> None:
        while session.owed and self._send(session, session.owed[0]) is Delivery.SENT:
            session.owed.popleft()
        if len(session.owed) > self._max_owed:
            self._lose(session, "it does not read")

    def _mute(self, flight: Flight) -> None:
        if not flight.muted:
            flight.muted = True
            if flight.num_open:
                self._abort(flight.request_id)

    def _close(self, flight: Flight) -> None:
        """A request has ended: its counts are on their way to its client, or kept for it."""
        session, final = flight.session, flight.final_counts()
        del self._flights[flight.request_id], session.flights[flight.request_id]
        if not flight.muted:
            session.ended(final, self._max_finals)
            return
        self.finals.keep(session.client_id, final)
        if session.alive:
            ends = tuple(flight.untold("its outputs were not read in time, so the request was aborted"))
            self.must_tell(session, Outputs(self._engine_id, ends))

    def _lose(self, session: Session, why: str) -> None:
        if not session.alive:
            return
        level = logging.WARNING if session.flights else logging.INFO
        logger.log(level, "client %s is lost with %d requests: %s", session.client_id, len(session.flights), why)
        session.alive = False
        del self._sessions[session.peer], self._clients[session.client_id]
        session.owed.clear()
        for final in session.unread():
            self.finals.keep(session.client_id, final)
        for flight in session.flights.values():
            self._mute(flight)
