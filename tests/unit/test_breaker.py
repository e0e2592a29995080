from __future__ import annotations

import pytest

from gateway.limits.breaker import Breaker


class Seconds:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def breaker(seconds: Seconds) -> Breaker:
    return Breaker(num_failures=3, pause_s=2.0, monotonic=seconds)


def entered(breaker: Breaker) -> int:
    ticket = breaker.enter()
    assert ticket is not None
    return ticket


def fail(breaker: Breaker, num: int) -> None:
    for _ in range(num):
        breaker.failed(entered(breaker))


def test_failures_in_a_row_open_it(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert not breaker.is_open
    fail(breaker, 1)

    assert breaker.is_open
    assert breaker.enter() is None


def test_a_success_in_between_begins_the_count_anew(breaker: Breaker) -> None:
    fail(breaker, 2)
    entered(breaker)
    breaker.succeeded()
    fail(breaker, 2)

    assert not breaker.is_open


def test_one_probe_goes_through_when_the_pause_is_over(breaker: Breaker, seconds: Seconds) -> None:
    fail(breaker, 3)
    seconds.now += 1.9
    assert breaker.enter() is None
    seconds.now += 0.1
    entered(breaker)

    assert breaker.enter() is None
    assert breaker.is_open


def test_a_probe_that_succeeds_closes_it(breaker: Breaker, seconds: Seconds) -> None:
    fail(breaker, 3)
    seconds.now += 2
    entered(breaker)
    breaker.succeeded()

    assert not breaker.is_open
    fail(breaker, 2)
    assert not breaker.is_open


def test_a_probe_that_fails_begins_another_pause(breaker: Breaker, seconds: Seconds) -> None:
    fail(breaker, 3)
    seconds.now += 2
    fail(breaker, 1)

    assert breaker.enter() is None
    seconds.now += 1.9
    assert breaker.enter() is None
    seconds.now += 0.1
    assert breaker.enter() is not None


def test_a_probe_that_is_given_up_lets_another_one_through(breaker: Breaker, seconds: Seconds) -> None:
    fail(breaker, 3)
    seconds.now += 2
    breaker.left(entered(breaker))

    assert breaker.is_open
    entered(breaker)
    assert breaker.enter() is None


def test_calls_from_before_it_opened_neither_make_the_pause_longer_nor_end_the_probe(
    breaker: Breaker, seconds: Seconds
) -> None:
    old = [entered(breaker) for _ in range(9)]
    for ticket in old[:3]:
        breaker.failed(ticket)
    seconds.now += 1.5
    breaker.failed(old[3])
    seconds.now += 0.5
    entered(breaker)
    breaker.failed(old[4])
    breaker.left(old[5])

    assert breaker.enter() is None
    breaker.succeeded()
    assert breaker.enter() is not None


def test_a_call_from_before_it_opened_that_succeeds_closes_it(breaker: Breaker) -> None:
    entered(breaker)
    fail(breaker, 3)
    breaker.succeeded()

    assert not breaker.is_open
    assert breaker.enter() is not None


def test_a_probe_may_fail_after_something_else_has_succeeded(breaker: Breaker, seconds: Seconds) -> None:
    fail(breaker, 3)
    seconds.now += 2
    probe = entered(breaker)
    breaker.succeeded()
    breaker.failed(probe)

    assert not breaker.is_open
    assert breaker.enter() is not None
