"""Calendar periods: every moment lies in one, they join without a gap, and days begin where people's do."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.limits.periods import period_at, period_named, zone_named
from gateway.domain.limits.policy import QUOTA_PERIODS, QuotaPeriod

ZONES = ("UTC", "Asia/Kolkata", "Europe/Berlin", "America/Sao_Paulo", "Asia/Beirut", "America/Havana", "Pacific/Apia")


def _ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


@given(
    kind=st.sampled_from(QUOTA_PERIODS),
    zone=st.sampled_from(ZONES),
    at_ms=st.integers(_ms("2000-01-01T00:00:00+00:00"), _ms("2060-01-01T00:00:00+00:00")),
)
def test_a_moment_lies_in_its_period_and_periods_join(kind: QuotaPeriod, zone: str, at_ms: int) -> None:
    period = period_at(kind, ZoneInfo(zone), at_ms)

    assert period.start_ms <= at_ms < period.end_ms
    assert period_at(kind, ZoneInfo(zone), period.start_ms) == period
    assert period_at(kind, ZoneInfo(zone), period.end_ms - 1) == period
    assert period_named(kind, ZoneInfo(zone), period.id) == period
    following = period_at(kind, ZoneInfo(zone), period.end_ms)
    assert following.start_ms == period.end_ms
    assert following.id > period.id


@pytest.mark.parametrize(
    ("zone", "moment", "day", "start", "hours"),
    [
        ("Asia/Kolkata", "2026-11-29T18:29:59+00:00", "2026-11-29", "2026-11-29T00:00:00+05:30", 24),
        ("Asia/Kolkata", "2026-11-29T18:30:00+00:00", "2026-11-30", "2026-11-30T00:00:00+05:30", 24),
        ("Europe/Berlin", "2026-03-29T12:00:00+00:00", "2026-03-29", "2026-03-29T00:00:00+01:00", 23),
        ("Europe/Berlin", "2026-10-25T12:00:00+00:00", "2026-10-25", "2026-10-25T00:00:00+02:00", 25),
        # Clocks jump at midnight: the day begins at one.
        ("America/Sao_Paulo", "2018-11-04T12:00:00+00:00", "2018-11-04", "2018-11-04T01:00:00-02:00", 23),
        # Clocks go back at one, so there are two midnights.
        ("America/Havana", "2026-11-01T12:00:00+00:00", "2026-11-01", "2026-11-01T00:00:00-04:00", 25),
        # A day that did not exist: the one before it is followed by the one after it.
        ("Pacific/Apia", "2011-12-30T09:59:59+00:00", "2011-12-29", "2011-12-29T00:00:00-10:00", 24),
        ("Pacific/Apia", "2011-12-30T10:00:00+00:00", "2011-12-31", "2011-12-31T00:00:00+14:00", 24),
    ],
)
def test_days_are_those_of_the_zone(zone: str, moment: str, day: str, start: str, hours: int) -> None:
    period = period_at("day", ZoneInfo(zone), _ms(moment))

    assert (period.id, period.start_ms) == (day, _ms(start))
    assert period.end_ms - period.start_ms == hours * 3_600_000


@pytest.mark.parametrize(
    ("day", "week"), [("2026-11-30", "2026-W49"), ("2027-01-03", "2026-W53"), ("2027-01-04", "2027-W01")]
)
def test_weeks_begin_on_monday(day: str, week: str) -> None:
    assert period_at("week", ZoneInfo("UTC"), _ms(f"{day}T10:00:00+00:00")).id == week


def test_a_month_ends_where_the_next_one_begins() -> None:
    period = period_at("month", ZoneInfo("America/New_York"), _ms("2026-02-28T23:59:59-05:00"))

    assert (period.id, period.end_ms) == ("2026-02", _ms("2026-03-01T00:00:00-05:00"))


@pytest.mark.parametrize("name", ["", "Mars/Olympus", "../UTC", "/etc/passwd", "europe", "UTC\n", "x" * 5000])
def test_a_zone_that_is_none_is_told_so(name: str) -> None:
    with pytest.raises(ValueError, match="there is no time zone"):
        zone_named(name)


def test_utc_is_a_zone() -> None:
    assert datetime.now(zone_named("UTC")).utcoffset() == datetime.now(UTC).utcoffset()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("day", ""), ("day", "2026-11"), ("day", "20261130"), ("day", "2026-W49-1"), ("day", "2026-02-29"),
        ("day", "2026-11-30T00"), ("day", "9999-12-31"), ("day", "2026-11-3\u0660"),
        ("week", "2026-11-30"), ("week", "2026-W54"), ("week", "2026W49"), ("week", "2026-W9"), ("week", "2025-W53"),
        ("month", "2026-13"), ("month", "2026-1"), ("month", "202611"), ("month", "2026-11-01"), ("month", "9999-12"),
        ("month", "\x00"), ("month", "x" * 5000),
    ],
)  # fmt: skip
def test_what_no_period_of_this_kind_is_named_is_refused(kind: QuotaPeriod, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^a {kind} is named like 2026-\S+$"):
        period_named(kind, ZoneInfo("Asia/Kolkata"), name)
