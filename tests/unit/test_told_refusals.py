"""Of several limits that refuse a request its caller is told of the gravest, and nothing that is so of another."""

from __future__ import annotations

import pytest
from limited_hub import LimitedHub

from gateway.backends.scripted import Gate, Say
from gateway.domain.limits.policy import Concurrency, QuotaRule, RequestRate, Rule, TokenRate
from gateway.errors import ConcurrencyExceeded, LimitExceeded, QuotaExceeded
from gateway.web.errors import error_headers

SLOT = Concurrency(amount=1)
ONE = RequestRate(amount=1, period="minute")
ONE_A_DAY = RequestRate(amount=1, period="day")
HALTED = RequestRate(amount=0, period="hour", burst=1)
TOKENS = TokenRate(amount=100, period="minute")
SMALL = TokenRate(amount=50, period="second")
DAY = QuotaRule(unit="tokens", period="day", amount=100)
WEEK = QuotaRule(unit="tokens", period="week", amount=50)
LONG = "a " * 60


async def refused(hub: LimitedHub, *prompts: str, most: int = 1) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as error:
        await hub.ask(*prompts, most=most)
    return error.value


async def second(*rules: Rule, prompt: str = "a b c", most: int = 1) -> LimitExceeded:
    """What the second request is told, which runs while the first does."""
    hub = await LimitedHub(*rules, script=[Gate("go")]).begun()
    async with await hub.call(most=97):
        error = await refused(hub, prompt, most=most)
        hub.backend.gate("go").set()
    return error


@pytest.mark.parametrize("others", [(ONE,), (SLOT,), (ONE, SLOT, DAY), (HALTED,), (DAY,)])
async def test_what_can_never_be_taken_comes_first(others: tuple[Rule, ...]) -> None:
    error = await second(*others, SMALL, prompt=LONG)

    assert (error.status, error.limit.name, error.limit.wait_ms) == (429, "tokens/second", None)
    assert error.message == (
        "The request is larger than the key's limit 'tokens/second' ever allows at once (50): it needs at least 60. "
        "Please send a shorter prompt."
    )
    headers = error_headers(error)
    assert headers["x-should-retry"] == "false"
    assert not {"retry-after", "retry-after-ms"} & set(headers)


async def test_a_quota_that_can_never_take_it_says_what_is_needed() -> None:
    hub = await LimitedHub(ONE, WEEK, script=[Say("x")]).begun()
    await hub.ask(most=1)
    error = await refused(hub, LONG, "a", most=9)

    assert isinstance(error, QuotaExceeded)
    assert error.message.startswith("The request is larger than the key's quota 'quota-tokens/week' of ")
    assert error.message.endswith(" ever allows (50): it needs at least 63. Please send a shorter prompt.")
    assert (error.retry_after_s, error.limit.wait_ms, error.should_retry) == (None, None, False)


async def test_a_rate_of_nothing_needs_no_shorter_prompt() -> None:
    error = await refused(LimitedHub(RequestRate(amount=0, period="minute")))

    assert error.message == "The key's limit 'requests/minute' allows no requests."
    assert (error.should_retry, error.retry_after_s) == (False, None)


@pytest.mark.parametrize("others", [(ONE,), (SLOT,), (HALTED, SLOT, ONE_A_DAY)])
async def test_then_a_hard_quota(others: tuple[Rule, ...]) -> None:
    error = await second(*others, DAY, prompt="a")

    assert isinstance(error, QuotaExceeded)
    assert "has 0 of 100 left, less than the request needs" in error.message
    assert error.retry_after_s == 86_400 - 1_000


@pytest.mark.parametrize("others", [(ONE,), (ONE_A_DAY, TOKENS), (HALTED,)])
async def test_then_a_number_of_requests(others: tuple[Rule, ...]) -> None:
    error = await second(*others, SLOT)

    assert isinstance(error, ConcurrencyExceeded)
    assert error.retry_after_s == 1


@pytest.mark.parametrize(
    ("rules", "name", "wait_ms"),
    [
        ((ONE, ONE_A_DAY), "requests/day", 86_400_000),
        ((ONE_A_DAY, ONE), "requests/day", 86_400_000),
        ((ONE_A_DAY, HALTED, ONE), "requests/hour", None),
        ((TokenRate(amount=100, period="minute", is_strict=True), ONE), "requests/minute", 60_000),
    ],
)
async def test_then_the_rate_with_the_longest_wait(rules: tuple[Rule, ...], name: str, wait_ms: int | None) -> None:
    error = await second(*rules)

    should_retry = None if wait_ms else False  # of a rate that is not refilled nobody can tell
    assert (error.limit.name, error.limit.wait_ms, error.should_retry) == (name, wait_ms, should_retry)
    assert f"limit '{name}' is reached (0 of " in error.message


async def test_soft_and_shadow_limits_are_not_told_of() -> None:
    soft = QuotaRule(unit="tokens", period="day", amount=0, is_hard=False)
    error = await second(soft, ONE)

    assert error.limit.name == "requests/minute"


async def test_a_check_before_the_prompt_is_read_tells_the_same() -> None:
    hub = await LimitedHub(ONE, SLOT, script=[Gate("go")]).begun()
    async with await hub.call(most=1):
        error = await refused(hub, "a " * 1_500)
        hub.backend.gate("go").set()

    assert isinstance(error, ConcurrencyExceeded)
