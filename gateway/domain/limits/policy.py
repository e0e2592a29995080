"""What administrators set: limits on an organization, a team or a key, for all models or one. Pure.

A limit says how much may be used, and its name says of what; who changes how much keeps what was used, since a meter's
key (`meter_key`) is made of the name and the scope alone. There is at most one limit of a name for a scope and model.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.domain.limits.meters import DIVISOR, MOST_QUOTA, MOST_TOKENS, MOST_UNITS, Weights

Scope = Literal["organization", "team", "key"]
SCOPES: tuple[Scope, ...] = ("organization", "team", "key")
RatePeriod = Literal["second", "minute", "hour", "day"]
RATE_PERIODS_MS: dict[RatePeriod, int] = {"second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
QuotaPeriod = Literal["day", "week", "month"]
QUOTA_PERIODS: tuple[QuotaPeriod, ...] = ("day", "week", "month")
QuotaUnit = Literal["tokens", "microusd"]
DEFAULT_ALERTS = (80, 100)
_PERCENT = DIVISOR // 100


class RequestRate(msgspec.Struct, frozen=True, kw_only=True, tag="requests"):
    """Requests in a period, at an even pace.

    Attributes:
        burst: that may come at once; None is `amount`.
    """

    amount: int
    period: RatePeriod
    burst: int | None = None

    @property
    def name(self) -> str:
        return f"requests/{self.period}"

    @property
    def capacity(self) -> int:
        return self.amount if self.burst is None else self.burst


class TokenRate(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Tokens in a period, at an even pace.

    Attributes:
        burst: that may be used at once; None is `amount`.
        max_debt: how far a request that wrote more than was expected of it may take it below nothing; None is as much
            as `burst`.
        prompt_percent, cached_percent, output_percent: how much a token counts; cached ones are prompt tokens that were
            found in the prefix cache, and count no more than others.
        is_strict: a request must have room for all it may write. Otherwise for what requests like it wrote lately, and
            the rest may become debt.
    """

    amount: int
    period: RatePeriod
    burst: int | None = None
    max_debt: int | None = None
    prompt_percent: int = 100
    cached_percent: int = 100
    output_percent: int = 100
    is_strict: bool = False

    @property
    def name(self) -> str:
        return f"tokens/{self.period}"

    @property
    def capacity(self) -> int:
        return self.amount if self.burst is None else self.burst

    @property
    def debt(self) -> int:
        return self.capacity if self.max_debt is None else self.max_debt

    @property
    def weights(self) -> Weights:
        return Weights(
            prompt=self.prompt_percent * _PERCENT,
            cached=self.cached_percent * _PERCENT,
            output=self.output_percent * _PERCENT,
        )


class Concurrency(msgspec.Struct, frozen=True, kw_only=True, tag="concurrent"):
    """Requests at a time, waiting ones included."""

    amount: int

    @property
    def name(self) -> str:
        return "concurrent"


class ContextSize(msgspec.Struct, frozen=True, kw_only=True, tag="context"):
    """Tokens of one prompt and its answer together. A longer prompt is refused, a longer answer cut."""

    amount: int

    @property
    def name(self) -> str:
        return "context"


class OutputSize(msgspec.Struct, frozen=True, kw_only=True, tag="output"):
    """Tokens of one answer, which is cut there."""

    amount: int

    @property
    def name(self) -> str:
        return "output"


class QuotaRule(msgspec.Struct, frozen=True, kw_only=True, tag="quota"):
    """An amount for each calendar period in the organization's own time zone.

    Attributes:
        amount: tokens (prompt and output), or micro-USD by the prices of the day.
        is_hard: never exceeded, by not one token. A soft one refuses nothing: work beyond it runs in the class `batch`.
        alerts: percents of the amount at which administrators are told, each once a period; ascending.
    """

    unit: QuotaUnit
    period: QuotaPeriod
    amount: int
    is_hard: bool = True
    alerts: tuple[int, ...] = DEFAULT_ALERTS

    @property
    def name(self) -> str:
        return f"quota-{self.unit}/{self.period}"


Rule = RequestRate | TokenRate | Concurrency | ContextSize | OutputSize | QuotaRule


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A rule and whom it holds for.

    Attributes:
        scope_id: id of the organization, team or key.
        model: for requests that this model answers; None is for all models together.
        is_shadow: counted and reported, not enforced.
    """

    scope: Scope
    scope_id: str
    model: str | None = None
    rule: Rule
    is_shadow: bool = False
    changed_at_ms: int

    @property
    def name(self) -> str:
        return self.rule.name


class TopUp(msgspec.Struct, frozen=True, kw_only=True):
    """More of one quota, in one period only.

    Attributes:
        name: of the quota's rule.
        period_id: see `periods.Period`.
    """

    id: str
    scope: Scope
    scope_id: str
    model: str | None = None
    name: str
    period_id: str
    amount: int
    reason: str
    created_at_ms: int


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's tokens cost from a moment on, until its next price; micro-USD for a million tokens."""

    model: str
    valid_from_ms: int
    prompt: int
    cached: int
    completion: int

    @property
    def weights(self) -> Weights:
        return Weights(prompt=self.prompt, cached=self.cached, output=self.completion)


FREE = Weights(prompt=0, cached=0, output=0)


def meter_key(limit: Limit, period_id: str | None = None) -> str:
    """Of the limit's meter: unique among all, and without any amount.

    Args:
        period_id: of a quota the period that is counted.
    """
    parts = (limit.name, limit.scope_id, *(() if period_id is None else (period_id,)), limit.model or "")
    return ":".join(parts)


def check_rule(rule: Rule) -> None:
    """Raises ValueError with one sentence for people, whose first word is the field that is at fault."""
    match rule:
        case RequestRate():
            _within("amount", rule.amount, 0, MOST_UNITS)
            _within("burst", rule.capacity, 0, MOST_UNITS)
        case TokenRate():
            _within("amount", rule.amount, 0, MOST_UNITS)
            _within("burst", rule.capacity, 0, MOST_UNITS)
            _within("max_debt", rule.debt, 0, MOST_UNITS)
            for name in ("prompt_percent", "cached_percent", "output_percent"):
                _within(name, getattr(rule, name), 0, 10_000)
            if rule.cached_percent > rule.prompt_percent:
                raise ValueError("cached_percent is more than prompt_percent: a cached token cannot count more")
        case Concurrency():
            _within("amount", rule.amount, 0, MOST_UNITS)
        case ContextSize() | OutputSize():
            _within("amount", rule.amount, 1, MOST_TOKENS)
        case QuotaRule():
            _within("amount", rule.amount, 0, MOST_QUOTA)
            if list(rule.alerts) != sorted(set(rule.alerts)) or not all(1 <= each <= 1000 for each in rule.alerts):
                raise ValueError("alerts are percents from 1 to 1000, ascending, each once")


def price_at(prices: tuple[Price, ...], model: str, at_ms: int) -> Price | None:
    """The price of a model that is valid at a moment; None before its first one.

    Args:
        prices: in any order.
    """
    valid = (price for price in prices if price.model == model and price.valid_from_ms <= at_ms)
    return max(valid, key=lambda price: price.valid_from_ms, default=None)


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, not {least} to {most}")
