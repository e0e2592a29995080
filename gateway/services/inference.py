"""One request from start to settlement: the only path there is, streamed or not, whatever the protocol.

`Inference.prepare` does all that can be refused without having consumed anything. The `Call` it returns is entered by
the task that answers the request; leaving it, by whatever way, stops the engine's work and settles exactly once. Knows
nothing of HTTP, tokens or metrics.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from gateway.domain.events import GenerationEvent, TextDelta
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.request import GenerationRequest
from gateway.domain.usage import Outcome, TokenUsage
from gateway.errors import (
    ClientGone,
    DeadlineExceeded,
    EngineDown,
    EvenhandError,
    InternalError,
)
from gateway.services.ports import Backend, Clock, Generation, Prepared, Recorder

FINAL_COUNTS_S = 1.0
"""How long a settlement waits for the engine to say what an aborted request used; then it settles on what it knows."""


class Inference:
    """The use case "answer a request"."""

    def __init__(self, backend: Backend, clock: Clock, recorder: Recorder) -> None:
        self._backend = backend
        self._clock = clock
        self._recorder = recorder

    async def prepare(self, request: GenerationRequest, info: RequestInfo) -> Call:
        """Raises what `Backend.prepare` raises; nothing has been consumed then."""
        arrived = self._clock.monotonic()
        prepared = await self._backend.prepare(request)
        return Call(prepared, info, arrived, self._clock, self._recorder, num_choices=request.num_answers)


class Call:
    """A request that is ready to run.

    Entered once, by the task that owns the request; iterated inside; settled on leaving. Entering raises `Unavailable`
    if the engine cannot take the request, and then there is nothing to settle.
    """

    def __init__(
        self,
        prepared: Prepared,
        info: RequestInfo,
        arrived: float,
        clock: Clock,
        recorder: Recorder,
        *,
        num_choices: int,
    ) -> None:
        self.prepared = prepared
        self.info = info
        self.created = int(clock.time())
        self.num_choices = num_choices
        self._arrived = arrived
        self._clock = clock
        self._recorder = recorder
        self._generation: Generation | None = None
        self._first_delta: float | None = None
        self._last_delta = [0.0] * num_choices
        self._inter_token = array("d")
        self._reasons: dict[str, None] = {}

    @property
    def usage(self) -> TokenUsage:
        """So far; final when iteration has ended."""
        return self._running.usage

    @property
    def _running(self) -> Generation:
        assert self._generation is not None, "a call is entered before it is used"
        return self._generation

    async def __aenter__(self) -> Self:
        assert self._generation is None, "a call is entered once"
        self._generation = self.prepared.start(self.info)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[GenerationEvent]:
        """What became known together; raises `EvenhandError` if the request fails."""
        events = await self._running.__anext__()
        now = self._clock.monotonic()
        for event in events:
            if isinstance(event, TextDelta):
                last = self._last_delta[event.choice]
                if last:
                    self._inter_token.append((now - last) / max(event.num_tokens, 1))
                elif self._first_delta is None:
                    self._first_delta = now
                self._last_delta[event.choice] = now
            else:
                self._reasons[event.reason] = None
        return events

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        generation = self._running
        outcome, code = _outcome(error)
        if isinstance(error, EvenhandError):
            error.is_settled = True
        try:
            if not generation.ended:
                generation.abort()
                await _to_its_end(generation.wait_ended(FINAL_COUNTS_S))
        finally:
            self._settle(generation, outcome, code)

    def _settle(self, generation: Generation, outcome: Outcome, error_code: str | None) -> None:
        """No await from here on: nothing can come between a settlement's parts."""
        self._recorder.settled(
            RequestRecord(
                info=self.info,
                model=self.prepared.model,
                outcome=outcome,
                usage=generation.usage,
                timings=generation.timings,
                finish_reason=",".join(self._reasons),
                error_code=error_code,
                first_delta_s=None if self._first_delta is None else self._first_delta - self._arrived,
                total_s=self._clock.monotonic() - self._arrived,
                inter_token_s=self._inter_token,
            )
        )


def _outcome(error: BaseException | None) -> tuple[Outcome, str | None]:
    if error is None:
        return "finished", None
    if isinstance(error, ClientGone):
        return "client_gone", None
    if isinstance(error, asyncio.CancelledError):
        return "cancelled", None
    if isinstance(error, DeadlineExceeded):
        return "deadline", error.code
    if isinstance(error, EngineDown):
        return "engine_down", error.code
    if isinstance(error, EvenhandError) and not isinstance(error, InternalError):
        return "refused", error.code
    return "internal_error", InternalError.code


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end even if this task is cancelled meanwhile; the cancellation follows afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        raise cancelled
    task.result()
