"""GET /v1/limits: every limit of a key with what is left of it."""

from __future__ import annotations

from limiter_kit import (
    HARD,
    MODEL,
    REQUESTS,
    RUNNING,
    SOFT,
    TOKENS,
    limit,
    top_up,
)
from limits_api_kit import WORDS, opened

from gateway.backends.scripted import Script
from gateway.domain.limits.policy import (
    ContextSize,
    OutputSize,
    QuotaRule,
    TokenRate,
)


async def test_every_limit_is_listed_with_what_is_left_of_it() -> None:
    quota = QuotaRule(unit="microusd", period="week", amount=5_000, is_hard=False)
    limits = (
        limit(HARD, "organization"),
        limit(ContextSize(amount=4_000), "organization", model="other"),
        limit(TokenRate(amount=600, period="minute", burst=100, prompt_percent=50, cached_percent=5), "team"),
        limit(quota, "team", is_shadow=True),
        limit(REQUESTS),
        limit(RUNNING, model=MODEL),
        limit(OutputSize(amount=9)),
    )
    top_ups = (top_up(500, of=limits[0], period_id="2026-11-29"),)
    async with opened(WORDS, *limits, top_ups=top_ups, time_zone="Asia/Kolkata") as hub:
        await hub.chat()
        data = await hub.limits()

    assert data == [
        {
            "name": "quota-tokens/day",
            "scope": "organization",
            "model": None,
            "is_enforced": True,
            "amount": 1_000,
            "remaining": 981,
            "unit": "tokens",
            "is_hard": True,
            "period": "2026-11-30",
            "period_ends_at": "2026-11-30T18:30:00Z",
        },
        {
            "name": "context",
            "scope": "organization",
            "model": "other",
            "is_enforced": True,
            "amount": 4_000,
            "remaining": None,
        },
        {
            "name": "tokens/minute",
            "scope": "team",
            "model": None,
            "is_enforced": True,
            "amount": 600,
            "remaining": 86,
            "burst": 100,
            "period_ms": 60_000,
            "prompt_percent": 50,
            "cached_percent": 5,
            "output_percent": 100,
        },
        {
            "name": "quota-microusd/week",
            "scope": "team",
            "model": None,
            "is_enforced": False,
            "amount": 5_000,
            "remaining": 5_000,
            "unit": "microusd",
            "is_hard": False,
            "period": "2026-W49",
            "period_ends_at": "2026-12-06T18:30:00Z",
        },
        {
            "name": "requests/minute",
            "scope": "key",
            "model": None,
            "is_enforced": True,
            "amount": 60,
            "remaining": 1,
            "burst": 2,
            "period_ms": 60_000,
        },
        {"name": "concurrent", "scope": "key", "model": MODEL, "is_enforced": True, "amount": 2, "remaining": 2},
        {"name": "output", "scope": "key", "model": None, "is_enforced": True, "amount": 9, "remaining": None},
    ]


async def test_top_ups_are_part_of_the_amount_and_debt_is_below_nothing() -> None:
    quota = limit(SOFT)
    async with opened(
        Script.saying(*["word "] * 100), quota, TOKENS, top_ups=(top_up(500, of=quota, period_id="2026-11-29"),)
    ) as hub:
        for most in (1, 99):
            hub.clock.now += 2
            assert (await hub.chat(most=most)).status_code == 200
        data = await hub.limits()

    assert (data[0]["amount"], data[0]["remaining"]) == (1_500, 1_500 - 11 - 109)
    assert data[1]["remaining"] == -9


async def test_a_key_without_limits_has_an_empty_list_and_nobody_else_gets_any() -> None:
    async with opened(WORDS) as hub:
        assert await hub.limits() == []
        assert (await hub.client.get("/limits")).status_code == 200
        assert (await hub.client.get("/v1/limits", headers={"x-api-key": "wrong"})).status_code == 401
