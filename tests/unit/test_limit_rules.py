"""The rules of limits, one at a time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits_kit import ask

from gateway.domain.limits.admission import Ask
from gateway.domain.limits.meters import (
    MOST_QUOTA,
    MOST_TOKENS,
    MOST_UNITS,
    MOST_WEIGHT,
    PARTS,
    PERIODS_MS,
    REQUESTS,
    Bucket,
    Lease,
    Meter,
    Quota,
    Use,
    Weights,
)
from gateway.domain.limits.rules import (
    Level,
    can_take,
    charges,
    decide,
    given_back,
    holdings,
    level_at,
    most_output,
    raised,
)
from gateway.domain.limits.validation import validate
from gateway.domain.usage import TokenUsage

RATE = Bucket(key="rate", capacity=100, refill=60)  # a unit a second
HARD = Quota(key="hard", amount=1000)
SOFT = Quota(key="soft", amount=1000, is_hard=False)
LEASE = Lease(key="lease", limit=2)


def shadow(meter: Meter) -> Meter:
    return type(meter)(**{name: getattr(meter, name) for name in meter.__struct_fields__} | {"is_shadow": True})


# Buckets


def test_a_bucket_that_was_never_seen_is_full() -> None:
    assert level_at(RATE, None, 7) == 100 * PARTS


@pytest.mark.parametrize("period_ms", PERIODS_MS)
def test_a_period_refills_exactly_the_refill_however_it_is_sliced(period_ms: int) -> None:
    bucket = Bucket(key="b", capacity=MOST_UNITS, refill=7, period_ms=period_ms)
    level = Level(0, 0)
    for at_ms in range(period_ms // 10, period_ms + 1, period_ms // 10):
        level = Level(level_at(bucket, level, at_ms), at_ms)

    assert level.parts == 7 * PARTS


@pytest.mark.parametrize(
    ("parts", "at_ms", "now_ms", "expected"),
    [
        pytest.param(10 * PARTS, 0, 1_000, 11 * PARTS, id="a-second"),
        pytest.param(-10 * PARTS, 0, 1_000, -9 * PARTS, id="from-debt"),
        pytest.param(99 * PARTS, 0, 5_000, 100 * PARTS, id="not-above-capacity"),
        pytest.param(10 * PARTS, 5_000, 1_000, 10 * PARTS, id="time-goes-back"),
        pytest.param(300 * PARTS, 0, 0, 100 * PARTS, id="capacity-was-lowered"),
        pytest.param(-300 * PARTS, 0, 1_000, -49 * PARTS, id="debt-was-lowered"),
    ],
)
def test_a_level_refills_within_its_bounds(parts: int, at_ms: int, now_ms: int, expected: int) -> None:
    bucket = Bucket(key="rate", capacity=100, refill=60, max_debt=50)

    assert level_at(bucket, Level(parts, at_ms), now_ms) == expected


@pytest.mark.parametrize(
    ("prompt", "expected_output", "charge"),
    [
        pytest.param(10, 5, 15, id="prompt-and-expected-output"),
        pytest.param(10, 500, 100, id="not-more-than-capacity-for-output"),
        pytest.param(100, 1, 100, id="prompt-fills-it"),
        pytest.param(101, 1, 101, id="prompt-above-capacity"),
    ],
)
def test_what_a_bucket_is_charged(prompt: int, expected_output: int, charge: int) -> None:
    asked = ask(RATE, prompt_tokens=prompt, expected_output=expected_output, max_output=500)

    assert holdings(asked, 0) == (charge,)


def test_a_prompt_above_capacity_is_never_admitted_and_waits_for_nothing() -> None:
    verdict = decide(ask(RATE, prompt_tokens=101), [100 * PARTS]).verdict

    assert (verdict.is_admitted, verdict.is_never, verdict.wait_ms) == (False, True, None)


@given(
    refill=st.integers(1, MOST_UNITS),
    period_ms=st.sampled_from(PERIODS_MS),
    charge=st.integers(1, MOST_UNITS // 10),
    missing=st.integers(1, PARTS * MOST_UNITS // 10),
)
def test_a_bucket_admits_after_the_wait_and_not_a_millisecond_before(
    refill: int, period_ms: int, charge: int, missing: int
) -> None:
    bucket = Bucket(key="b", capacity=MOST_UNITS, refill=refill, period_ms=period_ms, max_debt=MOST_UNITS)
    asked = ask(bucket, prompt_tokens=min(charge, MOST_TOKENS - 20), expected_output=0)
    (charge,) = holdings(asked, 0)
    level = Level(charge * PARTS - missing, 0)
    wait_ms = decide(asked, [level_at(bucket, level, 0)]).verdict.wait_ms

    assert wait_ms is not None
    assert not decide(asked, [level_at(bucket, level, wait_ms - 1)]).verdict.is_admitted
    assert decide(asked, [level_at(bucket, level, wait_ms)]).verdict.is_admitted


def test_one_that_never_admits_is_enough_for_never() -> None:
    assert decide(ask(LEASE, Bucket(key="small", capacity=9, refill=1)), [0, 9 * PARTS]).verdict.is_never


def test_a_bucket_that_is_not_refilled_tells_no_wait_but_is_not_never() -> None:
    verdict = decide(ask(Bucket(key="b", capacity=100, refill=0)), [0]).verdict

    assert (verdict.is_admitted, verdict.is_never, verdict.wait_ms) == (False, False, None)


@pytest.mark.parametrize(
    ("parts", "units", "expected"),
    [
        pytest.param(10 * PARTS, 5, (15 * PARTS, 0), id="refund"),
        pytest.param(98 * PARTS, 5, (100 * PARTS, 0), id="refund-above-capacity"),
        pytest.param(10 * PARTS, -25, (-15 * PARTS, 0), id="debt"),
        pytest.param(10 * PARTS, -75, (-50 * PARTS, 15), id="beyond-its-debt"),
        pytest.param(10 * PARTS + 1, -75, (-50 * PARTS, 14), id="forgiven-units-are-whole"),
    ],
)
def test_what_a_bucket_gets_back(parts: int, units: int, expected: tuple[int, int]) -> None:
    bucket = Bucket(key="rate", capacity=100, refill=60, max_debt=50)

    assert given_back(bucket, parts, units) == expected


@pytest.mark.parametrize(("parts", "taken"), [(40 * PARTS, 15), (5 * PARTS, 15), (-PARTS // 2, 9), (-10 * PARTS, 0)])
def test_a_shadow_bucket_is_charged_in_whole_units_down_to_its_debt(parts: int, taken: int) -> None:
    bucket = Bucket(key="b", capacity=100, refill=60, max_debt=10, is_shadow=True)
    decision = decide(ask(bucket), [parts])

    assert decision.verdict.is_admitted
    assert decision.reserved == (taken,) == (can_take(bucket, parts, 15),)
    assert decision.verdict.shadow_refused == (() if parts >= 15 * PARTS else (0,))
    assert decision.verdict.remaining == (parts // PARTS - taken,)


# Quotas


@given(
    weights=st.builds(
        Weights,
        prompt=st.integers(0, MOST_WEIGHT),
        cached=st.just(0),
        output=st.integers(0, MOST_WEIGHT),
        per_request=st.integers(0, 100),
    ),
    prompt=st.integers(0, 1000),
    units=st.integers(-10, 2_000_000),
)
def test_the_most_output_fits_and_one_token_more_does_not(weights: Weights, prompt: int, units: int) -> None:
    most = most_output(weights, prompt, units)

    if most < 0:
        assert weights.cost(TokenUsage(prompt, 0)) > units
    else:
        assert weights.cost(TokenUsage(prompt, most)) <= units
        assert most == MOST_TOKENS or weights.cost(TokenUsage(prompt, most + 1)) > units


@pytest.mark.parametrize(
    ("left", "granted", "binding"),
    [
        pytest.param(1000, 20, None, id="plenty"),
        pytest.param(30, 20, None, id="all-but-nothing-more"),
        pytest.param(29, 19, 0, id="clamped-by-one"),
        pytest.param(10, 0, 0, id="the-prompt-alone"),
    ],
)
def test_a_hard_quota_grants_what_is_left(left: int, granted: int, binding: int | None) -> None:
    decision = decide(ask(HARD), [left])

    assert (decision.verdict.granted_output, decision.verdict.binding) == (granted, binding)
    assert decision.reserved == (10 + granted,)
    assert decision.verdict.remaining == (left - 10 - granted,)


def test_less_than_the_least_output_is_a_refusal_that_reserves_nothing() -> None:
    decision = decide(ask(HARD, SOFT, min_output=5), [14, 1000])

    assert (decision.verdict.is_admitted, decision.verdict.binding, decision.verdict.is_never) == (False, 0, False)
    assert decision.verdict.remaining == (14, 1000)
    assert decision.reserved == (0, 0)


def test_a_quota_whose_whole_amount_is_too_little_can_never_admit() -> None:
    assert decide(ask(Quota(key="q", amount=14), min_output=5), [14]).verdict.is_never


def test_all_quotas_reserve_what_the_narrowest_grants_and_the_first_of_equals_is_named() -> None:
    other, third = Quota(key="other", amount=50), Quota(key="third", amount=50)
    decision = decide(ask(HARD, other, third, SOFT, shadow(HARD)), [1000, 17, 17, 3, 2])

    assert (decision.verdict.granted_output, decision.verdict.binding) == (7, 1)
    assert decision.reserved == (17, 17, 17, 17, 17)
    assert decision.verdict.remaining == (983, 0, 0, -14, -15)
    assert decision.verdict.shadow_refused == (4,)


def test_output_that_costs_nothing_is_granted_in_full() -> None:
    verdict = decide(ask(Use(HARD, REQUESTS)), [1]).verdict

    assert (verdict.granted_output, verdict.binding) == (20, None)


@pytest.mark.parametrize(
    ("standings", "wanted", "granted"),
    [
        pytest.param([1000, 0], 15, 15, id="enough"),
        pytest.param([3, 0], 15, 13, id="as-far-as-the-hard-one-goes"),
        pytest.param([3, 0], 12, 12, id="no-further-than-wanted"),
        pytest.param([0, 0], 15, 10, id="nothing-left"),
        pytest.param([-50, 0], 15, 10, id="amount-was-lowered"),
        pytest.param([1000, 0], 4, 10, id="never-less"),
        pytest.param([MOST_QUOTA, 0], MOST_TOKENS, MOST_TOKENS - 10, id="a-request-is-bounded"),
    ],
)
def test_raising_goes_as_far_as_hard_quotas_allow(standings: list[int], wanted: int, granted: int) -> None:
    assert raised(ask(HARD, SOFT), 10, [20, 20], standings, wanted) == granted


# All together


def test_the_first_that_refuses_is_named_and_the_longest_wait_told() -> None:
    slow = Bucket(key="slow", capacity=100, refill=60, period_ms=3_600_000)
    verdict = decide(ask(LEASE, RATE, slow), [2, 14 * PARTS, 14 * PARTS]).verdict

    assert (verdict.binding, verdict.wait_ms) == (1, 60_000)
    assert verdict.remaining == (2, 14, 14)


@pytest.mark.parametrize(
    ("meters", "standings"),
    [
        pytest.param([RATE, LEASE], [0, 0], id="lease"),
        pytest.param([RATE, HARD], [0, 9], id="quota"),
        pytest.param([RATE, Bucket(key="b", capacity=100, refill=0)], [0, 0], id="not-refilled"),
        pytest.param([RATE, Bucket(key="b", capacity=9, refill=1)], [0, 9 * PARTS], id="too-small"),
    ],
)
def test_no_wait_is_told_if_waiting_would_not_do(meters: list[Meter], standings: list[int]) -> None:
    verdict = decide(ask(*meters), standings).verdict

    assert (verdict.is_admitted, verdict.binding, verdict.wait_ms) == (False, 0, None)


def test_shadow_meters_refuse_nothing_and_are_told_even_if_another_refuses() -> None:
    meters = [shadow(RATE), shadow(LEASE), shadow(HARD)]

    assert decide(ask(*meters), [0, 0, 0]).verdict.is_admitted
    refused = decide(ask(*meters, LEASE), [0, 5, 0, 0]).verdict
    assert (refused.binding, refused.shadow_refused, refused.is_never) == (3, (0, 2), False)


def test_a_request_costs_what_it_used_and_a_lease_nothing() -> None:
    cheap = Weights(prompt=500_000, cached=0, output=2_000_000, per_request=3)

    assert charges(ask(RATE, LEASE, Use(SOFT, cheap)).uses, TokenUsage(9, 2, cached_tokens=4)) == (11, 0, 10)


# What may be asked


def _use(meter: type[Meter], **figures: int) -> dict[str, Any]:
    needed: dict[Any, dict[str, int]] = {
        Bucket: {"capacity": 1, "refill": 1},
        Quota: {"amount": 1},
        Lease: {"limit": 1},
    }
    return {"uses": (Use(meter(key="m", **needed[meter] | figures)),)}


def _weighed(**figures: int) -> dict[str, Any]:
    return {"uses": (Use(HARD, Weights(**figures)),)}


@pytest.mark.parametrize(
    "changes",
    [
        {"min_output": -1},
        {"min_output": 21},
        {"expected_output": 21},
        {"expected_output": -1},
        {"prompt_tokens": -1},
        {"prompt_tokens": MOST_TOKENS - 19},
        {"lease_ms": 0},
        {"uses": (Use(HARD), Use(HARD, REQUESTS))},
        _use(Bucket, capacity=-1),
        _use(Bucket, capacity=MOST_UNITS + 1),
        _use(Bucket, refill=MOST_UNITS + 1),
        _use(Bucket, max_debt=-1),
        _use(Bucket, max_debt=MOST_UNITS + 1),
        _use(Bucket, period_ms=61_000),
        _use(Quota, amount=-1),
        _use(Quota, amount=MOST_QUOTA + 1),
        _use(Lease, limit=-1),
        _weighed(output=MOST_WEIGHT + 1),
        _weighed(prompt=MOST_WEIGHT + 1),
        _weighed(prompt=-1, cached=-1),
        _weighed(cached=1_000_001),
        _weighed(per_request=-1),
        _weighed(per_request=MOST_UNITS + 1),
    ],
    ids=str,
)
def test_an_ask_that_breaks_its_rules_is_not_accepted(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        validate(ask(**changes))


@pytest.mark.parametrize(
    "asked",
    [
        ask(RATE, HARD, SOFT, LEASE),
        ask(prompt_tokens=0, expected_output=0, max_output=0),
        ask(prompt_tokens=MOST_TOKENS - 20),
        ask(Bucket(key="b", capacity=MOST_UNITS, refill=MOST_UNITS, period_ms=1_000, max_debt=MOST_UNITS)),
        ask(Bucket(key="b", capacity=0, refill=0), Quota(key="q", amount=0), Lease(key="l", limit=0)),
        ask(Use(HARD, Weights(prompt=MOST_WEIGHT, cached=MOST_WEIGHT, output=MOST_WEIGHT, per_request=MOST_UNITS))),
    ],
)
def test_an_ask_within_its_rules_is_accepted(asked: Ask) -> None:
    validate(asked)
