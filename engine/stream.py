"""The outputs of one request, as an async iterator for whoever answers it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol, Self

import msgspec

from engine.errors import EngineError, EngineUnavailable
from engine.messages import Output


class StreamOwner(Protocol):
    """What a stream asks of the link it came from."""

    def abort(self, request_id: str) -> None: ...

    def raise_cap(self, request_id: str, output_cap: int) -> None: ...

    def forget(self, request_id: str) -> None:
        """Nobody waits for this request's outputs any more."""
        ...


class OutputStream:
    """Outputs of all choices of one request, for one reader, on one event loop.

    Iteration ends after the last choice's finish. It raises, after what had come before was read, `RequestRejected`
    when the engine does not take the request, and `EngineUnavailable` when the engine is lost or does not confirm an
    abort.

    What a slow reader leaves unread is merged when it is read, one `Output` for each choice: token ids and log
    probabilities are joined, everything else is the latest. So unread outputs are bounded by the request's own
    output cap, and never hold up another stream.

    A reader that leaves early calls `abort`; it may read on until the final counts have come, or drop the stream.
    """

    def __init__(self, request_id: str, num_choices: int, owner: StreamOwner, abort_timeout_s: float) -> None:
        self.request_id = request_id
        self._owner = owner
        self._num_open = num_choices
        self._abort_timeout_s = abort_timeout_s
        self._abort_timer: asyncio.TimerHandle | None = None
        self._unread: dict[int, list[Output]] = {}
        self._error: EngineError | None = None
        self._news = asyncio.Event()

    # --- the reader's side ------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while True:
            if self._unread:
                return _merged(self._unread.pop(next(iter(self._unread))))
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    @property
    def ended(self) -> bool:
        """Nothing more will come from the engine; something may still be unread."""
        return self._num_open == 0 or self._error is not None

    def abort(self) -> None:
        """End the request, in whatever state it is; legal at any moment, and more than once.

        The final outputs still come (finish ``abort``, unless it had ended before); if they do not within the link's
        abort time-out, iteration raises `EngineUnavailable`.
        """
        if self.ended or self._abort_timer is not None:
            return
        loop = asyncio.get_running_loop()
        self._abort_timer = loop.call_later(self._abort_timeout_s, self._give_up)
        self._owner.abort(self.request_id)

    def raise_cap(self, output_cap: int) -> None:
        """Answer an output that is `held_at_cap`; the old cap again ends the request with ``length``."""
        if not self.ended:
            self._owner.raise_cap(self.request_id, output_cap)

    # --- the link's side --------------------------------------------------------------------------------------------

    def feed(self, output: Output) -> None:
        """An output came; O(1)."""
        unread = self._unread.get(output.choice)
        if unread is None:
            self._unread[output.choice] = [output]
        else:
            unread.append(output)
        if output.finish is not None:
            self._num_open -= 1
            if self._num_open == 0:
                self._stop_timer()
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """Nothing more will come, and this is why."""
        if not self.ended:
            self._error = error
            self._stop_timer()
            self._news.set()

    def _give_up(self) -> None:
        self._owner.forget(self.request_id)
        self.fail(EngineUnavailable(f"the engine did not confirm an abort within {self._abort_timeout_s:g} s"))

    def _stop_timer(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()


def _merged(outputs: list[Output]) -> Output:
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    joined = itertools.chain.from_iterable
    logprobs = [output.logprobs for output in outputs if output.logprobs is not None]
    return msgspec.structs.replace(
        last,
        token_ids=tuple(joined(output.token_ids for output in outputs)),
        logprobs=tuple(joined(logprobs)) if logprobs else None,
    )
