"""One request from start to settlement: the only path there is, streamed or not, whatever the protocol.

`Inference.prepare` does all that can be refused without having consumed anything. The `Call` it returns is entered by
the task that answers the request; leaving it, by whatever way, stops the engine's work and settles exactly once. What a
key may use, and how much of it may wait, holds here for every protocol. Knows nothing of HTTP, tokens or metrics.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from gateway.domain.events import GenerationEvent, TextDelta
from gateway.domain.ledger import Opening
from gateway.domain.principal import lowest
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.request import Conversation, GenerationRequest, Message, Prompt
from gateway.domain.usage import Outcome, TokenUsage
from gateway.errors import (
    ClientGone,
    DeadlineExceeded,
    EngineDown,
    EvenhandError,
    InternalError,
    ModelNotFound,
    NotAllowed,
)
from gateway.services.catalog import Catalog, Resolved
from gateway.services.ports import Backend, Clock, Generation, Prepared, Recorder
from gateway.services.waiting import Place, WaitingRequests

FINAL_COUNTS_S = 1.0
"""How long a settlement waits for the engine to say what an aborted request used; then it settles on what it knows."""


class Inference:
    """The use case "answer a request"."""

    def __init__(self, backend: Backend, catalog: Catalog, clock: Clock, recorder: Recorder) -> None:
        self._backend = backend
        self._catalog = catalog
        self._clock = clock
        self._recorder = recorder
        self._waiting = WaitingRequests()

    async def prepare(self, request: GenerationRequest, info: RequestInfo) -> Call:
        """Raises what `Backend.prepare` raises, `NotAllowed` and `StorageDown`; nothing has been consumed then.

        Args:
            info: its class is the one asked for; that of an alias may lower it.
        """
        arrived = self._clock.monotonic()
        principal = info.principal
        if principal.endpoints is not None and info.endpoint not in principal.endpoints:
            raise NotAllowed(f"This API key may not be used for {info.endpoint}.", code="endpoint_not_allowed")
        resolved = await self._catalog.resolve(request.model, principal)
        if resolved.request_class is not None:
            info = msgspec.structs.replace(info, request_class=lowest(info.request_class, resolved.request_class))
        try:
            prepared = await self._backend.prepare(_as_resolved(request, resolved, principal.deadline_ms))
        except ModelNotFound as e:
            raise ModelNotFound(request.model) from e  # by the name that was asked for
        return Call(
            prepared,
            info,
            arrived,
            self._clock,
            self._recorder,
            self._waiting,
            requested_model=request.model,
            num_choices=request.num_answers,
        )


class Call:
    """A request that is ready to run.

    Entered once, by the task that owns the request; iterated inside; settled on leaving. Entering raises `QueueFull` if
    too many requests of the key wait already, or `Unavailable` if the engine cannot take the request; then there is
    nothing to settle. It waits from then until the first events, or the end if there are none.

    Attributes:
        requested_model: the name that was asked for, which answers say.
    """

    def __init__(
        self,
        prepared: Prepared,
        info: RequestInfo,
        arrived: float,
        clock: Clock,
        recorder: Recorder,
        waiting: WaitingRequests,
        *,
        requested_model: str,
        num_choices: int,
    ) -> None:
        self.prepared = prepared
        self.info = info
        self.created = int(clock.time())
        self.num_choices = num_choices
        self.requested_model = requested_model
        self._arrived = arrived
        self._clock = clock
        self._monotonic = clock.monotonic
        self._recorder = recorder
        self._waiting = waiting
        self._place: Place | None = None
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
        place = self._waiting.enter(self.info.principal)
        try:
            self._generation, self._opening = self._start()
        except BaseException:
            place.leave()
            raise
        self._place = place
        return self

    def _start(self) -> tuple[Generation, Opening]:
        """Hand the request to the engine and put it on record; raises `Unavailable`, and then neither is so."""
        generation = self.prepared.start(self.info)
        try:
            return generation, self._open(generation)
        except BaseException:
            generation.abort()
            raise

    def _open(self, generation: Generation) -> Opening:
        """Put the request on record; raises `Unavailable` if that cannot be done, and then nobody is to be answered."""
        info, prepared = self.info, self.prepared
        opening = Opening(
            request_id=info.request_id,
            opened_at_ms=int(self._clock.time() * 1000),
            organization_id=info.principal.organization_id,
            team_id=info.principal.team_id,
            key_id=info.principal.key_id,
            model=prepared.model,
            requested_model=self.requested_model,
            endpoint=info.endpoint,
            stream=info.stream,
            request_class=info.request_class,
            prompt_tokens=prepared.num_prompt_tokens,
            num_parts=prepared.num_parts,
        )
        self._recorder.opened(opening, generation)
        return opening

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[GenerationEvent]:
        """What became known together; raises `EvenhandError` if the request fails."""
        events = await self._running.__anext__()
        if self._place is not None:
            self._leave_queue()
        now = self._monotonic()
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
        self._leave_queue()
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

    def _leave_queue(self) -> None:
        if self._place is not None:
            self._place.leave()
            self._place = None

    def _settle(self, generation: Generation, outcome: Outcome, error_code: str | None) -> None:
        """No await from here on: nothing can come between a settlement's parts."""
        self._recorder.settled(
            RequestRecord(
                info=self.info,
                opening=self._opening,
                # Never before it was opened, even if the clock was set back meanwhile.
                closed_at_ms=max(int(self._clock.time() * 1000), self._opening.opened_at_ms),
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


def _as_resolved(request: GenerationRequest, resolved: Resolved, deadline_ms: int | None) -> GenerationRequest:
    """The request as the backend gets it: with the model that answers, and with what key and alias add."""
    changes: dict[str, Any] = {}
    if resolved.model != request.model:
        changes["model"] = resolved.model
    if resolved.system_default is not None:
        changes["prompts"] = tuple(_with_system(prompt, resolved.system_default) for prompt in request.prompts)
    if request.deadline_ms is None and deadline_ms is not None:
        changes["deadline_ms"] = deadline_ms
    return msgspec.structs.replace(request, **changes) if changes else request


def _with_system(prompt: Prompt, default: str) -> Prompt:
    if not isinstance(prompt, Conversation) or any(message.role == "system" for message in prompt.messages):
        return prompt
    return Conversation((Message("system", default), *prompt.messages))


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
