"""A soft quota lowers the class of what comes when it is used up, and of nothing before."""

from __future__ import annotations

import pytest
from limited_hub import LimitedHub

from gateway.backends.scripted import Gate, Say
from gateway.domain.limits.policy import QuotaRule


def soft(amount: int) -> QuotaRule:
    return QuotaRule(unit="tokens", period="day", amount=amount, is_hard=False)


async def test_the_first_request_is_not_lowered_though_it_might_write_more_than_the_quota() -> None:
    hub = LimitedHub(soft(1_000), script=[Say("x")])
    call, _ = await hub.ask()

    assert call.grant.max_output == 4_093
    assert call.grant.request_class == "interactive"


@pytest.mark.parametrize(("amount", "class_"), [(14, "interactive"), (13, "batch"), (12, "batch"), (0, "batch")])
async def test_a_request_is_lowered_if_nothing_was_left_before_it(amount: int, class_: str) -> None:
    hub = LimitedHub(soft(amount), script=[Say("x")] * 10)
    await hub.ask(most=10)
    call, _ = await hub.ask(most=10)

    assert call.grant.request_class == class_
    assert [record.info.request_class for record in hub.records][1] == class_


async def test_what_others_hold_is_not_left() -> None:
    hub = LimitedHub(soft(100), script=[Gate("go")])
    async with await hub.call(most=97) as first, await hub.call(most=1) as second:
        assert (first.grant.request_class, second.grant.request_class) == ("interactive", "batch")
        hub.backend.gate("go").set()


async def test_any_of_several_lowers_it() -> None:
    hub = LimitedHub(
        soft(10), QuotaRule(unit="tokens", period="week", amount=10_000, is_hard=False), script=[Say("x")] * 10
    )
    await hub.ask(most=10)
    call, _ = await hub.ask(most=10)

    assert call.grant.request_class == "batch"
