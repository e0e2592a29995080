"""How rules and money are written: what is read, what is refused and in which words, and that both ways agree."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.limits.policy import (
    QUOTA_PERIODS,
    RATE_PERIODS_MS,
    Concurrency,
    ContextSize,
    OutputSize,
    QuotaRule,
    RatePeriod,
    RequestRate,
    Rule,
    TokenRate,
)
from gateway.errors import InvalidRequest
from gateway.limit_notation import (
    CliUnit,
    RuleForm,
    TokensForm,
    form_of,
    parse_quota_amount,
    parse_rate,
    parse_usd,
    quota_name,
    quota_named,
    quota_text,
    rule_of,
    rule_text,
    usd_text,
)
from gateway.web.decoding import BodyDecoder

_amounts = st.integers(0, 10**9)
_maybe = st.none() | _amounts
_rates = st.sampled_from(tuple(RATE_PERIODS_MS))
RULES = st.one_of(
    st.builds(RequestRate, amount=_amounts, period=_rates, burst=_maybe),
    st.builds(
        TokenRate,
        amount=_amounts,
        period=_rates,
        burst=_maybe,
        max_debt=_maybe,
        prompt_percent=_amounts,
        cached_percent=_amounts,
        output_percent=_amounts,
        is_strict=st.booleans(),
    ),
    st.builds(Concurrency, amount=_amounts),
    st.builds(ContextSize, amount=_amounts),
    st.builds(OutputSize, amount=_amounts),
    st.builds(
        QuotaRule,
        unit=st.sampled_from(("tokens", "microusd")),
        period=st.sampled_from(QUOTA_PERIODS),
        amount=st.integers(0, 10**15),
        is_hard=st.booleans(),
        alerts=st.sets(st.integers(1, 1000)).map(lambda percents: tuple(sorted(percents))),
    ),
)


def _rule(body: dict[str, Any]) -> Rule:
    """Of a rule as it comes over the network."""
    return rule_of(BodyDecoder(RuleForm).decode(msgspec.json.encode(body)))


@given(RULES)
def test_what_is_shown_of_a_rule_sets_it_again(rule: Rule) -> None:
    assert _rule(msgspec.json.decode(msgspec.json.encode(form_of(rule)))) == rule


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"kind": "requests", "rate": "100/minute", "burst": 20},
            RequestRate(amount=100, period="minute", burst=20),
        ),
        ({"kind": "requests", "rate": "0/day"}, RequestRate(amount=0, period="day")),
        ({"kind": "tokens", "rate": "100000/minute"}, TokenRate(amount=100_000, period="minute")),
        (
            {"kind": "tokens", "rate": "5 per hour", "burst": 1, "max_debt": 2, "prompt_percent": 50,
             "cached_percent": 10, "output_percent": 300, "strict": True},
            TokenRate(amount=5, period="hour", burst=1, max_debt=2, prompt_percent=50, cached_percent=10,
                      output_percent=300, is_strict=True),
        ),
        ({"kind": "concurrent", "amount": 10}, Concurrency(amount=10)),
        ({"kind": "context", "amount": 8192}, ContextSize(amount=8192)),
        ({"kind": "output", "amount": 1024}, OutputSize(amount=1024)),
        (
            {"kind": "quota", "unit": "tokens", "period": "day", "amount": 5},
            QuotaRule(unit="tokens", period="day", amount=5, is_hard=True, alerts=(80, 100)),
        ),
        (
            {"kind": "quota", "unit": "microusd", "period": "month", "amount": 5, "hard": False, "alerts": [100, 50]},
            QuotaRule(unit="microusd", period="month", amount=5, is_hard=False, alerts=(50, 100)),
        ),
    ],
)  # fmt: skip
def test_a_rule_is_read(body: dict[str, Any], expected: Rule) -> None:
    assert _rule(body) == expected


@pytest.mark.parametrize("percent", [0, 40, 300])
def test_a_cached_token_counts_as_a_prompt_token_does_unless_it_is_said(percent: int) -> None:
    rule = rule_of(TokensForm(rate="1/day", prompt_percent=percent))

    assert isinstance(rule, TokenRate)
    assert rule.cached_percent == percent


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": "requests", "rate": "100/minute", "brust": 20}, "brust"),
        ({"kind": "requests", "rate": "100/minute", "max_debt": 20}, "max_debt"),
        ({"kind": "requests"}, "rate"),
        ({"kind": "requests", "rate": 100}, "rate"),
        ({"kind": "requests", "rate": "100/minute", "burst": 1.5}, "burst"),
        ({"kind": "requests", "rate": "100/minute", "burst": True}, "burst"),
        ({"kind": "concurrent", "amount": "10"}, "amount"),
        ({"kind": "quota", "unit": "usd", "period": "day", "amount": 5}, "unit"),
        ({"kind": "quota", "unit": "tokens", "period": "hour", "amount": 5}, "period"),
        ({"kind": "rate", "amount": 5}, "kind"),
        ({"amount": 5}, "kind"),
    ],
)
def test_what_a_rule_does_not_have_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _rule(body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("text", "amount", "period"),
    [
        ("100/minute", 100, "minute"),
        ("100/minutes", 100, "minute"),
        ("100 per minute", 100, "minute"),
        (" 100 / SECOND ", 100, "second"),
        ("100/1 hour", 100, "hour"),
        ("0/day", 0, "day"),
        ("9" * 50 + "/day", int("9" * 50), "day"),
    ],
)
def test_a_rate_is_read(text: str, amount: int, period: RatePeriod) -> None:
    assert parse_rate(text) == (amount, period)


_SHAPE = "'rule.rate' must be an amount for one second, minute, hour or day, such as 100/minute"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", ""),
        ("100", ""),
        ("100/", ""),
        ("/minute", ""),
        ("-1/minute", ""),
        ("1.5/minute", ""),
        ("1e3/minute", ""),
        ("١/minute", ""),
        ("100/min", ""),
        ("100/week", ""),
        ("100/year", ""),
        ("ten per minute", ""),
        ("100/minute\x00", ""),
        ("10/5minutes", ": a rate is for one minute, not for 5"),
        ("10/5 seconds", ": a rate is for one second, not for 5"),
        ("10/0minutes", ": a rate is for one minute, not for 0"),
        ("10 per 2 days", ": a rate is for one day, not for 2"),
        ("5/month", ": for a calendar month there are quotas"),
        ("1/second;2/hour", ": of several limits each is set for itself"),
        ("1/second, 2/hour", ": of several limits each is set for itself"),
        ("1/second|2/hour", ": of several limits each is set for itself"),
        ("1/second:,2/hour", ": of several limits each is set for itself"),
        ("1" * 5000 + "/minute", ": it has more than 64 characters"),
    ],
)
def test_anything_else_is_no_rate_and_is_told_why(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_rate(text)
    assert refused.value.message == f"{_SHAPE}{why}."
    assert refused.value.param == "rule.rate"


def test_a_long_text_takes_no_time() -> None:
    """The library alone takes ten seconds for this one."""
    began = time.monotonic()
    with pytest.raises(InvalidRequest):
        parse_rate("1" + " " * 60_000)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("text", "microusd"),
    [("0", 0), ("250", 250_000_000), ("250.00", 250_000_000), ("0.15", 150_000), ("0.075", 75_000),
     ("0.000001", 1), ("16777217.1", 16_777_217_100_000), ("007", 7_000_000)],
)  # fmt: skip
def test_money_is_read_to_the_last_digit(text: str, microusd: int) -> None:
    assert parse_usd(text) == microusd


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", ".5", "1.", "1e3", "1_000", "1,5", "$5", "0.0000001", "٣", "1" * 13, "inf", "1.5\n"]
)
def test_anything_else_is_no_money(text: str) -> None:
    with pytest.raises(ValueError, match="it must be USD such as 250 or"):
        parse_usd(text)


@given(st.integers(0, 10**15))
def test_money_is_shown_as_it_can_be_read_again(microusd: int) -> None:
    assert parse_usd(usd_text(microusd)) == microusd


@pytest.mark.parametrize(("microusd", "text"), [(0, "0.00"), (1, "0.000001"), (75_000, "0.075"), (10**9, "1000.00")])
def test_money_has_cents_at_least(microusd: int, text: str) -> None:
    assert usd_text(microusd) == text


@pytest.mark.parametrize(
    ("unit", "text", "expected"),
    [
        ("tokens", "5000000/month", (5_000_000, "month")),
        ("tokens", "0/day", (0, "day")),
        ("usd", "250.00/week", (250_000_000, "week")),
    ],
)
def test_a_quota_s_amount_is_read(unit: CliUnit, text: str, expected: tuple[int, str]) -> None:
    assert parse_quota_amount(unit, text) == expected


@pytest.mark.parametrize(
    ("unit", "text", "why"),
    [
        ("tokens", "5000000", "it must be an amount for a day, week or month, such as 5000000/month"),
        ("tokens", "5000000/minute", "it must be an amount for a day, week or month, such as 5000000/month"),
        ("usd", "250.00", "it must be an amount for a day, week or month, such as 250.00/month"),
        ("tokens", "5.5/day", "it must be a whole number of tokens for a day, week or month, such as 5000000/month"),
        ("tokens", "/day", "it must be a whole number of tokens for a day, week or month, such as 5000000/month"),
        ("usd", "five/day", "it must be USD such as 250 or 0.15, with at most six digits behind the point"),
    ],
)
def test_anything_else_is_no_quota_s_amount(unit: CliUnit, text: str, why: str) -> None:
    with pytest.raises(ValueError, match="it must be") as refused:
        parse_quota_amount(unit, text)
    assert str(refused.value) == why


def test_quotas_have_one_name_inside_and_one_for_people() -> None:
    assert quota_name("usd", "day") == quota_named("usd/day") == "quota-microusd/day"
    assert quota_named("tokens/month") == QuotaRule(unit="tokens", period="month", amount=1).name
    for name in ("tokens/week", "usd/month"):
        assert quota_text(quota_named(name)) == name
    for name in ("", "tokens", "tokens/minute", "requests/day", "microusd/day", "usd/"):
        with pytest.raises(ValueError, match="a quota is named like tokens/day"):
            quota_named(name)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (RequestRate(amount=100, period="minute"), "100/minute"),
        (RequestRate(amount=100, period="minute", burst=20), "100/minute, burst 20"),
        (TokenRate(amount=5, period="day", burst=0, max_debt=0), "5/day, burst 0, debt 0"),
        (TokenRate(amount=5, period="day", output_percent=300, is_strict=True),
         "5/day, prompt 100%, cached 100%, output 300%, strict"),
        (Concurrency(amount=10), "10"),
        (QuotaRule(unit="tokens", period="day", amount=5), "5/day, hard"),
        (QuotaRule(unit="microusd", period="month", amount=75_000, is_hard=False), "0.075 USD/month, soft"),
    ],
)  # fmt: skip
def test_a_rule_is_told_on_one_line(rule: Rule, text: str) -> None:
    assert rule_text(rule) == text
