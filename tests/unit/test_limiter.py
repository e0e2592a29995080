"""What a request is admitted with, and how it is refused: by which limit, with which error, having consumed nothing."""

from __future__ import annotations

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
    TOKENS,
    Process,
    Wanted,
    info_of,
    limit,
    top_up,
)

from gateway.domain.limits.policy import (
    Concurrency,
    Limit,
    QuotaRule,
    RequestRate,
    Rule,
    TokenRate,
)
from gateway.domain.principal import RequestClass
from gateway.domain.usage import TokenUsage
from gateway.errors import (
    ConcurrencyExceeded,
    LimitExceeded,
    QuotaExceeded,
)

ALL = (REQUESTS, TOKENS, RUNNING, HARD)


async def process_with(*limits: Limit | Rule, **fields: Any) -> Process:
    process = Process(*limits, **fields)
    await process.begin()
    return process


async def test_without_limits_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process()
    monkeypatch.delattr("gateway.limits.memory.MemoryLimits.admit")
    grant = await process.admit(Wanted((10, 20), (100, 50)), num_choices=3)

    assert (grant.granted, grant.max_output, grant.is_clamped, grant.remaining) == (450, 450, False, ())
    await process.limiter.settle(grant, TokenUsage(10, 10))
    assert process.num_live == 0


async def test_an_admitted_request_holds_part_of_every_meter() -> None:
    process = await process_with(*ALL)
    grant = await process.admit()

    assert grant.remaining == (1, 0, 1, 890)
    assert await process.left() == [1, 0, 1, 890]
    assert (grant.granted, grant.caps, grant.request_class) == (100, (100,), "interactive")
    assert process.limiter.live == {ORGANIZATION: {grant.info.request_id: grant}}


@pytest.mark.parametrize(
    ("rule", "wanted", "error", "wait_ms", "retry_after_s"),
    [
        (RequestRate(amount=60, period="minute", burst=1), Wanted(), LimitExceeded, 1_000, 1),
        (RequestRate(amount=1, period="day"), Wanted(), LimitExceeded, 86_400_000, 86_400),
        (RequestRate(amount=0, period="day", burst=1), Wanted(), LimitExceeded, None, None),
        (TOKENS, Wanted(), LimitExceeded, 10_000, 10),
        (Concurrency(amount=1), Wanted(), ConcurrencyExceeded, 1_000, 1),
        (QuotaRule(unit="tokens", period="day", amount=111), Wanted(), QuotaExceeded, 1_600_000, 1_600),
        (QuotaRule(unit="tokens", period="week", amount=120), Wanted(), QuotaExceeded, 1_600_000, 1_600),
        (QuotaRule(unit="tokens", period="month", amount=115), Wanted(), QuotaExceeded, 88_000_000, 88_000),
    ],
    ids=lambda each: each.name if hasattr(each, "name") else "",
)
@pytest.mark.parametrize("scope", ["organization", "team", "key"])
async def test_a_second_request_that_is_refused_says_by_what_and_leaves_everything_as_it_was(
    scope: Any, rule: Rule, wanted: Wanted, error: type[LimitExceeded], wait_ms: int | None, retry_after_s: int | None
) -> None:
    others = (limit(Concurrency(amount=9), "organization"), limit(RequestRate(amount=9, period="second"), "team"))
    process = await process_with(*others, limit(rule, scope, model=MODEL), TokenRate(amount=9_999, period="hour"))
    await process.admit(wanted)
    before = await process.left()
    with pytest.raises(error) as caught:
        await process.admit(wanted)

    reached = caught.value.limit
    assert type(caught.value) is error
    assert (reached.name, reached.scope, reached.model) == (rule.name, scope, MODEL)
    assert (reached.wait_ms, caught.value.retry_after_s) == (wait_ms, retry_after_s)
    assert reached.remaining == before[2]
    assert await process.left() == before
    assert process.num_live == 1
    assert process.told.refusals == [f"{scope} {rule.name}"]


async def test_a_refusal_ends_exactly_when_it_said() -> None:
    process = await process_with(TOKENS)
    grant = await process.admit(Wanted((40,), (60,)))
    await process.limiter.settle(grant, TokenUsage(40, 53))
    with pytest.raises(LimitExceeded) as caught:
        await process.admit(Wanted((30,), (10,)))
    assert caught.value.limit.wait_ms == 3_300

    process.clock.now += 3.299
    with pytest.raises(LimitExceeded):
        await process.admit(Wanted((30,), (10,)))
    process.clock.now += 0.001
    await process.admit(Wanted((30,), (10,)))


async def test_what_no_waiting_helps_names_the_limit_that_is_too_small() -> None:
    process = await process_with(
        limit(RequestRate(amount=1, period="hour"), "organization"),
        limit(TokenRate(amount=5, period="hour"), is_shadow=True),
        TOKENS,
    )
    await process.admit()
    with pytest.raises(LimitExceeded) as caught:
        await process.admit(Wanted((101,), (1,)))

    error = caught.value
    assert (error.limit.name, error.limit.scope, error.limit.wait_ms) == ("tokens/minute", "key", None)
    assert error.message.startswith("The request is larger than the key's limit 'tokens/minute' ever allows at once")
    assert (error.should_retry, error.retry_after_s) == (False, None)
    with pytest.raises(LimitExceeded) as caught:
        await process.admit()
    assert caught.value.limit.name == "requests/hour", "it is not remembered"


