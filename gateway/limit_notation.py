"""How rules and money are written: in bodies of the admin API, on the command line and in files. One notation for all.

A rule is an object whose `kind` says which; a rate in it is text such as ``100/minute``, read by the library `limits`,
of whose notation one amount for one second, minute, hour or day is taken. Money is decimal text for people, and whole
micro-USD in objects; it is never a float. What amounts are too large is said by `check_rule`, not here.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from gateway.domain.limits.policy import (
    DEFAULT_ALERTS,
    QUOTA_PERIODS,
    RATE_PERIODS_MS,
    Concurrency,
    ContextSize,
    OutputSize,
    QuotaPeriod,
    QuotaRule,
    QuotaUnit,
    RatePeriod,
    RequestRate,
    Rule,
    TokenRate,
)
from gateway.errors import InvalidRequest

MAX_TEXT = 64
"""Characters of a rate or an amount. The library takes a time that grows with the square of a text's length."""
MICROUSD = 1_000_000

CliUnit = Literal["tokens", "usd"]
"""Of a quota, as people write it."""
UNITS: dict[CliUnit, QuotaUnit] = {"tokens": "tokens", "usd": "microusd"}

_TOKENS_EXAMPLE = "5000000/month"
_EXAMPLES: dict[CliUnit, str] = {"tokens": _TOKENS_EXAMPLE, "usd": "250.00/month"}
_USD = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,6}))?")


