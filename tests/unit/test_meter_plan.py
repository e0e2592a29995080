"""Which meters a request goes by: those of its limits, as they are at the moment."""

from __future__ import annotations

from collections.abc import Sequence
from zoneinfo import ZoneInfo

import pytest
from limiter_kit import HARD, MODEL, NOW_S, REQUESTS, RUNNING, SOFT, TOKENS, limit, top_up

from gateway.domain.ledger import Counted
from gateway.domain.limits.meters import REQUESTS as ONE_A_REQUEST
from gateway.domain.limits.meters import TOKENS as ONE_A_TOKEN
from gateway.domain.limits.meters import Bucket, Lease, Quota, Use, Weights
from gateway.domain.limits.plan import MeterPlan, plan_of
from gateway.domain.limits.policy import (
    FREE,
    Concurrency,
    ContextSize,
    Limit,
    OutputSize,
    Price,
    QuotaRule,
    RequestRate,
    Rule,
    TokenRate,
    TopUp,
)

NOW_MS = int(NOW_S * 1000)
DAY_MS = 86_400_000
MIDNIGHT_MS = NOW_MS + 1_600_000
MONEY = QuotaRule(unit="microusd", period="month", amount=5_000_000)


def plan(
    *limits: Limit | Rule,
    top_ups: Sequence[TopUp] = (),
    prices: Sequence[Price] = (),
    zone: str = "UTC",
    now_ms: int = NOW_MS,
) -> MeterPlan:
    held = [each if isinstance(each, Limit) else limit(each) for each in limits]
    return plan_of(held, top_ups, prices, zone=ZoneInfo(zone), model=MODEL, now_ms=now_ms)


def price(valid_from_ms: int, figure: int, model: str = MODEL) -> Price:
    return Price(model=model, valid_from_ms=valid_from_ms, prompt=figure, cached=0, completion=2 * figure)


def weights(figure: int) -> Weights:
    return Weights(prompt=figure, cached=0, output=2 * figure)


@pytest.mark.parametrize(
    ("rule", "use"),
    [
        (
            RequestRate(amount=5, period="second"),
            Use(Bucket(key="requests/second:key_1:", capacity=5, refill=5, period_ms=1_000), ONE_A_REQUEST),
        ),
        (
            RequestRate(amount=60, period="hour", burst=0),
            Use(Bucket(key="requests/hour:key_1:", capacity=0, refill=60, period_ms=3_600_000), ONE_A_REQUEST),
        ),
        (
            TokenRate(amount=600, period="minute"),
            Use(
                Bucket(key="tokens/minute:key_1:", capacity=600, refill=600, period_ms=60_000, max_debt=600),
                ONE_A_TOKEN,
            ),
        ),
        (
            TokenRate(
                amount=600, period="day", burst=90, max_debt=7, prompt_percent=50, cached_percent=5, output_percent=300
            ),
            Use(
                Bucket(key="tokens/day:key_1:", capacity=90, refill=600, period_ms=DAY_MS, max_debt=7),
                Weights(prompt=500_000, cached=50_000, output=3_000_000),
            ),
        ),
        (Concurrency(amount=3), Use(Lease(key="concurrent:key_1:", limit=3))),
        (HARD, Use(Quota(key="quota-tokens/day:key_1:2026-11-29:", amount=1_000))),
        (
            QuotaRule(unit="tokens", period="week", amount=0, is_hard=False),
            Use(Quota(key="quota-tokens/week:key_1:2026-W48:", amount=0, is_hard=False)),
        ),
        (MONEY, Use(Quota(key="quota-microusd/month:key_1:2026-11:", amount=5_000_000), FREE)),
    ],
    ids=lambda each: each.name if hasattr(each, "name") else "",
)
def test_a_rule_is_a_meter_that_is_named_without_its_amount(rule: Rule, use: Use) -> None:
    made = plan(rule)

    assert made.uses == (use,)
    assert [each.limit.rule for each in made.metered] == [rule]


def test_meters_come_in_the_order_of_the_limits_and_sizes_have_none() -> None:
    made = plan(
        limit(HARD, "organization"),
        limit(ContextSize(amount=4_000), "organization"),
        limit(TOKENS, "team"),
        limit(OutputSize(amount=500), "team"),
        limit(REQUESTS),
        limit(RUNNING),
        limit(TokenRate(amount=9, period="day", is_strict=True)),
        limit(SOFT, model=MODEL),
    )

    assert [each.limit.scope for each in made.metered] == ["organization", "team", "key", "key", "key", "key"]
    assert made.uses == tuple(each.use for each in made.metered)
    assert (made.token_rates, made.request_rates, made.soft_quotas) == ((1, 4), (2,), (5,))
    assert (made.is_exact, bool(made.strict_rates)) == (True, True)


def test_nothing_is_limited_without_limits() -> None:
    made = plan()

    assert (made.uses, made.quotas, made.price, made.max_context, made.max_output) == ((), (), None, None, None)
    assert (made.is_exact, made.strict_rates) == (False, ())
    assert made.valid_from_ms == 0
    assert made.valid_until_ms > NOW_MS + 365 * 100 * DAY_MS


