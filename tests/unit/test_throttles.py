"""Throttles in memory, over the library itself and real time."""

from __future__ import annotations

import asyncio
import time

import pytest
from limits import parse
from pydantic import ValidationError

from gateway.limits import throttles
from gateway.limits.throttles import CountingThrottle, Throttles
from gateway.services.throttle import Throttle, Unthrottled
from gateway.settings import ThrottleSettings


def throttle(rate: str) -> Throttle:
    return Throttles(None).throttle("test", rate)


async def fill(throttle: Throttle, who: str, num: int) -> None:
    for _ in range(num):
        assert await throttle.count(who) == 0


@pytest.mark.parametrize(("rate", "num"), [("1/hour", 1), ("7/hour", 7), ("30/minute", 30), ("3 per 2 hours", 3)])
async def test_so_many_are_counted_and_then_no_more(rate: str, num: int) -> None:
    limited = throttle(rate)
    for _ in range(num):
        assert await limited.wait_s("a") == 0
        assert await limited.count("a") == 0

    longest_s = parse(rate).get_expiry()
    for ask in (limited.count, limited.wait_s, limited.count):
        assert 1 <= await ask("a") <= longest_s
    assert await limited.count("b") == 0


async def test_looking_counts_nothing() -> None:
    limited = throttle("2/hour")
    for _ in range(10):
        assert await limited.wait_s("a") == 0
    await fill(limited, "a", 2)


async def test_after_the_wait_that_was_told_there_is_room_and_what_was_refused_does_not_count() -> None:
    limited = throttle("4/2 seconds")
    await fill(limited, "a", 4)
    for _ in range(50):
        assert await limited.count("a") > 0
    wait_s = await limited.count("a")
    asked_at = time.monotonic()
    assert 1 <= wait_s <= 2

    await asyncio.sleep(wait_s - (time.monotonic() - asked_at) + 0.01)

    assert await limited.wait_s("a") == 0
    assert await limited.count("a") == 0


async def test_of_many_at_once_exactly_so_many_pass() -> None:
    limited = throttle("30/hour")
    answers = await asyncio.gather(*(limited.count("a") for _ in range(200)))

    assert answers.count(0) == 30


async def test_two_throttles_do_not_count_for_each_other() -> None:
    both = Throttles(None)
    first, second = both.throttle("first", "1/hour"), both.throttle("second", "1/hour")
    await fill(first, "a", 1)
    await fill(second, "a", 1)

    assert await first.count("a") > 0


async def test_what_is_off_lets_everything_pass() -> None:
    assert isinstance(throttle("off"), Unthrottled)
    await fill(throttle("off"), "a", 1000)


async def test_of_very_many_the_ones_not_heard_of_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttles, "MOST_COUNTED", 10)
    limited = throttle("2/hour")
    assert isinstance(limited, CountingThrottle)
    await fill(limited, "old", 1)
    await fill(limited, "kept", 1)
    for number in range(9):
        await fill(limited, f"other {number}", 1)

    await fill(limited, "kept", 1)
    assert await limited.count("kept") > 0
    await fill(limited, "old", 2)
    assert len(limited._own.storage.storage) <= 11  # type: ignore[attr-defined]  # the library's memory


async def test_very_many_who_were_refused_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttles, "MOST_REFUSED", 10)
    limited = throttle("1/hour")
    assert isinstance(limited, CountingThrottle)
    for number in range(30):
        await fill(limited, f"who {number}", 1)
        assert await limited.count(f"who {number}") > 0

    assert len(limited._refused_until) == 10
    assert await limited.count("who 0") > 0


@pytest.mark.parametrize(
    "rate",
    [
        "30/minute",
        "1/second",
        "5/hours",
        "100/day",
        " 10 / minute ",
        "10 per minute",
        "10 per 5 minutes",
        "7/30SECONDS",
    ],
)
def test_the_library_reads_every_rate_that_settings_take(rate: str) -> None:
    taken = ThrottleSettings(failed_keys=rate).failed_keys

    assert parse(taken) == parse(rate)


@pytest.mark.parametrize(
    "rate",
    ["", "30", "30/", "/minute", "30/fortnight", "30/month", "-1/minute", "1.5/minute", "1/minute; 2/hour", "1/0minute",
     "0/minute", "0000000/minute", "1234567/minute", "30//minute", "Off ", "thirty/minute", "1/minute\n2/hour"],
)  # fmt: skip
def test_what_is_no_rate_is_refused_at_the_start(rate: str) -> None:
    with pytest.raises(ValidationError, match=r"must be a rate such as 30/minute|must let something pass"):
        ThrottleSettings(failed_keys=rate)
