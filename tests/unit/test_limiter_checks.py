"""Limits on a request's size, what is expected of it, refusals that cost little, and stores that do not know."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from limiter_kit import (
    HARD,
    MODEL,
    ORGANIZATION,
    REQUESTS,
    RUNNING,
    SOFT,
    Process,
    Wanted,
    info_of,
    limit,
    limited,
)

from gateway.domain.limits.admission import Ask, Verdict
from gateway.domain.limits.meters import MOST_TOKENS
from gateway.domain.limits.policy import (
    ContextSize,
    Limit,
    OutputSize,
    QuotaRule,
    RequestRate,
    Rule,
    TokenRate,
)
from gateway.domain.usage import TokenUsage
from gateway.errors import (
    ContextLengthExceeded,
    LimitExceeded,
    LimitsUnavailable,
    QuotaExceeded,
)


async def process_with(*limits: Limit | Rule) -> Process:
    process = Process(*limits)
    await process.begin()
    return process


# Sizes


async def test_limits_on_a_requests_size_refuse_prompts_and_cut_answers() -> None:
    process = Process(limit(ContextSize(amount=120), "organization"), OutputSize(amount=90))

    assert (await process.admit(Wanted((10, 50), (100, 100)))).caps == [90, 70]
    assert (await process.admit(Wanted((119,), (100,)))).caps == [1]
    with pytest.raises(ContextLengthExceeded, match="length is 120 tokens"):
        await process.admit(Wanted((10, 120), (100, 100)))
    assert process.told.shadow_refusals == []


async def test_shadow_limits_on_a_requests_size_are_told_of_and_change_nothing() -> None:
    process = Process(
        limit(ContextSize(amount=120), "team", is_shadow=True), limit(OutputSize(amount=90), is_shadow=True)
    )

    assert (await process.admit(Wanted((119,), (90,)))).caps == (90,)
    assert process.told.shadow_refusals == []
    assert (await process.admit(Wanted((10, 120), (90, 91)))).caps == (90, 91)
    assert process.told.shadow_refusals == ["team context", "key output"]


async def test_a_cut_answer_is_all_that_is_reserved() -> None:
    process = await process_with(HARD, OutputSize(amount=30))
    grant = await process.admit()

    assert (grant.granted, grant.is_clamped) == (30, False)
    assert await process.left() == [960]


async def test_nobody_asks_for_more_than_can_be_counted() -> None:
    process = await process_with(SOFT)
    grant = await process.admit(Wanted((1_000_000,), (6_000_000,)), num_choices=128)

    assert (grant.granted, grant.max_output) == (MOST_TOKENS - 1_000_000, 128 * 6_000_000)
    assert grant.is_clamped, "more is asked for when it is there"


# Expected output


async def test_a_rate_is_charged_for_what_requests_like_it_wrote_lately() -> None:
    process = await process_with(TokenRate(amount=10_000, period="hour"))
    first = await process.admit(Wanted((10,), (2_000,)), num_choices=2)
    assert first.remaining == (10_000 - 10 - 2 * 256,)
    await process.limiter.settle(first, TokenUsage(10, 61))

    second = await process.admit(Wanted((10, 10), (2_000, 1_500)), num_choices=3)
    assert second.remaining == (10_000 - 71 - 20 - 3 * 2 * 31,)
    other = await process.admit(Wanted((10,), (100,)))
    assert other.remaining == (10_000 - 71 - 206 - 110,), "a cap of another size says something else"


async def test_a_strict_rate_must_have_room_for_all_that_may_be_written() -> None:
    strict = TokenRate(amount=1_000, period="hour", is_strict=True)
    process = await process_with(strict)
    grant = await process.admit(Wanted((10,), (900,)))
    assert grant.remaining == (90,)
    await process.limiter.settle(grant, TokenUsage(10, 1))

    assert (await process.admit(Wanted((10,), (900,)))).remaining == (79,)
    with pytest.raises(LimitExceeded):
        await process.admit(Wanted((10,), (100,)))


@pytest.mark.parametrize(
    ("wanted", "num_choices", "caps"),
    [
        (Wanted((10,), (500,)), 1, [90]),
        (Wanted((10,), (500,)), 4, [22]),
        (Wanted((10, 20), (500, 5)), 1, [35, 5]),
        (Wanted((99,), (500,)), 1, [1]),
        (Wanted((10,), (90,)), 1, [90]),
        (Wanted((10,), (20,)), 1, [20]),
    ],
)
async def test_no_request_writes_more_than_fits_into_a_strict_rate(
    wanted: Wanted, num_choices: int, caps: list[int]
) -> None:
    process = await process_with(TokenRate(amount=100, period="hour", is_strict=True))
    grant = await process.admit(wanted, num_choices=num_choices)

    assert list(grant.caps) == caps
    assert grant.granted == sum(caps) * num_choices
    assert grant.remaining == (100 - wanted.num_prompt_tokens - grant.granted,)


@pytest.mark.parametrize(("prompt", "num_choices"), [(100, 1), (98, 3), (101, 1)])
async def test_what_has_no_room_in_a_strict_rate_for_one_token_each_is_never_taken(
    prompt: int, num_choices: int
) -> None:
    process = await process_with(TokenRate(amount=100, period="hour", is_strict=True))
    await process.admit(Wanted((10,), (20,)))
    with pytest.raises(LimitExceeded) as caught:
        await process.admit(Wanted((prompt,), (500,)), num_choices=num_choices)

    assert caught.value.should_retry is False
    assert f"needs at least {prompt + num_choices}" in caught.value.message
    assert caught.value.limit.remaining == 70


# A cheap no


class Counting(Process):
    """Counts what the store is asked."""

    def __init__(self, *limits: Limit | Rule) -> None:
        super().__init__(*limits)
        self.asked: list[str] = []
        for name in ("admit", "check"):
            setattr(self.store, name, self._counted(name, getattr(self.store, name)))

    def _counted(self, name: str, method: Any) -> Any:
        async def counted(ask: Ask) -> Verdict:
            self.asked.append(name)
            answer: Verdict = await method(ask)
            return answer

        return counted

    def guard(self) -> None:
        self.limiter.guard(self.principal, MODEL, ())


async def test_what_was_refused_a_moment_ago_is_refused_again_without_asking() -> None:
    process = Counting(RequestRate(amount=6, period="minute", burst=1))
    process.guard()
    await process.admit()
    process.guard()
    with pytest.raises(LimitExceeded):
        await process.admit()
    process.clock.now += 0.2
    with pytest.raises(LimitExceeded) as caught:
        process.guard()

    assert (caught.value.limit.name, caught.value.limit.wait_ms) == ("requests/minute", 9_800)
    assert process.asked == ["admit", "admit"]
    assert process.told.refusals == ["key requests/minute"] * 2
    process.clock.now += 0.06
    process.guard()


async def test_a_refusal_is_forgotten_with_the_limit_that_it_was_for() -> None:
    process = Counting(QuotaRule(unit="tokens", period="day", amount=110))
    await process.begin()
    await process.admit()
    with pytest.raises(LimitExceeded):
        await process.admit()
    process.principal = limited(QuotaRule(unit="tokens", period="day", amount=220))
    process.guard()

    await process.admit()


@pytest.mark.parametrize("usage", [TokenUsage(10, 5), TokenUsage()])
async def test_what_is_given_back_can_be_had_at_once(usage: TokenUsage) -> None:
    """By other keys, too."""
    process = Process(limit(QuotaRule(unit="tokens", period="day", amount=110), "team"))
    await process.begin()
    other = msgspec.structs.replace(process.principal, key_id="key_2")
    first = await process.admit()
    for principal in (process.principal, other):
        with pytest.raises(QuotaExceeded):
            await process.admit(info=info_of(principal))
        with pytest.raises(QuotaExceeded):
            process.limiter.guard(principal, MODEL, ())
    await process.limiter.settle(first, usage)

    for principal in (process.principal, other):
        process.limiter.guard(principal, MODEL, ())
    await process.admit(Wanted((10,), (1,)), info=info_of(other))


async def test_a_check_refuses_what_has_no_room_for_one_token_and_consumes_nothing() -> None:
    process = await process_with(REQUESTS, QuotaRule(unit="tokens", period="day", amount=50))
    info = info_of(process.principal)
    await process.limiter.check(info, MODEL, ())
    assert await process.left() == [2, 50]
    await process.admit()
    with pytest.raises(QuotaExceeded) as caught:
        await process.limiter.check(info_of(process.principal), MODEL, ())

    assert caught.value.limit.remaining == 0
    assert await process.left() == [1, 0]
    assert process.told.refusals == ["key quota-tokens/day"]
    await Process().limiter.check(info_of(limited()), MODEL, ())


# Stores that do not know


async def test_a_hard_quota_waits_a_moment_for_the_store_to_be_told_what_is_committed() -> None:
    process = Process(HARD)

    async def tell() -> None:
        await process.limiter.has_lost.wait()
        assert process.limiter.lost == {ORGANIZATION}
        await process.begin({"quota-tokens/day:key_1:2026-11-29:": 700})

    grant, _ = await asyncio.gather(process.admit(), tell())
    assert grant.remaining == (190,)


async def test_if_that_takes_longer_hard_quotas_refuse_and_soft_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.services.limiter.REVIVAL_S", 0.01)
    process = Process(HARD)
    with pytest.raises(LimitsUnavailable) as caught:
        await process.admit()
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "limits_unavailable", 1)
    with pytest.raises(LimitsUnavailable):
        await process.limiter.check(info_of(process.principal), MODEL, ())
    process.principal = limited(SOFT, RUNNING)
    grant = await process.admit()

    assert grant.remaining == (890, 1)
    assert process.limiter.unsure == {ORGANIZATION}, "it is found out meanwhile"
    assert process.told.refusals == []


async def test_a_store_that_was_lost_meanwhile_is_asked_again_once_it_knows() -> None:
    process = await process_with(HARD)
    await process.admit()
    process.store._books.clear()

    async def tell() -> None:
        await process.limiter.has_lost.wait()
        await process.begin({"quota-tokens/day:key_1:2026-11-29:": 995})

    with pytest.raises(QuotaExceeded):
        await asyncio.gather(process.admit(), tell())
