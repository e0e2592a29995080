"""What a request was admitted with is settled once, by whatever way it ends, before its caller can ask again."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from limited_calls_kit import TEN, Calls, drained, ends, lengths
from limiter_kit import HARD, MODEL, NOW_S, ORGANIZATION, REQUESTS, RUNNING, SOFT, TOKENS, info_of, limited

from gateway.backends.scripted import Fail, Gate, Say, Script
from gateway.domain.ledger import Counted
from gateway.domain.limits.admission import Ask, Verdict
from gateway.domain.limits.meters import TOKENS as ONE_A_TOKEN
from gateway.domain.limits.policy import Concurrency, ContextSize, OutputSize, Price, QuotaRule
from gateway.domain.request import Text
from gateway.domain.usage import TokenUsage
from gateway.errors import (
    ClientGone,
    ConcurrencyExceeded,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDown,
    EvenhandError,
    LimitsUnavailable,
    QuotaExceeded,
    Unavailable,
)
from gateway.services.call import LOST_GRANT, Call
from gateway.services.limiter import LEASE_S

ALL = (REQUESTS, TOKENS, RUNNING, HARD)
FULL = [2, 100, 2, 1_000]
WORDS = Script.saying(*(f"word{n} " for n in range(30)))


async def calls(script: Script, *limits: Any, **options: Any) -> Calls:
    made = Calls(script, *limits, **options)
    await made.begin()
    return made


# In time


async def test_limits_are_settled_before_the_answer_is_known_to_be_whole_and_before_its_row() -> None:
    hub = await calls(WORDS, *ALL)
    async with await hub.call() as call:
        assert await hub.left() == [1, 0, 1, 890]
        async for _ in call:
            assert await hub.left() == [1, 0, 1, 890]
        assert await hub.left() == [1, 60, 2, 960]
        assert hub.steps == ["opened"]

    assert hub.steps == ["opened", "settled"]
    assert await hub.left() == [1, 60, 2, 960]


async def test_the_next_request_finds_the_place_of_the_last_one_free() -> None:
    hub = await calls(WORDS, Concurrency(amount=1))
    async with await hub.call() as first:
        with pytest.raises(ConcurrencyExceeded):
            await hub.answer()
        async for _ in first:
            pass
        await hub.answer()

    assert [record.usage.completion_tokens for record in hub.records] == [30, 30]


async def test_the_engine_and_the_record_are_told_what_the_limits_make_of_a_request() -> None:
    price = Price(model=MODEL, valid_from_ms=0, prompt=5, cached=1, completion=9)
    soft = QuotaRule(unit="tokens", period="day", amount=0, is_hard=False)
    hub = await calls(WORDS, soft, OutputSize(amount=12), prices=[price])
    events = await hub.answer()

    [opening] = hub.openings
    assert (opening.request_class, opening.opened_at_ms, opening.price) == ("batch", int(NOW_S * 1000), price.weights)
    key, ends_ms = "quota-tokens/day:key_1:2026-11-29:", int(NOW_S * 1000) + 1_600_000
    assert opening.quotas == (Counted(key, ends_ms, ONE_A_TOKEN),)
    assert hub.generation.info.request_class == hub.records[0].info.request_class == "batch"
    assert ends(events) == {0: ("length", None)}
    assert lengths(events) == {0: 12}


# Never begun


async def test_an_engine_that_does_not_take_the_request_has_cost_nothing() -> None:
    hub = await calls(Script(steps=(), refuse=EngineDown("down")), *ALL)
    with pytest.raises(EngineDown):
        await hub.answer()

    assert await hub.left() == FULL
    assert (hub.steps, hub.num_live, hub.limiter.late) == ([], 0, {})


async def test_what_cannot_be_put_on_record_has_cost_nothing() -> None:
    hub = await calls(WORDS, *ALL)
    hub.refuse = Unavailable("the disk is full")
    with pytest.raises(Unavailable):
        await hub.answer()

    assert hub.generation.aborted
    assert await hub.left() == FULL
    assert (hub.steps, hub.num_live) == ([], 0)


async def test_what_limits_refuse_leaves_the_queue_of_its_key() -> None:
    hub = await calls(Script(steps=(Gate("never"),)), Concurrency(amount=1), max_queue_depth=2)
    async with await hub.call() as waiting:
        for _ in range(5):
            with pytest.raises(ConcurrencyExceeded):
                await hub.answer()
        assert waiting.usage.completion_tokens == 0


async def test_prompts_are_refused_by_what_they_are_before_or_after_they_are_counted() -> None:
    hub = await calls(WORDS, ContextSize(amount=10), QuotaRule(unit="tokens", period="day", amount=0))
    with pytest.raises(ContextLengthExceeded):
        await hub.answer(TEN)
    with pytest.raises(QuotaExceeded):
        await hub.call(Text("long " * 500))

    assert list(hub.backend.generations) == []


# Ended early


@pytest.mark.parametrize("error", [ClientGone(), DeadlineExceeded("late"), EngineDown("lost"), KeyError()])
async def test_what_ends_in_the_queue_has_cost_nothing(error: Exception) -> None:
    hub = await calls(Script(steps=(Say("a"),), queue="queue"), *ALL)
    call = await hub.call()

    async def leave() -> None:
        async with call:
            raise error

    with pytest.raises(type(error)):
        await leave()
    assert await hub.left() == FULL
    assert hub.records[0].usage == TokenUsage()


async def test_a_caller_who_is_cut_off_in_the_queue_is_charged_nothing() -> None:
    hub = await calls(Script(steps=(Say("a"),), queue="queue"), *ALL)
    task = asyncio.create_task(hub.answer())
    await hub.backend.wait_until(lambda: bool(hub.backend.generations))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await hub.left() == FULL
    assert hub.records[0].outcome == "cancelled"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DeadlineExceeded("late"), "deadline"),
        (EngineDown("lost"), "engine_down"),
        (ZeroDivisionError(), "internal_error"),
    ],
)
async def test_what_ends_in_the_middle_is_charged_for_what_ran(error: Exception, outcome: str) -> None:
    hub = await calls(Script(steps=(Say("a"), Say("b"), Fail(error))), *ALL)
    with pytest.raises(type(error)):
        await hub.answer()

    assert hub.records[0].outcome == outcome
    assert hub.records[0].usage == TokenUsage(10, 2)
    assert await hub.left() == [1, 88, 2, 988]


async def test_a_caller_who_leaves_is_charged_for_what_ran() -> None:
    hub = await calls(Script(steps=(*[Say("a")] * 7, Gate("never"))), *ALL)

    async def leave() -> None:
        async with await hub.call() as call:
            for _ in range(7):
                await call.__anext__()
            raise ClientGone

    with pytest.raises(ClientGone):
        await leave()
    assert hub.generation.aborted
    assert hub.records[0].usage == TokenUsage(10, 7)
    assert await hub.left() == [1, 83, 2, 983]


async def test_one_whose_reservation_is_gone_ends_and_says_why() -> None:
    hub = await calls(Script(steps=(Say("a"), Gate("never"))), *ALL)
    task = asyncio.create_task(hub.answer())
    await hub.backend.wait_until(lambda: bool(hub.backend.generations) and hub.generation.num_told == 1)
    [grant] = hub.limiter.live[ORGANIZATION].values()
    assert grant.output == 1
    grant.end()
    with pytest.raises(LimitsUnavailable) as caught:
        await task

    assert caught.value.message == LOST_GRANT
    assert caught.value.is_settled
    assert hub.records[0].error_code == "limits_unavailable"
    assert await hub.left() == [1, 89, 2, 989]


async def test_a_grant_that_is_ended_before_it_runs_is_only_marked() -> None:
    hub = await calls(WORDS, HARD)
    grant = await hub.admit()
    grant.end()

    assert (grant.is_lost, grant.output) == (True, 0)


# Several answers


@pytest.mark.parametrize(
    ("prompts", "num_choices", "amount", "each"),
    [((TEN,), 3, 10 + 3 * 7 + 2, 7), ((TEN, Text("a b")), 2, 12 + 4 * 5 + 3, 5), ((TEN,), 4, 14, 1)],
)
async def test_answers_share_what_a_quota_has_left(
    prompts: tuple[Text, ...], num_choices: int, amount: int, each: int
) -> None:
    hub = await calls(WORDS, QuotaRule(unit="tokens", period="day", amount=amount))
    events = await hub.answer(*prompts, num_choices=num_choices)

    num_answers = len(prompts) * num_choices
    assert lengths(events) == dict.fromkeys(range(num_answers), each)
    assert ends(events) == dict.fromkeys(range(num_answers), ("length", "quota_exceeded"))
    num_used = sum(len(prompt.text.split()) for prompt in prompts) + num_answers * each
    assert await hub.left() == [amount - num_used]
    assert hub.records[0].finish_reason == "length"


async def test_an_answer_that_got_all_it_asked_for_is_not_said_to_be_cut() -> None:
    """The first prompt leaves its answer four tokens of the window, the second ten; its answer is cut first."""
    long = Text("a " * 4_092)
    script = Script(steps=(*[Say("b", 1)] * 9, *[Say("a", 0)] * 9))
    hub = await calls(script, QuotaRule(unit="tokens", period="day", amount=4_092 + 10 + 13))
    events = await hub.answer(long, TEN, most=10)

    assert lengths(events) == {0: 4, 1: 6}
    assert ends(events) == {0: ("length", None), 1: ("length", "quota_exceeded")}
    assert await hub.left() == [3]


async def test_one_that_stops_by_itself_is_not_said_to_be_cut() -> None:
    hub = await calls(Script.saying("a", "b", "c"), QuotaRule(unit="tokens", period="day", amount=14))

    assert ends(await hub.answer()) == {0: ("stop", None)}


# Whatever is awaited


class Slow:
    """Lets others run before and after everything that is asked of the store."""

    def __init__(self, hub: Calls) -> None:
        self._inner = inner = hub.store
        self.num_settled = 0
        admit, settle, cancel = inner.admit, inner.settle, inner.cancel

        async def slow_admit(ask: Ask) -> Verdict:
            await asyncio.sleep(0)
            verdict = await admit(ask)
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                await cancel(ask.organization_id, ask.request_id)  # as the store in Redis does, in the end
                raise
            return verdict

        def slowly(method: Any) -> Any:
            async def slow(*arguments: Any) -> object:
                self.num_settled += 1
                await asyncio.sleep(0)
                answer: object = await method(*arguments)
                await asyncio.sleep(0)
                return answer

            return slow

        inner.admit = slow_admit  # type: ignore[method-assign]
        inner.settle = slowly(settle)  # type: ignore[method-assign]
        inner.cancel = slowly(cancel)  # type: ignore[method-assign]


async def answered(call: Call) -> None:
    with contextlib.suppress(EvenhandError):
        await drained(call)


@pytest.mark.parametrize("num_cancelled", [1, 2, 3])
@pytest.mark.parametrize(
    "script",
    [
        WORDS,
        Script(steps=(Say("a"), Fail(EngineDown("lost")))),
        Script(steps=(), refuse=EngineDown("down")),
        Script(steps=(Say("a"),), queue="queue"),
    ],
    ids=["whole", "lost", "refused", "queued"],
)
async def test_cancelled_at_any_await_a_request_is_settled_once_and_leaves_nothing(
    script: Script, num_cancelled: int
) -> None:
    """A quota that cuts it, so that more is asked for, too."""
    num_steps, is_done = 0, False
    while not is_done:
        hub = await calls(script, REQUESTS, RUNNING, QuotaRule(unit="tokens", period="day", amount=35))
        slow = Slow(hub)
        hub.backend.gate("queue").set()
        call = await hub.call()
        task = asyncio.create_task(answered(call))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        is_done = task.done()
        for _ in range(num_cancelled):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({task})

        assert await hub.store.held(ORGANIZATION) == []
        assert (hub.num_live, hub.limiter.late) == (0, {})
        assert len(hub.records) == len(hub.openings)
        used = sum(record.usage.total_tokens for record in hub.records)
        num_counted = 1 if used else 0
        assert await hub.left() == [2 - num_counted, 2, 35 - used]
        assert slow.num_settled <= 1
        num_steps += 1
    assert num_steps > 5
    assert len(hub.backend.generations) == (script.refuse is None)


async def test_a_soft_quota_alone_asks_for_nothing_more_and_holds_nothing_back() -> None:
    hub = await calls(WORDS, SOFT)
    async with await hub.call(info=info_of(limited(SOFT), "standard")) as call:
        assert (call.grant.is_clamped, call.info.request_class) == (False, "standard")
        assert len([None async for events in call for _ in events]) == 31


# A process that stood still


async def stood_still(hub: Calls, *, others_go_on: bool) -> None:
    """For more than a lease, without a report; others that share the store ask on and reap, if there are any."""
    for _ in range(4):
        hub.clock.now += LEASE_S / 3
        if others_go_on:
            await hub.store.reap(ORGANIZATION, 10)


@pytest.mark.parametrize("told_of", [0, 3])
@pytest.mark.parametrize("num_read", [5, 30])
async def test_what_others_were_given_while_the_process_stood_still_is_used_by_them_alone(
    told_of: int, num_read: int
) -> None:
    """The engine wrote on; it is not charged, and its caller is told that the answer failed."""
    hub = await calls(WORDS, HARD)
    hub.store.never_waits = False

    async def stand_still() -> None:
        async with await hub.call() as call:
            await hub.store.report(ORGANIZATION, {call.info.request_id: told_of}, hub.limiter.lease_ms)
            call.grant.held(told_of, hub.clock.monotonic())
            for _ in range(num_read):
                await anext(call)
            await stood_still(hub, others_go_on=True)
            assert await hub.left() == [1_000 - 10 - told_of]
            async for _ in call:
                pass

    with pytest.raises(LimitsUnavailable) as raised:
        await stand_still()

    assert str(raised.value) == LOST_GRANT
    assert await hub.left() == [1_000 - 10 - told_of]
    assert hub.records[0].usage == TokenUsage(10, told_of)
    assert hub.generation.aborted or hub.generation.ended


@pytest.mark.parametrize("is_shared", [False, True])
async def test_who_stood_still_while_nobody_asked_for_its_place_goes_on(is_shared: bool) -> None:
    hub = await calls(WORDS, HARD)
    hub.store.never_waits = not is_shared
    async with await hub.call() as call:
        await anext(call)
        await stood_still(hub, others_go_on=False)
        async for _ in call:
            pass

    assert hub.records[0].usage == TokenUsage(10, 30)
    assert await hub.left() == [960]


async def test_who_cannot_find_out_after_standing_still_takes_it_for_given_away() -> None:
    hub = await calls(WORDS, HARD)
    hub.store.never_waits = False

    async def stand_still() -> None:
        async with await hub.call() as call:
            await anext(call)
            await stood_still(hub, others_go_on=False)
            hub.store.report = unavailable  # type: ignore[method-assign]
            async for _ in call:
                pass

    with pytest.raises(LimitsUnavailable):
        await stand_still()

    assert hub.records[0].usage == TokenUsage(10, 0)
    assert await hub.left() == [990]


@pytest.mark.parametrize("limit", [SOFT, RUNNING, TOKENS])
async def test_without_a_hard_quota_nothing_ends_for_standing_still(limit: Any) -> None:
    hub = await calls(WORDS, limit)
    async with await hub.call() as call:
        await anext(call)
        await stood_still(hub, others_go_on=True)
        async for _ in call:
            pass

    assert hub.records[0].usage == TokenUsage(10, 30)


async def unavailable(*_: Any) -> Any:
    raise LimitsUnavailable
