"""A call is settled exactly once, whatever its ending, and the engine's work is stopped when it is not needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from identity_kit import PRINCIPAL, SteppedClock

from gateway.backends.scripted import Fail, Gate, Pause, Say, Script, ScriptedBackend, ScriptedGeneration
from gateway.domain.events import GenerationEvent
from gateway.domain.ids import new_request_id
from gateway.domain.ledger import Opening
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.request import GenerationRequest, Text
from gateway.domain.usage import TokenUsage
from gateway.errors import ClientGone, DeadlineExceeded, EngineDown, InternalError, InvalidRequest, Unavailable
from gateway.limit_opening import in_memory
from gateway.services.call import Call
from gateway.services.catalog import Catalog, FixedListing
from gateway.services.inference import Inference
from gateway.services.limiter import Limiter
from gateway.services.ports import Running
from gateway.services.waiting import WaitingRequests


class Records:
    def __init__(self) -> None:
        self.all: list[RequestRecord] = []
        self.openings: list[Opening] = []
        self.refuse: Unavailable | None = None

    def opened(self, opening: Opening, running: Running) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.openings.append(opening)

    def settled(self, record: RequestRecord) -> None:
        self.all.append(record)


class Hub:
    """An inference service over one script."""

    def __init__(self, *steps: Say | Pause | Gate | Fail, refuse: EngineDown | None = None) -> None:
        self.clock = SteppedClock()
        self.records = Records()
        script = Script(steps=steps, refuse=refuse)
        self.backend = ScriptedBackend({"m": script}, sleep=self.clock.sleep)
        catalog = Catalog(self.backend, FixedListing())
        limiter = Limiter(in_memory(self.clock), self.clock)
        self.inference = Inference(self.backend, catalog, self.clock, self.records, limiter)

    async def call(self, num_choices: int = 1) -> Call:
        info = RequestInfo(
            request_id=new_request_id(0),
            principal=PRINCIPAL,
            request_class="interactive",
            endpoint="chat",
            stream=False,
        )
        wanted = GenerationRequest(model="m", prompts=(Text("a b c"),), num_choices=num_choices)
        return await self.inference.prepare(wanted, info)

    @property
    def generation(self) -> ScriptedGeneration:
        [generation] = self.backend.generations
        return generation

    @property
    def record(self) -> RequestRecord:
        [record] = self.records.all
        return record


async def drain(call: Call) -> list[GenerationEvent]:
    async with call:
        return [event async for events in call for event in events]


async def test_a_finished_call_is_recorded_with_its_times() -> None:
    hub = Hub(Pause(2.0), Say("a"), Pause(0.5), Say("b"), Pause(0.25), Say("c"), Pause(1.0))
    await drain(await hub.call())

    record = hub.record
    assert record.outcome == "finished"
    assert record.usage == TokenUsage(prompt_tokens=3, completion_tokens=3)
    assert record.finish_reason == "stop"
    assert record.first_delta_s == pytest.approx(2.0)
    assert list(record.inter_token_s) == pytest.approx([0.5, 0.25])
    assert record.total_s == pytest.approx(3.75)
    assert not hub.generation.aborted


async def test_a_request_is_on_record_before_anything_is_answered() -> None:
    hub = Hub(Say("a"))
    call = await hub.call()
    assert hub.records.openings == []
    async with call:
        [opening] = hub.records.openings
        assert hub.records.all == []

    assert (opening.request_id, opening.key_id) == (call.info.request_id, PRINCIPAL.key_id)
    assert (opening.model, opening.requested_model) == ("m", "m")
    assert (opening.prompt_tokens, opening.num_parts) == (3, 1)
    assert hub.record.opening is opening


async def test_what_cannot_be_put_on_record_is_not_answered() -> None:
    hub = Hub(Say("a"))
    hub.records.refuse = Unavailable("the disk is full")
    call = await hub.call()
    with pytest.raises(Unavailable):
        await drain(call)

    assert hub.generation.aborted
    assert hub.records.all == []


async def test_each_choice_has_gaps_of_its_own() -> None:
    hub = Hub(Say("a", 0), Pause(1.0), Say("b", 1), Pause(1.0), Say("c", 0), Pause(2.0), Say("d", 1))
    await drain(await hub.call(num_choices=2))

    assert list(hub.record.inter_token_s) == pytest.approx([2.0, 3.0])


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (EngineDown("lost"), "engine_down", "engine_unavailable"),
        (DeadlineExceeded("late"), "deadline", "deadline_exceeded"),
        (InvalidRequest("the engine says no"), "refused", None),
        (InternalError(), "internal_error", "internal_error"),
        (ZeroDivisionError(), "internal_error", "internal_error"),
    ],
)
async def test_an_error_on_the_way_is_the_outcome(error: Exception, outcome: str, code: str | None) -> None:
    hub = Hub(Say("a"), Fail(error))
    call = await hub.call()
    with pytest.raises(type(error)):
        await drain(call)

    assert (hub.record.outcome, hub.record.error_code) == (outcome, code)
    assert hub.record.usage.completion_tokens == 1
    assert hub.record.finish_reason == ""


async def test_a_call_that_could_not_be_started_leaves_nothing_to_settle() -> None:
    hub = Hub(refuse=EngineDown("down"))
    call = await hub.call()
    with pytest.raises(EngineDown):
        await drain(call)

    assert hub.records.all == []


@pytest.mark.parametrize(("error", "outcome"), [(ClientGone(), "client_gone"), (KeyError(), "internal_error")])
async def test_leaving_early_stops_the_engine(error: Exception, outcome: str) -> None:
    hub = Hub(Say("a"), Gate("never"))
    call = await hub.call()

    async def leave() -> None:
        async with call:
            await call.__anext__()
            raise error

    with pytest.raises(type(error)):
        await leave()
    assert hub.generation.aborted
    assert hub.record.outcome == outcome
    assert hub.record.usage.completion_tokens == 1


@pytest.mark.parametrize("told", [0, 1])
async def test_a_cancelled_call_stops_the_engine_and_is_settled(told: int) -> None:
    hub = Hub(*[Say("a")] * told, Gate("never"))
    task = asyncio.create_task(drain(await hub.call()))
    await hub.backend.wait_until(lambda: bool(hub.backend.generations) and hub.generation.num_told == told)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert hub.generation.aborted
    assert hub.record.outcome == "cancelled"


class SlowToEnd:
    """A generation whose final counts come late, and may be cancelled upon meanwhile."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.told = asyncio.Event()
        self.ended = False
        self.usage = TokenUsage(prompt_tokens=1, completion_tokens=1)
        self.timings = None
        self.num_aborts = 0

    def __aiter__(self) -> SlowToEnd:
        return self

    async def __anext__(self) -> Sequence[GenerationEvent]:
        await asyncio.Event().wait()
        return []

    def abort(self) -> None:
        self.num_aborts += 1

    async def wait_ended(self, timeout_s: float) -> None:
        assert timeout_s == 1.0
        self.asked.set()
        await self.told.wait()
        self.usage = TokenUsage(prompt_tokens=1, completion_tokens=7)
        self.ended = True


