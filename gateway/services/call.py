"""A request that runs, from its admission to its settlement, streamed or not, whatever the protocol.

A `Call` is entered by the task that answers the request; leaving it, by whatever way, stops the engine's work and
settles exactly once. Knows nothing of HTTP, tokens or metrics.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from gateway.domain.events import Cause, GenerationEvent, TextDelta
from gateway.domain.ledger import Opening
from gateway.domain.limits.policy import Price
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.usage import Outcome, TokenUsage
from gateway.errors import (
    ClientGone,
    DeadlineExceeded,
    EngineDown,
    EvenhandError,
    InternalError,
    LimitsUnavailable,
)
from gateway.services.grants import Grant
from gateway.services.headroom import Headroom
from gateway.services.limiter import Limiter
from gateway.services.ports import Clock, Generation, Prepared, Recorder
from gateway.services.waiting import Place, WaitingRequests

NOTHING = TokenUsage()
LOST_GRANT = (
    "What this request had reserved was given to others, since this server could not be heard of. Please try again."
)
FINAL_COUNTS_S = 1.0
"""How long a settlement waits for the engine to say what an aborted request used; then it settles on what it knows."""


class Call:
    """A request that is ready to run.

    Entered once, by the task that owns the request; iterated inside; settled on leaving. Entering raises `QueueFull` if
    too many requests of the key wait already, `LimitExceeded` or `LimitsUnavailable` if it may not run, or
    `Unavailable` if the engine cannot take the request; then there is nothing to settle. It waits from then until the
    first events, or the end if there are none. Its limits are settled when iteration ends: before its caller knows that
    the answer is whole, and so before the caller's next request.

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
        limiter: Limiter,
        *,
        requested_model: str,
        prices: Sequence[Price],
        num_prompts: int,
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
        self._limiter = limiter
        self._prices = prices
        self._num_prompts = num_prompts
        self._grant: Grant | None = None
        self._headroom: Headroom | None = None
        self._can_be_given_away = False
        self._is_released = False
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
    def grant(self) -> Grant:
        """What it may use."""
        assert self._grant is not None, "a call is entered before it is used"
        return self._grant

    @property
    def _running(self) -> Generation:
        assert self._generation is not None, "a call is entered before it is used"
        return self._generation

    async def __aenter__(self) -> Self:
        assert self._generation is None, "a call is entered once"
        place = self._waiting.enter(self.info.principal)
        try:
            grant = await self._limiter.admit(
                self.info, self.prepared, self._prices, num_choices=self.num_choices // self._num_prompts
            )
            try:
                self._generation, self._opening = self._start(grant)
            except BaseException:
                await _to_its_end(self._limiter.settle(grant, NOTHING))
                raise
        except BaseException:
            place.leave()
            raise
        self._grant = grant
        self._can_be_given_away = self._limiter.can_be_given_away(grant)
        self._place = place
        return self

    def _start(self, grant: Grant) -> tuple[Generation, Opening]:
        """Hand the request to the engine and put it on record; raises `Unavailable`, and then neither is so."""
        if grant.request_class != self.info.request_class:
            self.info = msgspec.structs.replace(self.info, request_class=grant.request_class)
        held_cap = grant.granted // self.num_choices if grant.is_clamped else None
        generation = self.prepared.start(self.info, grant.caps, held_cap)
        try:
            opening = self._open(generation, grant)
        except BaseException:
            generation.abort()
            raise
        grant.running = generation
        if held_cap is not None:
            self._headroom = Headroom(self._limiter, grant, generation, held_cap)
        return generation, opening

    def _open(self, generation: Generation, grant: Grant) -> Opening:
        """Put the request on record; raises `Unavailable` if that cannot be done, and then nobody is to be answered."""
        info, prepared = self.info, self.prepared
        opening = Opening(
            request_id=info.request_id,
            opened_at_ms=grant.admitted_at_ms,
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
            price=grant.plan.price,
            quotas=grant.plan.quotas,
        )
        self._recorder.opened(opening, generation)
        return opening

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[GenerationEvent]:
        """What became known together; raises `EvenhandError` if the request fails."""
        try:
            events = await self._running.__anext__()
        except StopAsyncIteration:
            if self._can_be_given_away:
                await self._check_grant()
            await self._release()
            raise
        except EngineDown:
            if self.grant.is_lost:
                raise LimitsUnavailable(LOST_GRANT) from None
            raise
        if self._can_be_given_away:
            await self._check_grant()
        if self._place is not None:
            self._leave_queue()
        if self._headroom is not None:
            events = self._headroom_seen(self._headroom, events)
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

    async def _check_grant(self) -> None:
        """Raises `LimitsUnavailable` if others have been given what the request had reserved."""
        await self._limiter.find_out(self.grant)
        if self.grant.is_given_away:
            raise LimitsUnavailable(LOST_GRANT)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_queue()
        outcome, code = _outcome(error)
        if isinstance(error, EvenhandError):
            error.is_settled = True
        try:
            await self._release()
        finally:
            self._settle(self._running, outcome, code)

    async def _release(self) -> None:
        """Stop what still runs and settle what the request may use: once, and whole though this task is cancelled."""
        if self._is_released:
            return
        self._is_released = True
        if self._running.ended and self._headroom is None and self._limiter.settles_at_once(self.grant):
            await self._limiter.settle(self.grant, self._running.usage)
        else:
            await _to_its_end(self._release_all())

    async def _release_all(self) -> None:
        generation, grant = self._running, self.grant
        if self._headroom is not None:
            await self._headroom.close()
        if not generation.ended:
            generation.abort()
            await generation.wait_ended(FINAL_COUNTS_S)
        if self._can_be_given_away:
            await self._limiter.find_out(grant)
        await self._limiter.settle(grant, grant.settled_usage(generation.usage))

    def _headroom_seen(self, headroom: Headroom, events: Sequence[GenerationEvent]) -> Sequence[GenerationEvent]:
        """Ask for more output in time; say of answers that are cut for want of it why they were."""
        if headroom.cut is not None:
            return [self._with_cause(event, headroom.cut, headroom.cap) for event in events]
        headroom.look()
        return events

    def _with_cause(self, event: GenerationEvent, cause: Cause, held_cap: int) -> GenerationEvent:
        """An answer that asked for no more than it got has an end of its own."""
        if isinstance(event, TextDelta) or event.reason != "length":
            return event
        wanted = self.grant.caps[event.choice // self.grant.num_choices]
        return msgspec.structs.replace(event, cause=cause) if wanted > held_cap else event

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
                usage=self.grant.settled_usage(generation.usage),
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
