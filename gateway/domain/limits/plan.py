"""Which meters a request of one principal, for one model, goes by at a moment. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zoneinfo import ZoneInfo

import msgspec

from gateway.domain.ledger import Counted
from gateway.domain.limits.meters import REQUESTS, TOKENS, Bucket, Lease, Quota, Use, Weights
from gateway.domain.limits.periods import Period, period_at
from gateway.domain.limits.policy import (
    FREE,
    RATE_PERIODS_MS,
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
    meter_key,
    price_at,
)

_FOR_EVER_MS = 1 << 62


class Metered(msgspec.Struct, frozen=True):
    """A limit that has a meter.

    Attributes:
        period: of a quota the one that is counted.
    """

    limit: Limit
    use: Use
    period: Period | None = None


class MeterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        metered: in the order of the limits, whose meters' uses are `uses`.
        quotas: what the ledger is told of the quotas among them.
        price: of the model's tokens; None if nobody has set any.
        max_context, max_output: tokens of one prompt with its answer, and of one answer; None is no limit.
        shadow_context, shadow_output: the same of limits that are only reported.
        strict_rates: indices of the enforced token rates that must have room for all that a request may write.
        request_rates, token_rates: indices of the enforced ones.
        soft_quotas: indices of those that send work beyond them to the class `batch`.
        is_exact: there is an enforced hard quota among them.
        valid_from_ms, valid_until_ms: another plan may hold before and from then on: a period begins or ends, or a
            price changes. Clocks are set back, too.
    """

    metered: tuple[Metered, ...]
    uses: tuple[Use, ...]
    quotas: tuple[Counted, ...]
    price: Weights | None
    max_context: int | None
    max_output: int | None
    shadow_context: Limit | None
    shadow_output: Limit | None
    strict_rates: tuple[int, ...]
    request_rates: tuple[int, ...]
    token_rates: tuple[int, ...]
    soft_quotas: tuple[int, ...]
    is_exact: bool
    valid_from_ms: int
    valid_until_ms: int


def plan_of(
    limits: Sequence[Limit],
    top_ups: Sequence[TopUp],
    prices: Sequence[Price],
    *,
    zone: ZoneInfo,
    model: str,
    now_ms: int,
) -> MeterPlan:
    """
    Args:
        limits: of the principal's organization, team and key, for any model.
        prices: in any order, of any model.
    """
    held = [limit for limit in limits if limit.model is None or limit.model == model]
    price = price_at(tuple(prices), model, now_ms)
    metered = tuple(each for limit in held if (each := _metered(limit, top_ups, price, zone, now_ms)) is not None)
    contexts = [each for each in held if isinstance(each.rule, ContextSize)]
    outputs = [each for each in held if isinstance(each.rule, OutputSize)]
    periods = [each.period for each in metered if each.period is not None]
    price_changes_ms = [each.valid_from_ms for each in prices if each.model == model and each.valid_from_ms > now_ms]
    return MeterPlan(
        metered=metered,
        uses=tuple(each.use for each in metered),
        quotas=tuple(
            Counted(each.use.meter.key, each.period.end_ms, each.use.weights)
            for each in metered
            if each.period is not None
        ),
        price=None if price is None else price.weights,
        max_context=_least([each for each in contexts if not each.is_shadow]),
        max_output=_least([each for each in outputs if not each.is_shadow]),
        shadow_context=_smallest([each for each in contexts if each.is_shadow]),
        shadow_output=_smallest([each for each in outputs if each.is_shadow]),
        strict_rates=_where(metered, lambda rule: isinstance(rule, TokenRate) and rule.is_strict),
        request_rates=_where(metered, lambda rule: isinstance(rule, RequestRate)),
        token_rates=_where(metered, lambda rule: isinstance(rule, TokenRate)),
        soft_quotas=_where(metered, lambda rule: isinstance(rule, QuotaRule) and not rule.is_hard),
        is_exact=bool(_where(metered, lambda rule: isinstance(rule, QuotaRule) and rule.is_hard)),
        valid_from_ms=max([*(each.start_ms for each in periods), 0 if price is None else price.valid_from_ms]),
        valid_until_ms=min([*(each.end_ms for each in periods), *price_changes_ms], default=_FOR_EVER_MS),
    )


def _where(metered: Sequence[Metered], is_so: Callable[[Rule], bool]) -> tuple[int, ...]:
    """Indices of the enforced limits whose rule is so."""
    return tuple(i for i, each in enumerate(metered) if not each.limit.is_shadow and is_so(each.limit.rule))


def _metered(
    limit: Limit, top_ups: Sequence[TopUp], price: Price | None, zone: ZoneInfo, now_ms: int
) -> Metered | None:
    """None for limits that have no meter."""
    match limit.rule:
        case RequestRate() as rule:
            bucket = Bucket(
                key=meter_key(limit),
                capacity=rule.capacity,
                refill=rule.amount,
                period_ms=RATE_PERIODS_MS[rule.period],
                is_shadow=limit.is_shadow,
            )
            return Metered(limit, Use(bucket, REQUESTS))
        case TokenRate() as rule:
            bucket = Bucket(
                key=meter_key(limit),
                capacity=rule.capacity,
                refill=rule.amount,
                period_ms=RATE_PERIODS_MS[rule.period],
                max_debt=rule.debt,
                is_shadow=limit.is_shadow,
            )
            return Metered(limit, Use(bucket, rule.weights))
        case Concurrency(amount=amount):
            return Metered(limit, Use(Lease(key=meter_key(limit), limit=amount, is_shadow=limit.is_shadow)))
        case QuotaRule() as rule:
            period = period_at(rule.period, zone, now_ms)
            quota = Quota(
                key=meter_key(limit, period.id),
                amount=rule.amount + _topped_up(limit, period, top_ups),
                is_hard=rule.is_hard,
                is_shadow=limit.is_shadow,
            )
            weights = TOKENS if rule.unit == "tokens" else (FREE if price is None else price.weights)
            return Metered(limit, Use(quota, weights), period)
        case ContextSize() | OutputSize():
            return None


def _topped_up(limit: Limit, period: Period, top_ups: Sequence[TopUp]) -> int:
    return sum(
        each.amount
        for each in top_ups
        if (each.scope_id, each.model, each.name, each.period_id)
        == (limit.scope_id, limit.model, limit.name, period.id)
    )


def _smallest(limits: Sequence[Limit]) -> Limit | None:
    return min(limits, key=lambda each: each.rule.amount, default=None)


def _least(limits: Sequence[Limit]) -> int | None:
    smallest = _smallest(limits)
    return None if smallest is None else smallest.rule.amount
