"""However answers end, others come and go, quotas are topped up and the store stays away: the tokens told are never
more than a hard quota has, and an answer is cut only where there is no token left for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from unittest import mock

import msgspec
from examples import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from limited_calls_kit import Calls, ends
from limiter_kit import MODEL, ORGANIZATION, Wanted, info_of, limit, limited, top_up

from gateway.backends.scripted import Say, Script
from gateway.domain.events import GenerationEvent
from gateway.domain.limits.policy import QuotaRule
from gateway.domain.principal import Principal
from gateway.domain.request import GenerationRequest, Text
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable, QuotaExceeded
from gateway.services import headroom
from gateway.services.call import Call
from gateway.services.grants import Grant

STOP = "stop"


@dataclass(frozen=True)
class Day:
    """What happens.

    Attributes:
        amounts: of the hard quotas of a key, and of its team if there are two.
        most: output tokens of an answer.
        says: which answer says a token, or its last one (``-1 - answer``).
        happens: between two readings: somebody comes with so many tokens, or goes and has used so many, or the quota is
            topped up by so many.
        failures: of the next asks for more, whether the store is away.
    """

    amounts: list[int]
    prompts: list[int]
    num_choices: int
    most: int
    says: list[int]
    happens: list[tuple[str, int]]
    failures: list[bool]

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.num_choices


@st.composite
def days(draw: st.DrawFn) -> Day:
    prompts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    num_choices = draw(st.integers(1, 3))
    num_answers = len(prompts) * num_choices
    most = draw(st.integers(1, 80))
    dice, stops = draw(st.randoms(use_true_random=False)), draw(st.sampled_from([0, 0, 0.01, 0.1]))
    says = [dice.randrange(num_answers) for _ in range(draw(st.integers(0, (most + 20) * num_answers)))]
    what = st.sampled_from(["come", "come", "go", "go", "top up", "nothing"])
    return Day(
        amounts=draw(st.lists(st.integers(10, 160), min_size=1, max_size=2)),
        prompts=prompts,
        num_choices=num_choices,
        most=most,
        says=[-1 - choice if dice.random() < stops else choice for choice in says],
        happens=draw(st.lists(st.tuples(what, st.integers(0, 60)), max_size=80)),
        failures=draw(st.lists(st.sampled_from([True, True, True, False]), max_size=12)),
    )


class Hub(Calls):
    """Lives a day.

    Attributes:
        spent: tokens that others have used.
        has_failed: the store was away for once.
    """

    def __init__(self, day: Day) -> None:
        steps = [Say("a" if choice >= 0 else STOP, choice if choice >= 0 else -1 - choice) for choice in day.says]
        rules = [QuotaRule(unit="tokens", period="day", amount=amount) for amount in day.amounts]
        self.quotas = [limit(rule, scope) for rule, scope in zip(rules, ("key", "team"), strict=False)]
        super().__init__(Script(steps=tuple(steps)), *self.quotas)
        self.now = self.principal
        self.topped_up = 0
        self.spent = 0
        self.has_failed = False
        self._others: list[Grant] = []
        self._failures = list(day.failures)
        self._raise_output = self.limiter.raise_output
        self.limiter.raise_output = self.raise_output  # type: ignore[method-assign]
        self.limiter._refresh = self.refreshed

    async def refreshed(self, _: Principal) -> Principal:
        return self.now

    async def raise_output(self, grant: Grant, wanted: int) -> int:
        await asyncio.sleep(0)
        if self._failures and self._failures.pop():
            self.has_failed = True
            raise LimitsUnavailable
        return await self._raise_output(grant, wanted)

    def least_left(self) -> int:
        books = self.store._of(ORGANIZATION, 0)
        return min(books.meters.standing(use.meter, 0) for use in self.limiter.plan(self.now, MODEL, ()).uses)

    async def happen(self, what: str, num_tokens: int) -> None:
        if what == "come":
            try:
                self._others.append(await self.admit(Wanted((1,), (num_tokens + 1,)), info=info_of(self.now)))
            except QuotaExceeded:
                assert self.least_left() < 2
        elif what == "go" and self._others:
            await self.go(self._others.pop(0), num_tokens)
        elif what == "top up":
            self.topped_up += num_tokens
            top_ups = tuple(top_up(self.topped_up, of=each, period_id="2026-11-29") for each in self.quotas)
            self.now = msgspec.structs.replace(limited(*self.quotas), top_ups=top_ups)
        assert self.least_left() >= 0

    async def go(self, other: Grant, num_tokens: int) -> None:
        output = min(num_tokens, other.granted)
        usage = TokenUsage(1, output) if output else TokenUsage()
        self.spent += usage.total_tokens
        await self.limiter.settle(other, usage)

    async def all_go(self) -> None:
        for other in self._others:
            await self.go(other, 0)

    def watch(self, call: Call) -> None:
        """That nobody is told to end who could have a token more."""
        raise_cap = self.generation.raise_cap

        def watched(output_cap: int) -> None:
            progress, held_cap = self.generation.progress, self.generation._held_cap
            assert held_cap is not None
            if output_cap <= held_cap and not self.has_failed:
                there = call.grant.granted + self.least_left() - progress.ended_tokens
                assert there // progress.num_open <= held_cap
            raise_cap(output_cap)

        self.generation.raise_cap = watched  # type: ignore[method-assign]

    @property
    def sizes(self) -> list[int]:
        """Of the answers."""
        return [choice.num_tokens for choice in self.generation._choices]


@given(day=days())
@settings(max_examples=examples(300), deadline=None)
def test_not_a_token_too_many_and_none_too_few(day: Day) -> None:
    with mock.patch.multiple(headroom, RETRY_S=0, PATIENCE_S=0.0001):
        asyncio.run(_live(day))


async def _live(day: Day) -> None:
    hub = Hub(day)
    await hub.begin()
    wanted = GenerationRequest(
        model=MODEL,
        prompts=tuple(Text("a " * length) for length in day.prompts),
        num_choices=day.num_choices,
        max_output_tokens=day.most,
        stop=(STOP,),
    )
    call = await hub.inference.prepare(wanted, info_of(hub.principal))
    events: list[GenerationEvent] = []
    happens = iter(day.happens)
    try:
        async with call:
            hub.watch(call)
            async for some in call:
                events.extend(some)
                assert sum(hub.sizes) <= call.grant.granted
                await hub.happen(*next(happens, ("nothing", 0)))
    except QuotaExceeded:
        assert hub.least_left() < sum(day.prompts) + day.num_answers
        event("refused")
        return

    for choice, (reason, cause) in ends(events).items():
        if reason == "length" and cause is None:
            assert hub.sizes[choice] == day.most
        elif cause is not None:
            assert reason == "length"
            assert hub.sizes[choice] < day.most
            assert cause == "quota_exceeded" or hub.has_failed
        event(f"{reason} {cause}")
    await hub.all_go()
    used = hub.records[0].usage.total_tokens
    assert used == sum(day.prompts) + sum(hub.sizes)
    assert await hub.left(hub.now) == [amount + hub.topped_up - hub.spent - used for amount in day.amounts]
    assert await hub.store.held(ORGANIZATION) == []