class SlowPrepared:
    model = "m"
    num_prompt_tokens = 1
    num_parts = 1
    echo_texts: Sequence[str] = ()
    prompt_lengths: Sequence[int] = (1,)
    output_caps: Sequence[int] = (10,)

    def __init__(self, generation: SlowToEnd) -> None:
        self._generation = generation

    def start(
        self, info: RequestInfo, output_caps: Sequence[int] | None = None, held_cap: int | None = None
    ) -> SlowToEnd:
        return self._generation


async def test_final_counts_are_waited_for_through_any_number_of_cancellations() -> None:
    hub = Hub()
    template = await hub.call()
    generation = SlowToEnd()
    call = Call(
        SlowPrepared(generation),
        template.info,
        0.0,
        hub.clock,
        hub.records,
        WaitingRequests(),
        Limiter(in_memory(hub.clock), hub.clock),
        requested_model="m",
        prices=(),
        num_prompts=1,
        num_choices=1,
    )
    task = asyncio.create_task(drain(call))
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await generation.asked.wait()
        await asyncio.sleep(0)
    assert hub.records.all == []
    generation.told.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert generation.num_aborts == 1
    assert hub.record.usage.completion_tokens == 7


async def test_a_clock_that_is_set_back_closes_no_request_before_it_was_opened() -> None:
    hub = Hub(Say("x"))
    call = await hub.call()
    async with call:
        hub.clock.now -= 7200
        async for _ in call:
            pass

    assert hub.record.closed_at_ms == hub.record.opening.opened_at_ms
