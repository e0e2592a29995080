"""What a caller is told whom a limit refuses, and refusals that are repeated without asking."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from limiter_kit import HARD, MODEL, NOW_S, REQUESTS, RUNNING, TOKENS, limit

from gateway.domain.ids import KeyId
from gateway.domain.limits.periods import zone_named
from gateway.domain.limits.plan import MeterPlan, plan_of
from gateway.domain.limits.policy import Concurrency, QuotaRule, RequestRate, Rule
from gateway.errors import ConcurrencyExceeded, LimitExceeded, QuotaExceeded, ReachedLimit
from gateway.services import refusals
from gateway.services.refusals import QUOTA_REMEMBERED_S, REMEMBERED_S, RefusalMemory, refusal

PLACE, OTHER = (KeyId("key_1"), MODEL), (KeyId("key_2"), MODEL)
RATE, HALTED, LEASE, QUOTA = range(4)


def plan(*rules: Rule) -> MeterPlan:
    held = [limit(rule) for rule in rules or (REQUESTS, RequestRate(amount=0, period="day"), RUNNING, HARD)]
    return plan_of(held, (), (), zone=zone_named("UTC"), model=MODEL, now_ms=int(NOW_S * 1000))


PLAN = plan()


# Memory


def test_a_refusal_is_repeated_for_a_moment_and_the_wait_gets_shorter() -> None:
    for index, lasts_s in ((HALTED, REMEMBERED_S), (QUOTA, QUOTA_REMEMBERED_S)):
        memory = RefusalMemory()
        memory.keep(PLACE, PLAN, index, -3, 5_000, 100.0, is_by_share=index == HALTED)

        assert memory.find(PLACE, PLAN, 100.0) == (index, -3, 5_000, index == HALTED)
        wait_ms = 5_000 - round(900 * lasts_s)
        assert memory.find(PLACE, PLAN, 100.0 + 0.9 * lasts_s) == (index, -3, wait_ms, index == HALTED)
        assert memory.find(OTHER, PLAN, 100.0) is None
        assert memory.find(PLACE, PLAN, 100.0 + lasts_s) is None
        assert len(memory) == 0


def test_one_without_a_wait_has_none_and_a_wait_that_is_over_is_still_a_moment() -> None:
    memory = RefusalMemory()
    memory.keep(PLACE, PLAN, HALTED, 0, None, 100.0)
    memory.keep(OTHER, PLAN, QUOTA, 0, 20, 100.0)

    assert memory.find(PLACE, PLAN, 100.2) == (HALTED, 0, None, False)
    assert memory.find(OTHER, PLAN, 100.04) == (QUOTA, 0, 1, False)


@pytest.mark.parametrize(("index", "remaining"), [(RATE, 1), (QUOTA, 1), (LEASE, 0), (LEASE, -1)])
def test_what_a_smaller_request_or_the_next_moment_might_be_granted_is_asked_for(index: int, remaining: int) -> None:
    memory = RefusalMemory()
    memory.keep(PLACE, PLAN, index, remaining, None, 100.0)

    assert memory.find(PLACE, PLAN, 100.0) is None


@pytest.mark.parametrize(("remaining", "until_s"), [(0, 0.05), (-1, 0.1), (-4, 0.25), (-1_000, 0.25)])
def test_a_rate_is_not_said_to_be_used_up_when_half_the_time_to_its_next_unit_has_passed(
    remaining: int, until_s: float
) -> None:
    ten_a_second, memory = plan(RequestRate(amount=10, period="second")), RefusalMemory()
    memory.keep(PLACE, ten_a_second, 0, remaining, 900, 100.0)

    assert memory.find(PLACE, ten_a_second, 100.0 + until_s - 0.001) is not None
    assert memory.find(PLACE, ten_a_second, 100.0 + until_s) is None


def test_a_changed_plan_is_asked_for() -> None:
    memory = RefusalMemory()
    memory.keep(PLACE, PLAN, QUOTA, 0, None, 100.0)

    assert memory.find(PLACE, msgspec.structs.replace(PLAN), 100.0) is None
    assert len(memory) == 0


def test_what_a_request_gives_back_may_be_had_by_all_that_the_same_meter_refused() -> None:
    memory, of_rate = RefusalMemory(), plan(REQUESTS)
    third, fourth = (KeyId("key_3"), MODEL), (KeyId("key_4"), MODEL)
    for place, index in ((PLACE, QUOTA), (OTHER, RATE), (third, QUOTA), (fourth, HALTED)):
        memory.keep(place, PLAN, index, 0, None, 100.0)
    memory.keep(third, PLAN, RATE, 0, None, 100.0)

    memory.forget(of_rate.uses)
    assert [memory.find(place, PLAN, 100.0) is None for place in (PLACE, OTHER, third, fourth)] == [0, 1, 1, 0]
    memory.forget(PLAN.uses)
    assert len(memory) == 0
    memory.forget(PLAN.uses)


def test_the_oldest_are_forgotten_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MOST_REMEMBERED", 2)
    memory = RefusalMemory()
    places = [(KeyId(f"key_{n}"), MODEL) for n in range(3)]
    for place in (places[0], places[1], places[0], places[2]):
        memory.keep(place, PLAN, QUOTA, 0, None, 100.0)

    assert [memory.find(place, PLAN, 100.0) is None for place in places] == [False, True, False]
    memory.forget(PLAN.uses)
    assert len(memory) == 0


# What it is called


def refused(
    rule: Rule, remaining: int, wait_ms: int | None = None, *, model: str | None = None, **told: Any
) -> LimitExceeded:
    [metered] = plan_of(
        [limit(rule, "team", model=model)], (), (), zone=zone_named("UTC"), model=MODEL, now_ms=int(NOW_S * 1000)
    ).metered
    return refusal(metered, remaining, wait_ms, **told)


def test_a_rate_says_what_is_left_of_what_and_when_there_is_enough() -> None:
    error = refused(TOKENS, 7, 12_345)

    assert (type(error), error.status, error.code, error.type) == (
        LimitExceeded,
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert error.limit == ReachedLimit(
        name="tokens/minute", scope="team", model=None, amount=100, remaining=7, wait_ms=12_345, full_ms=9_300
    )
    assert error.message == (
        "The team's limit 'tokens/minute' is reached (7 of 100 left). Please try again in 12.345 s."
    )
    assert (error.retry_after_s, error.should_retry) == (13, None)


def test_a_rate_in_debt_has_nothing_left_and_one_without_refill_names_no_time() -> None:
    assert "(0 of 100 left)" in refused(TOKENS, -20, 1).message
    assert refused(TOKENS, -20, 1).limit.remaining == -20
    halted = refused(RequestRate(amount=0, period="day", burst=5), 0)
    assert halted.message == "The team's limit 'requests/day' is reached (0 of 5 left)."
    assert (halted.retry_after_s, halted.limit.full_ms) == (None, None)
    assert (halted.should_retry, refused(TOKENS, -20, 1).should_retry) == (False, None)


def test_what_allows_nothing_says_so_and_is_not_to_be_tried_again() -> None:
    lease = refused(Concurrency(amount=0), 0)
    assert (lease.message, lease.code) == (
        "The team's limit 'concurrent' allows no requests.",
        "concurrency_limit_exceeded",
    )
    assert (lease.should_retry, lease.retry_after_s, lease.limit.wait_ms) == (False, None, None)
    quota = refused(QuotaRule(unit="tokens", period="day", amount=0), 0, None, needed=11)
    assert quota.message == "The team's quota 'quota-tokens/day' of 2026-11-29 allows nothing."
    assert quota.should_retry is False


def test_what_a_rate_can_never_take_need_not_be_tried_again() -> None:
    error = refused(TOKENS, 100, None, needed=120, model=MODEL)

    assert error.message == (
        "The request is larger than the team's (m) limit 'tokens/minute' ever allows at once (100): it "
        "needs at least 120. Please send a shorter prompt."
    )
    assert (error.should_retry, error.retry_after_s, error.limit.model) == (False, None, MODEL)
    none = refused(RequestRate(amount=0, period="minute"), 0, None, needed=1)
    assert none.message == "The team's limit 'requests/minute' allows no requests."


def test_a_number_of_requests_says_to_wait_for_one_of_them() -> None:
    error = refused(RUNNING, 0)

    assert (type(error), error.status, error.code) == (ConcurrencyExceeded, 429, "concurrency_limit_exceeded")
    assert error.message == (
        "The team's limit of 2 requests at a time is reached. Please try again when one has ended."
    )
    assert (error.retry_after_s, error.limit.wait_ms, error.should_retry) == (1, 1_000, None)


def test_a_quota_is_not_to_be_tried_again_before_its_period_ends() -> None:
    error = refused(HARD, -5, 1_600_000, model=MODEL)

    assert (type(error), error.status, error.code, error.type, error.should_retry) == (
        QuotaExceeded,
        429,
        "insufficient_quota",
        "insufficient_quota",
        False,
    )
    assert error.message == (
        "The team's (m) quota 'quota-tokens/day' of 2026-11-29 has 0 of 1000 left, less than the request needs."
    )
    assert (error.retry_after_s, error.limit.remaining) == (1_600, -5)
    assert refused(HARD, 1_000, None, needed=1_001).message == (
        "The request is larger than the team's quota 'quota-tokens/day' of 2026-11-29 ever allows (1000): it needs at "
        "least 1001. Please send a shorter prompt."
    )


def test_what_a_share_refuses_says_that_it_is_one() -> None:
    assert refused(TOKENS, 7, 1_000, is_by_share=True).message == (
        "The team's limit 'tokens/minute' is reached (7 left of this server's share of 100). "
        "Please try again in 1.000 s."
    )
    error = refused(RUNNING, 0, is_by_share=True)
    assert error.message.startswith("This server's share of the team's limit of 2 requests at a time is reached.")
    assert (error.is_by_share, refused(RUNNING, 0).is_by_share) == (True, False)