class _Form(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of the forms of rules. The fields mean what those of the rules do, unless it is said."""


class RequestsForm(_Form, frozen=True, kw_only=True, tag="requests"):
    rate: str
    burst: int | None = None


class TokensForm(_Form, frozen=True, kw_only=True, tag="tokens"):
    """`cached_percent` is by default what `prompt_percent` is: being found in the cache changes nothing then."""

    rate: str
    burst: int | None = None
    max_debt: int | None = None
    prompt_percent: int = 100
    cached_percent: int | None = None
    output_percent: int = 100
    strict: bool = False


class ConcurrentForm(_Form, frozen=True, kw_only=True, tag="concurrent"):
    amount: int


class ContextForm(_Form, frozen=True, kw_only=True, tag="context"):
    amount: int


class OutputForm(_Form, frozen=True, kw_only=True, tag="output"):
    amount: int


class QuotaForm(_Form, frozen=True, kw_only=True, tag="quota"):
    """`alerts` may be in any order."""

    unit: QuotaUnit
    period: QuotaPeriod
    amount: int
    hard: bool = True
    alerts: tuple[int, ...] = DEFAULT_ALERTS


RuleForm = RequestsForm | TokensForm | ConcurrentForm | ContextForm | OutputForm | QuotaForm


def rule_of(form: RuleForm) -> Rule:
    """Raises `InvalidRequest` for a rate that cannot be read."""
    match form:
        case RequestsForm():
            amount, period = parse_rate(form.rate)
            return RequestRate(amount=amount, period=period, burst=form.burst)
        case TokensForm():
            amount, period = parse_rate(form.rate)
            return TokenRate(
                amount=amount,
                period=period,
                burst=form.burst,
                max_debt=form.max_debt,
                prompt_percent=form.prompt_percent,
                cached_percent=form.prompt_percent if form.cached_percent is None else form.cached_percent,
                output_percent=form.output_percent,
                is_strict=form.strict,
            )
        case ConcurrentForm():
            return Concurrency(amount=form.amount)
        case ContextForm():
            return ContextSize(amount=form.amount)
        case OutputForm():
            return OutputSize(amount=form.amount)
        case QuotaForm():
            return QuotaRule(
                unit=form.unit,
                period=form.period,
                amount=form.amount,
                is_hard=form.hard,
                alerts=tuple(sorted(set(form.alerts))),
            )


def form_of(rule: Rule) -> RuleForm:
    """The form that the rule can be set with again."""
    match rule:
        case RequestRate():
            return RequestsForm(rate=_rate(rule), burst=rule.burst)
        case TokenRate():
            return TokensForm(
                rate=_rate(rule),
                burst=rule.burst,
                max_debt=rule.max_debt,
                prompt_percent=rule.prompt_percent,
                cached_percent=rule.cached_percent,
                output_percent=rule.output_percent,
                strict=rule.is_strict,
            )
        case Concurrency():
            return ConcurrentForm(amount=rule.amount)
        case ContextSize():
            return ContextForm(amount=rule.amount)
        case OutputSize():
            return OutputForm(amount=rule.amount)
        case QuotaRule():
            return QuotaForm(
                unit=rule.unit, period=rule.period, amount=rule.amount, hard=rule.is_hard, alerts=rule.alerts
            )


def parse_rate(text: str, param: str = "rule.rate") -> tuple[int, RatePeriod]:
    """An amount and the period it is for.

    Raises:
        InvalidRequest: it is not one amount for one second, minute, hour or day.
    """
    # Here, since it takes longer to import than most commands run.
    from limits import parse

    if len(text) > MAX_TEXT:
        raise _no_rate(param, f"it has more than {MAX_TEXT} characters")
    if re.search("[,;|]", text):
        raise _no_rate(param, "of several limits each is set for itself")
    try:
        item = parse(text)
    except ValueError as e:
        raise _no_rate(param) from e
    period = item.GRANULARITY.name
    if period not in RATE_PERIODS_MS:
        raise _no_rate(param, f"for a calendar {period} there are quotas" if period == "month" else "")
    multiple = re.findall("[0-9]+", text)[1:]  # the library takes 0 for 1
    if multiple and int(multiple[0]) != 1:
        raise _no_rate(param, f"a rate is for one {period}, not for {int(multiple[0])}")
    return item.amount, period


def parse_quota_amount(unit: CliUnit, text: str) -> tuple[int, QuotaPeriod]:
    """Such as ``5000000/month`` tokens or ``250.00/month`` USD: units of a `QuotaRule`, and the calendar period.

    Raises ValueError with one sentence for people.
    """
    amount, _, period = text.partition("/")
    if period not in QUOTA_PERIODS:
        raise ValueError(f"it must be an amount for a day, week or month, such as {_EXAMPLES[unit]}")
    if unit == "usd":
        return parse_usd(amount), period
    if not re.fullmatch("[0-9]{1,18}", amount):
        raise ValueError(f"it must be a whole number of tokens for a day, week or month, such as {_TOKENS_EXAMPLE}")
    return int(amount), period


def parse_usd(text: str) -> int:
    """Micro-USD of decimal text. Raises ValueError with one sentence for people."""
    found = _USD.fullmatch(text)
    if found is None:
        raise ValueError("it must be USD such as 250 or 0.15, with at most six digits behind the point")
    return int(found[1]) * MICROUSD + int((found[2] or "").ljust(6, "0"))


def usd_text(microusd: int) -> str:
    """Such as ``250.00`` or ``0.075``: exact, and with cents at least."""
    whole, rest = divmod(microusd, MICROUSD)
    return f"{whole}.{f'{rest:06}'.rstrip('0').ljust(2, '0')}"


def quota_name(unit: CliUnit, period: QuotaPeriod) -> str:
    """The name of the limit."""
    return QuotaRule(unit=UNITS[unit], period=period, amount=0).name


def quota_named(text: str) -> str:
    """The name of the limit that is a quota, of ``tokens/month`` and the like.

    Raises ValueError with one sentence for people.
    """
    unit, _, period = text.partition("/")
    if unit not in UNITS or period not in QUOTA_PERIODS:
        raise ValueError("a quota is named like tokens/day, tokens/week, tokens/month or usd/month")
    return quota_name(unit, period)


def quota_text(name: str) -> str:
    """The opposite of `quota_named`."""
    return name.removeprefix("quota-").replace("microusd", "usd")


def amount_text(unit: QuotaUnit, amount: int) -> str:
    """For people, in the unit that `quota set` takes."""
    return usd_text(amount) if unit == "microusd" else str(amount)


def rule_text(rule: Rule) -> str:
    """What a rule allows, for people, on one line."""
    match rule:
        case RequestRate():
            return _joined(_rate(rule), burst=rule.burst)
        case TokenRate():
            percents = {name: getattr(rule, f"{name}_percent") for name in ("prompt", "cached", "output")}
            told = {} if set(percents.values()) == {100} else {name: f"{each}%" for name, each in percents.items()}
            text = _joined(_rate(rule), burst=rule.burst, debt=rule.max_debt, **told)
            return f"{text}, strict" if rule.is_strict else text
        case QuotaRule():
            usd = " USD" if rule.unit == "microusd" else ""
            hard = "hard" if rule.is_hard else "soft"
            return f"{amount_text(rule.unit, rule.amount)}{usd}/{rule.period}, {hard}"
        case Concurrency() | ContextSize() | OutputSize():
            return str(rule.amount)


def _rate(rule: RequestRate | TokenRate) -> str:
    return f"{rule.amount}/{rule.period}"


def _joined(text: str, **more: object) -> str:
    return ", ".join([text, *(f"{name} {value}" for name, value in more.items() if value is not None)])


def _no_rate(param: str, why: str = "") -> InvalidRequest:
    because = f": {why}" if why else ""
    return InvalidRequest(
        f"'{param}' must be an amount for one second, minute, hour or day, such as 100/minute{because}.", param=param
    )