def test_limits_of_other_models_are_left_out() -> None:
    made = plan(
        limit(Concurrency(amount=1), model="other"),
        limit(Concurrency(amount=2), model=MODEL),
        limit(Concurrency(amount=3)),
        limit(OutputSize(amount=1), model="other"),
    )

    assert [use.meter.key for use in made.uses] == ["concurrent:key_1:m", "concurrent:key_1:"]
    assert made.max_output is None


def test_shadow_limits_are_counted_and_decide_nothing() -> None:
    rules: list[Rule] = [HARD, SOFT, REQUESTS, TokenRate(amount=9, period="day", is_strict=True), RUNNING]
    made = plan(*(limit(rule, is_shadow=True) for rule in rules))

    assert [use.meter.is_shadow for use in made.uses] == [True] * 5
    assert (made.token_rates, made.request_rates, made.soft_quotas) == ((), (), ())
    assert (made.is_exact, made.strict_rates) == (False, ())
    assert len(made.quotas) == 2, "they are charged in the ledger, too"


def test_of_several_limits_on_a_size_the_smallest_counts_and_shadow_ones_for_themselves() -> None:
    sizes = [(OutputSize, 50, False), (OutputSize, 40, False), (OutputSize, 30, True), (OutputSize, 35, True)]
    sizes += [(ContextSize, 900, False), (ContextSize, 800, True)]
    held = [limit(kind(amount=amount), is_shadow=is_shadow) for kind, amount, is_shadow in sizes]
    made = plan(*held)

    assert (made.max_output, made.max_context) == (40, 900)
    assert (made.shadow_output, made.shadow_context) == (held[2], held[5])


def test_top_ups_add_up_for_the_one_quota_and_period_that_they_are_of() -> None:
    quota, of_team = limit(HARD), limit(HARD, "team")
    for_model = limit(HARD, model=MODEL)
    weekly = limit(QuotaRule(unit="tokens", period="week", amount=10))
    today = "2026-11-29"
    top_ups = [
        top_up(5, of=quota, period_id=today),
        top_up(70, of=quota, period_id=today),
        top_up(100, of=quota, period_id="2026-11-30"),
        top_up(200, of=quota, period_id="2026-11-28"),
        top_up(300, of=for_model, period_id=today),
        top_up(400, of=weekly, period_id="2026-W49"),
        top_up(500, of=quota, period_id=today, scope_id="key_2"),
    ]
    made = plan(of_team, quota, for_model, weekly, top_ups=top_ups)

    assert [use.meter.amount for use in made.uses if isinstance(use.meter, Quota)] == [1_000, 1_075, 1_300, 10]


def test_money_goes_by_the_price_of_the_moment_and_the_plan_ends_with_it() -> None:
    prices = [price(NOW_MS + 1_000, 40), price(NOW_MS, 30), price(0, 20), price(NOW_MS + 1, 99, "other")]

    earlier = plan(MONEY, prices=prices, now_ms=NOW_MS - 1)
    assert (earlier.price, earlier.uses[0].weights, earlier.valid_until_ms) == (weights(20), weights(20), NOW_MS)
    now = plan(MONEY, prices=prices)
    assert (now.price, now.uses[0].weights, now.valid_until_ms) == (weights(30), weights(30), NOW_MS + 1_000)
    later = plan(MONEY, prices=prices, now_ms=NOW_MS + 1_000)
    assert (later.price, later.uses[0].weights) == (weights(40), weights(40))
    assert (now.valid_from_ms, later.valid_from_ms) == (NOW_MS, NOW_MS + 1_000)
    assert later.valid_until_ms == MIDNIGHT_MS + DAY_MS, "the month's end"


def test_the_price_is_known_without_any_quota_and_tokens_are_counted_whatever_they_cost() -> None:
    assert plan(prices=[price(0, 20)]).price == weights(20)
    assert plan(HARD, prices=[price(0, 20)]).uses[0].weights == ONE_A_TOKEN
    assert plan(MONEY, prices=[price(NOW_MS + 5, 20)]).uses[0].weights == FREE


@pytest.mark.parametrize(
    ("zone", "day", "ends_ms"),
    [
        ("UTC", "2026-11-29", MIDNIGHT_MS),
        ("Asia/Kolkata", "2026-11-30", MIDNIGHT_MS + DAY_MS - 19_800_000),
        ("America/Havana", "2026-11-29", MIDNIGHT_MS + 18_000_000),
    ],
)
def test_periods_are_those_of_the_zone_and_the_plan_ends_with_the_first(zone: str, day: str, ends_ms: int) -> None:
    made = plan(MONEY, HARD, zone=zone)

    assert [each.period.id for each in made.metered if each.period is not None] == ["2026-11", day]
    assert made.quotas == (
        Counted("quota-microusd/month:key_1:2026-11:", made.quotas[0].ends_at_ms, FREE),
        Counted(f"quota-tokens/day:key_1:{day}:", ends_ms, ONE_A_TOKEN),
    )
    assert made.valid_until_ms == ends_ms
    last = plan(HARD, zone=zone, now_ms=ends_ms - 1)
    first = plan(HARD, zone=zone, now_ms=ends_ms)
    assert (made.valid_from_ms, first.valid_from_ms) == (ends_ms - DAY_MS, ends_ms)
    assert last.uses == plan(HARD, zone=zone).uses
    assert first.uses != last.uses
