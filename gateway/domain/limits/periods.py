"""Calendar periods of quotas, in a time zone. Pure: what time it is comes from the caller's clock."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from gateway.domain.limits.policy import QuotaPeriod

DEFAULT_ZONE = "UTC"
_EXAMPLES: dict[QuotaPeriod, str] = {"day": "2026-11-30", "week": "2026-W49", "month": "2026-11"}


class Period(msgspec.Struct, frozen=True):
    """
    Attributes:
        id: ``2026-11-30``, ``2026-W49`` (weeks begin on Monday, as in ISO 8601) or ``2026-11``.
        start_ms, end_ms: since the epoch; the end is the next one's start.
    """

    id: str
    start_ms: int
    end_ms: int


def zone_named(name: str) -> ZoneInfo:
    """Raises ValueError with one sentence for people."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"there is no time zone '{name}': names are like Europe/Berlin, Asia/Kolkata or UTC") from None


def period_at(kind: QuotaPeriod, zone: ZoneInfo, at_ms: int) -> Period:
    """The period that a moment lies in. Where clocks are changed at midnight, a day begins with its first moment."""
    return _period_of(kind, zone, datetime.fromtimestamp(at_ms / 1000, UTC).astimezone(zone).date())


def period_named(kind: QuotaPeriod, zone: ZoneInfo, period_id: str) -> Period:
    """The period with this id. Raises ValueError with one sentence for people."""
    try:
        period = _period_of(kind, zone, _a_day_in(kind, period_id))
    except (ValueError, OverflowError):
        period = None
    if period is None or period.id != period_id:  # a date has other spellings, too
        raise ValueError(f"a {kind} is named like {_EXAMPLES[kind]}")
    return period


def _a_day_in(kind: QuotaPeriod, period_id: str) -> date:
    match kind:
        case "day":
            return date.fromisoformat(period_id)
        case "week":
            return date.fromisoformat(f"{period_id}-1")
        case "month":
            return date.fromisoformat(f"{period_id}-01")


def _period_of(kind: QuotaPeriod, zone: ZoneInfo, day: date) -> Period:
    match kind:
        case "day":
            return _period(day.isoformat(), day, day + timedelta(days=1), zone)
        case "week":
            year, week, weekday = day.isocalendar()
            monday = day - timedelta(days=weekday - 1)
            return _period(f"{year}-W{week:02}", monday, monday + timedelta(days=7), zone)
        case "month":
            first = day.replace(day=1)
            following = (first + timedelta(days=31)).replace(day=1)
            return _period(f"{first:%Y-%m}", first, following, zone)


def _period(period_id: str, first: date, following: date, zone: ZoneInfo) -> Period:
    return Period(period_id, _first_moment_ms(first, zone), _first_moment_ms(following, zone))


def _first_moment_ms(day: date, zone: ZoneInfo) -> int:
    """Of two midnights it is the earlier one, and if there is none the moment that the clock jumps at: both are what
    the standard library makes of fold=0."""
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * 1000