async def test_a_prompt_beyond_a_whole_quota_has_nothing_to_wait_for() -> None:
    process = await process_with(QuotaRule(unit="tokens", period="month", amount=10))
    with pytest.raises(QuotaExceeded) as caught:
        await process.admit()

    assert (caught.value.limit.remaining, caught.value.limit.wait_ms, caught.value.retry_after_s) == (10, None, None)


async def test_of_a_request_that_several_refuse_the_one_with_the_longest_wait_is_told() -> None:
    process = await process_with(
        RequestRate(amount=60, period="minute", burst=1), RequestRate(amount=1, period="hour"), RUNNING
    )
    await process.admit()
    with pytest.raises(LimitExceeded) as caught:
        await process.admit()

    assert (caught.value.limit.name, caught.value.limit.wait_ms) == ("requests/hour", 3_600_000)


# Quotas


@pytest.mark.parametrize(
    ("left", "num_choices", "prompts", "granted"),
    [
        (500, 1, ((10,), (100,)), 100),
        (60, 1, ((10,), (100,)), 50),
        (11, 1, ((10,), (100,)), 1),
        (60, 4, ((10,), (100,)), 50),
        (14, 4, ((10,), (100,)), 4),
        (60, 2, ((10, 6), (100, 30)), 44),
    ],
)
async def test_a_hard_quota_grants_what_it_has_left(
    left: int, num_choices: int, prompts: tuple[tuple[int, ...], tuple[int, ...]], granted: int
) -> None:
    process = await process_with(QuotaRule(unit="tokens", period="day", amount=left))
    grant = await process.admit(Wanted(*prompts), num_choices=num_choices)

    assert grant.granted == granted
    assert grant.is_clamped == (granted < sum(prompts[1]) * num_choices)
    assert await process.left() == [left - sum(prompts[0]) - granted]


@pytest.mark.parametrize(("num_choices", "prompts", "least"), [(1, (10,), 11), (3, (10,), 13), (2, (10, 5), 19)])
async def test_less_than_a_token_for_each_answer_is_refused(
    num_choices: int, prompts: tuple[int, ...], least: int
) -> None:
    wanted = Wanted(prompts, (100,) * len(prompts))
    process = await process_with(QuotaRule(unit="tokens", period="day", amount=least - 1))
    with pytest.raises(QuotaExceeded):
        await process.admit(wanted, num_choices=num_choices)
    assert await process.left() == [least - 1]
    topped_up = msgspec.structs.replace(
        process.principal, top_ups=(top_up(1, of=process.principal.limits[0], period_id="2026-11-29"),)
    )

    grant = await process.admit(wanted, info=info_of(topped_up), num_choices=num_choices)
    assert grant.granted == num_choices * len(prompts)


@pytest.mark.parametrize(
    ("used", "asked", "got"),
    [
        (0, "interactive", "interactive"),
        (999, "standard", "standard"),
        (1_000, "interactive", "batch"),
        (5_000, "standard", "batch"),
        (5_000, "batch", "batch"),
    ],
)
async def test_a_soft_quota_refuses_nothing_and_lowers_the_class_of_what_is_beyond_it(
    used: int, asked: RequestClass, got: str
) -> None:
    process = Process(SOFT)
    await process.begin({"quota-tokens/day:key_1:2026-11-29:": used})
    grant = await process.admit(info=info_of(process.principal, asked))

    assert (grant.request_class, grant.granted, grant.info.request_class) == (got, 100, asked)
    assert grant.remaining == (890 - used,)


async def test_a_period_begins_at_midnight_of_the_organizations_zone() -> None:
    process = Process(QuotaRule(unit="tokens", period="day", amount=110), time_zone="Asia/Kolkata")
    process.clock.now = 1_795_976_999.9  # 18:29:59.9 in UTC, where midnight is five hours and a half off
    await process.begin()
    first = await process.admit()
    with pytest.raises(QuotaExceeded) as caught:
        await process.admit()
    assert caught.value.limit.wait_ms == 100
    process.clock.now += 0.1
    second = await process.admit()

    assert [grant.plan.quotas[0].key for grant in (first, second)] == [
        "quota-tokens/day:key_1:2026-11-29:",
        "quota-tokens/day:key_1:2026-11-30:",
    ]
    await process.limiter.settle(first, TokenUsage(10, 5))
    assert await process.left() == [0], "it is charged to the day that it was admitted in"


async def test_a_clock_that_is_set_back_leads_back_to_the_day_before() -> None:
    """As when it was a day ahead by mistake: what is left of tomorrow is not for today's requests."""
    process = await process_with(HARD)
    await process.admit(Wanted(output_caps=(900,)))
    process.clock.now += 86_400
    await process.admit()
    assert await process.left() == [890]
    process.clock.now -= 86_400

    assert (await process.admit()).granted == 80
    assert await process.left() == [0]


# Shadow limits


async def test_shadow_limits_are_told_of_once_a_request_and_are_charged() -> None:
    rules = [
        RequestRate(amount=1, period="day"),
        Concurrency(amount=1),
        QuotaRule(unit="tokens", period="day", amount=9),
    ]
    process = await process_with(*(limit(rule, is_shadow=True) for rule in rules))
    for _ in range(2):
        info = info_of(process.principal)
        await process.limiter.check(info, MODEL, ())
        grant = await process.admit(info=info)

    assert grant.granted == 100
    assert process.told.refusals == []
    told = process.told.shadow_refusals
    assert told == ["key quota-tokens/day", "key requests/day", "key concurrent", "key quota-tokens/day"]
    assert await process.left() == [0, -1, 9 - 220]
