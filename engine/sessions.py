"""What the engine's server remembers of its clients: their sessions, and their requests until they have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from engine.messages import FinalCounts, FinishReason, Output, Submit, Timings


class Flight:
    """One request from its `Submit` to the last output of its last choice.

    Attributes:
        session: of the client that submitted it; outlives the connection.
        muted: its client does not hear of it any more: vanished, or too slow for what was to be sent.
        num_open: choices that have not finished.
    """

    __slots__ = ("_last", "_num_prompt_tokens", "_told", "muted", "num_open", "request_id", "session")

    def __init__(self, submit: Submit, session: Session) -> None:
        self.request_id = submit.request_id
        self.session = session
        self.muted = False
        self.num_open = submit.num_choices
        self._num_prompt_tokens = len(submit.token_ids)
        self._last: list[Output | None] = [None] * submit.num_choices
        self._told = 0

    def note(self, output: Output) -> None:
        """An output came from the core."""
        self._last[output.choice] = output
        if output.finish is not None:
            self.num_open -= 1

    def told(self, output: Output) -> None:
        """The output was handed to the carrier."""
        if output.finish is not None:
            self._told |= 1 << output.choice

    def untold(self, error: str) -> Iterator[Output]:
        """A last output, with an error, for each choice whose finish the client was not told."""
        for choice, last in enumerate(self._last):
            if not self._told >> choice & 1:
                yield Output(
                    request_id=self.request_id,
                    choice=choice,
                    num_prompt_tokens=self._num_prompt_tokens,
                    num_cached_tokens=last.num_cached_tokens if last is not None else 0,
                    num_computed_tokens=last.num_computed_tokens if last is not None else 0,
                    num_delivered_tokens=last.num_delivered_tokens if last is not None else 0,
                    finish="error",
                    error=error,
                    timings=last.timings if last is not None else None,
                )

    def final_counts(self) -> FinalCounts:
        """Over all choices: tokens and engine time added up, the cache hit of the first choice."""
        known = [last for last in self._last if last is not None]
        finish: FinishReason = next((last.finish for last in reversed(known) if last.finish is not None), "abort")
        return FinalCounts(
            request_id=self.request_id,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=known[0].num_cached_tokens if known else 0,
            num_computed_tokens=sum(last.num_computed_tokens for last in known),
            num_output_tokens=sum(last.num_delivered_tokens for last in known),
            finish=finish,
            timings=_over_choices([last.timings for last in known if last.timings is not None]),
        )


def _over_choices(timings: Sequence[Timings]) -> Timings:
    """Choices run beside each other: the parts of the one that took longest, and all of their engine time."""
    longest = max(timings, key=lambda each: each.passed_us, default=Timings())
    return msgspec.structs.replace(longest, engine_us=sum(each.engine_us for each in timings))


class Session:
    """One connection of one client, from its `Hello` until it is lost.

    Attributes:
        client_id: the client's own name, the same after a reconnect.
        peer: the connection, in the carrier's words.
        heard_s: when its last message came.
        flights: its requests that have not ended, by id.
        owed: frames that must reach it and that its full queue did not take, in order.
    """

    __slots__ = ("_num_sent", "_unread", "alive", "client_id", "flights", "heard_s", "owed", "peer")

    def __init__(self, client_id: str, peer: bytes, heard_s: float) -> None:
        self.client_id = client_id
        self.peer = peer
        self.heard_s = heard_s
        self.alive = True
        self.flights: dict[str, Flight] = {}
        self.owed: deque[bytes] = deque()
        self._num_sent = 0
        self._unread: deque[tuple[int, FinalCounts]] = deque()

    def sent(self) -> None:
        """A frame was handed to the carrier."""
        self._num_sent += 1

    def ended(self, final: FinalCounts, limit: int) -> None:
        """The last of a request was handed to the carrier; keep its counts until the client has read that far."""
        self._unread.append((self._num_sent, final))
        if len(self._unread) > limit:
            self._unread.popleft()

    def has_read(self, num_received: int) -> None:
        """The client has taken that many frames of this connection."""
        while self._unread and self._unread[0][0] <= num_received:
            self._unread.popleft()

    def unread(self) -> Iterator[FinalCounts]:
        """Counts of requests whose end was sent, and perhaps never read."""
        return (final for _, final in self._unread)
