"""More output for a request that was granted less than it wants, while it streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from limited_calls_kit import Calls, ends, lengths
from limiter_kit import ORGANIZATION, Wanted, info_of, limit, limited, top_up

from gateway.backends.scripted import Gate, Say, Script
from gateway.domain.events import GenerationEvent
from gateway.domain.limits.policy import Limit, QuotaRule
from gateway.domain.principal import Principal
from gateway.domain.request import GenerationRequest, Text
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable
from gateway.services import headroom
from gateway.services.grants import Grant

CUT = {0: ("length", "quota_exceeded")}


def saying(num: int, *, gate_at: int | None = None) -> Script:
    """So many tokens, and a gate named ``go`` before one of them."""
    steps = [Say("a")] * num
    if gate_at is None:
        return Script(steps=tuple(steps))
    return Script(steps=(*steps[:gate_at], Gate("go"), *steps[gate_at:]))


def day(amount: int) -> QuotaRule:
    return QuotaRule(unit="tokens", period="day", amount=amount)


class Raised(Calls):
    """Keeps what was asked for.

    Attributes:
        asked: what more output was asked for, and what was granted; None if the store did not answer.
        failures: of the next asks, whether the store is away.
    """

    def __init__(self, script: Script, *limits: Limit | QuotaRule) -> None:
        super().__init__(script, *limits)
        self.asked: list[tuple[int, int | None]] = []
        self.failures: list[bool] = []
        raise_output = self.limiter.raise_output

        async def kept(grant: Grant, wanted: int) -> int:
            await asyncio.sleep(0)
            if self.failures and self.failures.pop(0):
                self.asked.append((wanted, None))
                raise LimitsUnavailable
            granted = await raise_output(grant, wanted)
            self.asked.append((wanted, granted))
            return granted

        self.limiter.raise_output = kept  # type: ignore[method-assign]

    async def other(self, num_tokens: int) -> Grant:
        """Another request that holds so many."""
        return await self.admit(Wanted((1,), (num_tokens - 1,)))

    async def at_gate(self, most: int) -> asyncio.Task[list[GenerationEvent]]:
        """A request that has got to the gate."""
        task = asyncio.create_task(self.answer(most=most))
        async with asyncio.timeout(5):
            await self.backend.wait_until(lambda: bool(self.backend.generations) and self.is_at_gate)
        return task

    @property
    def is_at_gate(self) -> bool:
        return isinstance(self.generation._script.steps[self.generation._position], Gate)

    async def finished(self, task: asyncio.Task[list[GenerationEvent]]) -> list[GenerationEvent]:
        self.backend.gate("go").set()
        async with asyncio.timeout(5):
            return await task


async def raised(script: Script, *limits: Limit | QuotaRule) -> Raised:
    hub = Raised(script, *limits)
    await hub.begin()
    return hub


async def test_enough_for_all_is_never_asked_for() -> None:
    hub = await raised(saying(400), day(1_000))
    events = await hub.answer(most=990)

    assert (lengths(events), ends(events), hub.asked) == ({0: 400}, {0: ("stop", None)}, [])


async def test_an_answer_ends_exactly_where_its_quota_does_and_says_so() -> None:
    hub = await raised(saying(400), day(100))
    events = await hub.answer(most=None)

    assert (lengths(events), ends(events)) == ({0: 90}, CUT)
    assert hub.asked == [(90 + 256, 90), (90 + 256, 90)], "a little before, and when it was there"
    assert await hub.left() == [0]
    assert hub.records[0].outcome == "finished"
    assert (hub.records[0].finish_reason, hub.records[0].usage) == ("length", TokenUsage(10, 90))


async def test_what_others_give_back_is_taken_in_slices_a_little_before_it_is_needed() -> None:
    hub = await raised(saying(700, gate_at=40), day(1_000))
    other = await hub.other(900)
    task = await hub.at_gate(most=650)
    assert hub.asked == []
    await hub.limiter.settle(other, TokenUsage(1, 1))
    events = await hub.finished(task)

    assert hub.asked == [(90 + 256, 346), (346 + 256, 602), (650, 650)]
    assert (lengths(events), ends(events)) == ({0: 650}, {0: ("length", None)})
    assert await hub.left() == [1_000 - 2 - 660]


async def test_what_is_given_back_in_the_last_moment_is_taken_too() -> None:
    hub = await raised(saying(200, gate_at=75), day(100))
    other = await hub.other(10)
    task = await hub.at_gate(most=150)
    assert hub.asked == [(150, 80)]
    await hub.limiter.settle(other, TokenUsage())
    events = await hub.finished(task)

    assert hub.asked == [(150, 80), (150, 90), (150, 90), (150, 90)]
    assert (lengths(events), ends(events)) == ({0: 90}, CUT)


async def test_a_top_up_while_it_streams_lets_it_go_on() -> None:
    quota = limit(day(100), "team")
    now = limited(quota)

    async def refresh(_: Principal) -> Principal:
        return now

    hub = Raised(saying(300, gate_at=85), quota)
    hub.limiter._refresh = refresh
    await hub.begin()
    task = await hub.at_gate(most=200)
    now = limited(quota, top_ups=(top_up(45, of=quota, period_id="2026-11-29"),))
    events = await hub.finished(task)

    assert (lengths(events), ends(events)) == ({0: 135}, CUT)
    assert await hub.left(now) == [0]


async def test_a_lowered_quota_takes_nothing_back() -> None:
    quota = limit(day(500))
    now = limited(quota)

    async def refresh(_: Principal) -> Principal:
        return now

    hub = Raised(saying(600, gate_at=5), quota)
    hub.limiter._refresh = refresh
    await hub.begin()
    task = await hub.at_gate(most=600)
    now = limited(day(20))
    events = await hub.finished(task)

    assert lengths(events) == {0: 490}


# A store that does not answer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "RETRY_S", 0.001)
    monkeypatch.setattr(headroom, "PATIENCE_S", 0.05)


@pytest.mark.usefixtures("quick")
async def test_a_store_that_is_away_is_asked_for_a_while_and_then_the_answer_ends_for_that() -> None:
    hub = await raised(saying(200), day(100))
    hub.failures = [True] * 10_000
    events = await hub.answer(most=150)

    assert len(hub.asked) > 3
    assert set(hub.asked) == {(150, None)}
    assert (lengths(events), ends(events)) == ({0: 90}, {0: ("length", "limits_unavailable")})
    assert await hub.left() == [0]


@pytest.mark.usefixtures("quick")
async def test_a_store_that_comes_back_in_time_is_heard() -> None:
    hub = await raised(saying(200, gate_at=85), day(200))
    other = await hub.other(100)
    hub.failures = [True] * 4
    task = await hub.at_gate(most=150)
    await hub.limiter.settle(other, TokenUsage(1, 1))
    events = await hub.finished(task)

    assert (lengths(events), ends(events)) == ({0: 150}, {0: ("length", None)})
    assert [granted for _, granted in hub.asked] == [None] * 4 + [150]


@pytest.mark.usefixtures("quick")
async def test_a_store_that_comes_back_and_has_nothing_is_the_reason() -> None:
    hub = await raised(saying(200), day(100))
    hub.failures = [True, True, False]
    events = await hub.answer(most=150)

    assert ends(events) == CUT


async def test_nobody_waits_while_there_is_still_some_left() -> None:
    """The store takes its time, the answer does not."""
    hub = await raised(saying(200), day(1_000))
    other = await hub.other(900)
    await hub.limiter.settle(other, TokenUsage(1, 1))
    hub.principal = limited(day(110))
    asked, answer = asyncio.Event(), asyncio.Event()
    raise_output = hub.limiter.raise_output

    async def slow(grant: Grant, wanted: int) -> int:
        asked.set()
        await answer.wait()
        return await raise_output(grant, wanted)

    hub.limiter.raise_output = slow  # type: ignore[method-assign]
    task = asyncio.create_task(hub.answer(most=150))
    await asked.wait()
    assert hub.generation.progress.most_tokens >= 98 - headroom.AHEAD_TOKENS
    await hub.backend.wait_until(lambda: hub.generation.progress.most_tokens == 98)
    answer.set()
    events = await task

    assert (lengths(events), ends(events)) == ({0: 98}, CUT)


async def test_leaving_ends_the_asking() -> None:
    hub = await raised(saying(200), day(100))
    never = asyncio.Event()
    num_ended = 0

    async def endless(_: Grant, __: int) -> int:
        nonlocal num_ended
        try:
            await never.wait()
        finally:
            num_ended += 1
        raise AssertionError

    hub.limiter.raise_output = endless  # type: ignore[method-assign]
    task = asyncio.create_task(hub.answer(most=150))
    await hub.backend.wait_until(lambda: bool(hub.backend.generations) and hub.generation.progress.most_tokens == 90)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert num_ended == 1
    assert await hub.left() == [0]
    assert await hub.store.held(ORGANIZATION) == []


# Several answers


def voices(*choices: int) -> Script:
    return Script(steps=tuple(Say("a", choice) for choice in choices))


async def test_an_answer_that_ends_early_leaves_its_part_to_the_others() -> None:
    """The second is cut at its third token, since the first ended at its first; nothing is left."""
    hub = await raised(Script(steps=(Say("stop", 0), *[Say("a", 1)] * 9)), day(10 + 6))
    call = await hub.inference.prepare(_request(stop=("stop",)), info_of(hub.principal))
    async with call:
        events = [event async for some in call for event in some]

    assert lengths(events)[1] == 5
    assert ends(events) == {0: ("stop", None), 1: ("length", "quota_exceeded")}
    assert await hub.left() == [0]


async def test_answers_that_cannot_all_have_a_token_more_end_together() -> None:
    hub = await raised(voices(*[0, 1, 2] * 5), day(10 + 3 * 3 + 2))
    events = await hub.answer(num_choices=3)

    assert lengths(events) == dict.fromkeys(range(3), 3)
    assert await hub.left() == [2]


def _request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", prompts=(Text("a " * 10),), num_choices=2, max_output_tokens=100, **fields)
