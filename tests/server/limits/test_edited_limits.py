"""What administrators change holds within two seconds for all gateways, for what runs too, and forgets nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Literal, NamedTuple

import msgspec
import pytest
from cluster import MODEL, SharedCluster
from limit_kit import Customer, Held, LimitOffice, Standings, begun, eventually, known, standings
from limit_load import Answer, Caller, taken, what_happened

from gateway.domain.limits.policy import Concurrency, OutputSize, QuotaRule, RequestRate, Scope, TokenRate

pytestmark = pytest.mark.slow

BOUND_S = 2.0
"""What is promised for a change to be known everywhere."""
RATE_S = 40
NUM_LATE = 20
TOKENS = 50
Change = Literal["set", "top up", "remove", "shadow"]


def with_amount(held: Held, amount: int) -> Held:
    return held._replace(rule=msgspec.structs.replace(held.rule, amount=amount))


class Load(NamedTuple):
    """Requests in the order they were sent in.

    Attributes:
        changed_s, known_s: when the change was made, and when both gateways were seen to know it.
    """

    answers: Sequence[Answer]
    changed_s: float
    known_s: float

    @property
    def late(self) -> list[Answer]:
        """Those that the change must hold for."""
        return [each for each in self.answers if each.sent_s > self.known_s]


async def load_over(
    pair: SharedCluster,
    caller: Caller,
    customer: Customer,
    *,
    before: int,
    change: Callable[[], Awaitable[None]],
    is_known: Callable[[Standings], bool],
) -> Load:
    """Requests of 20 tokens and 10 or 30 in turn at both gateways, at a steady rate; the change in the middle.

    Args:
        before: requests decided before it.
    """
    answers: list[Answer] = []
    stop = asyncio.Event()

    async def send() -> None:
        async with asyncio.TaskGroup() as group:
            begun_s = time.monotonic()
            while not stop.is_set():
                await asyncio.sleep(max(0.0, begun_s + len(answers) / RATE_S - time.monotonic()))
                answer = Answer(pair.gateways[len(answers) % 2].url)
                answers.append(answer)
                kind = {"stream": len(answers) % 3 == 0, "n": 1 + 2 * (len(answers) // 2 % 2)}
                group.create_task(caller.ask(answer.url, customer.key, prompt=20, output=10, answer=answer, **kind))

    async def are_decided(num: int, since_s: float) -> bool:
        return sum(each.status > 0 for each in answers if each.sent_s > since_s) >= num

    sending = asyncio.create_task(send())
    try:
        await eventually(lambda: are_decided(before, 0.0), f"{before} requests")
        await change()
        changed_s = time.monotonic()
        await known(pair, customer, is_known, "the change", BOUND_S)
        known_s = time.monotonic()
        await eventually(lambda: are_decided(NUM_LATE, known_s), f"{NUM_LATE} requests after the change")
    finally:
        stop.set()
        await sending
    return Load(answers, changed_s, known_s)


@pytest.mark.parametrize("scope", ["organization", "team", "key"])
async def test_a_quota_that_is_lowered_below_what_was_used_takes_nobody_any_more(
    pair: SharedCluster, office: LimitOffice, caller: Caller, scope: Scope
) -> None:
    quota = Held(scope, QuotaRule(unit="tokens", period="day", amount=20_000))
    customer = await office.customer(quota)
    await begun(pair, customer)

    load = await load_over(
        pair,
        caller,
        customer,
        before=20,
        change=lambda: office.set(customer, with_amount(quota, 300)),
        is_known=lambda look: look.limits[0]["amount"] == 300,
    )

    assert {each.code for each in load.late} == {"insufficient_quota"}, what_happened(load.answers)
    assert {each.limit["amount"] for each in load.late} == {300}
    used = sum(each.total for each in load.answers)
    assert load.late[-1].limit["remaining"] == 300 - used < 0, "below nothing, and told so"
    assert {each.status for each in load.answers if each.decided_s < load.changed_s} == {200}


@pytest.mark.parametrize("how", ["set", "top up", "remove", "shadow"])
async def test_a_quota_that_is_used_up_takes_what_is_added_and_not_a_token_more(
    pair: SharedCluster, office: LimitOffice, caller: Caller, how: Change
) -> None:
    quota = Held("team", QuotaRule(unit="tokens", period="week", amount=1_000))
    customer = await office.customer(quota)
    await begun(pair, customer)
    changes: dict[Change, Callable[[], Awaitable[None]]] = {
        "set": lambda: office.set(customer, with_amount(quota, 1_500)),
        "top up": lambda: office.top_up(customer, quota, 500),
        "remove": lambda: office.remove(customer, quota),
        "shadow": lambda: office.set(customer, quota._replace(is_shadow=True)),
    }
    are_known: dict[Change, Callable[[Standings], bool]] = {
        "set": lambda look: look.limits[0]["amount"] == 1_500,
        "top up": lambda look: look.limits[0]["amount"] == 1_500,
        "remove": lambda look: not look.limits,
        "shadow": lambda look: not look.limits[0]["is_enforced"],
    }

    load = await load_over(pair, caller, customer, before=60, change=changes[how], is_known=are_known[how])

    at_change = [each for each in load.answers if each.sent_s < load.changed_s][-5:]
    assert {each.code for each in at_change} == {"insufficient_quota"}, "it was used up"
    first_taken_s = min(each.decided_s for each in taken(load.answers) if each.sent_s > at_change[-1].sent_s)
    assert first_taken_s - load.changed_s < BOUND_S
    used = sum(each.total for each in load.answers)
    if how in ("set", "top up"):
        left = {(await standings(each.url, customer.key)).left(quota.rule.name, "team") for each in pair.gateways}
        assert left == {1_500 - used}
        assert 1_500 - 23 <= used <= 1_500
        return
    assert {each.status for each in load.late} == {200}
    await office.set(customer, with_amount(quota, 100_000))
    await known(pair, customer, lambda look: [each["amount"] for each in look.limits] == [100_000], "it is set again")
    counted = 100_000 - (await standings(pair.gateways[0].url, customer.key)).left(quota.rule.name, "team")
    # In shadow all is counted; of one that was not there what was used before is not forgotten.
    assert counted == used if how == "shadow" else 1_000 - 23 <= counted < used


@pytest.mark.parametrize("how", ["set", "top up"])
async def test_a_stream_that_runs_gets_what_is_added_meanwhile_and_is_cut_there(
    pair: SharedCluster, office: LimitOffice, caller: Caller, how: Change
) -> None:
    """What breaks it: amounts that are kept with the reservation cut it at 500."""
    quota = Held("organization", QuotaRule(unit="tokens", period="month", amount=500))
    customer = await office.customer(quota)
    await begun(pair, customer)
    async with caller.running(pair.gateways[1].url, customer.key, prompt=20, output=4_000) as running:
        assert running.answer.headers["x-evenhand-output-cap"] == "480"
        if how == "set":
            await office.set(customer, with_amount(quota, 1_100))
        else:
            await office.top_up(customer, quota, 600)
        answer = await running.end()

    assert (answer.total, answer.causes) == (1_100, {0: "quota_exceeded"})
    assert {
        (await standings(each.url, customer.key)).left(quota.rule.name, "organization") for each in pair.gateways
    } == {0}


async def test_a_stream_keeps_what_it_was_granted_and_gets_no_more_once_the_quota_is_lowered(
    pair: SharedCluster, office: LimitOffice, caller: Caller
) -> None:
    quota = Held("key", QuotaRule(unit="tokens", period="day", amount=700))
    customer = await office.customer(quota)
    await begun(pair, customer)
    url, other = (gateway.url for gateway in pair.gateways)
    async with (
        caller.running(other, customer.key, prompt=20, output=80) as neighbour,
        caller.running(url, customer.key, prompt=20, output=4_000) as running,
    ):
        assert running.answer.headers["x-evenhand-output-cap"] == "580"
        await office.set(customer, with_amount(quota, 200))
        await known(pair, customer, lambda look: look.limits[0]["amount"] == 200, "it is lowered")
        await neighbour.leave()  # what that one gives back is not for anybody, as long as more is used than there is
        answer = await running.end()

    assert (answer.output, answer.causes) == (580, {0: "quota_exceeded"})
    refused = await caller.ask(other, customer.key, prompt=20, output=1)
    assert (refused.code, refused.limit["amount"]) == ("insufficient_quota", 200)


RATES = [
    Held("key", RequestRate(amount=1, period="day", burst=40)),
    Held("team", TokenRate(amount=1, period="day", burst=2_000, is_strict=True), MODEL),
]


@pytest.mark.parametrize("held", RATES, ids=["requests", "tokens"])
async def test_a_rate_that_is_changed_keeps_what_was_used_of_it(
    pair: SharedCluster, office: LimitOffice, caller: Caller, held: Held
) -> None:
    """Two thirds are used; the burst becomes larger, then smaller, then what it was: never is any of it full again."""
    customer = await office.customer(held)
    urls = [gateway.url for gateway in pair.gateways]
    assert {(await caller.ask(urls[i % 2], customer.key, prompt=20, output=30)).status for i in range(26)} == {200}
    at = (held.rule.name, held.scope, held.model)
    unit = 1 if isinstance(held.rule, RequestRate) else TOKENS
    assert {(await standings(url, customer.key)).left(*at) for url in urls} == {14 * unit}

    for burst, left in ((60, 14), (20, 14), (10, 10), (40, 9)):
        await office.set(customer, held._replace(rule=msgspec.structs.replace(held.rule, burst=burst * unit)))
        await known(pair, customer, lambda look, burst=burst: look.find(*at)["burst"] == burst * unit, "the burst")
        assert {(await standings(url, customer.key)).left(*at) for url in urls} == {left * unit}
        if burst == 10:  # what is above the burst is cut off when the next request is let through
            assert (await caller.ask(urls[0], customer.key, prompt=20, output=30)).is_taken
    answers = await caller.ask_all(caller.ask(urls[i % 2], customer.key, prompt=20, output=30) for i in range(40))
    assert len(taken(answers)) == 9


async def test_slots_that_are_taken_away_are_not_given_again_and_nobody_is_cut(
    pair: SharedCluster, office: LimitOffice, caller: Caller
) -> None:
    held = Held("team", Concurrency(amount=4))
    customer = await office.customer(held)
    urls = [gateway.url for gateway in pair.gateways]
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(caller.running(urls[i % 2], customer.key, output=4_000)) for i in range(4)
        ]
        await office.set(customer, with_amount(held, 2))
        await known(pair, customer, lambda look: look.find("concurrent", "team")["amount"] == 2, "there are two")
        for each in running[:2]:
            await each.leave()
        await eventually(lambda: is_left(urls, customer, 0), "two run")
        refused = [await caller.ask(url, customer.key) for url in urls]
        assert {answer.code for answer in refused} == {"concurrency_limit_exceeded"}
        assert {answer.limit["amount"] for answer in refused} == {2}
        assert not any(each.answer.is_over for each in running[2:])
        await running[2].leave()
        await eventually(lambda: is_left(urls, customer, 1), "one runs")
        assert (await caller.ask(urls[1], customer.key)).is_taken


async def is_left(urls: Sequence[str], customer: Customer, num: int) -> bool:
    return {(await standings(url, customer.key)).left("concurrent", "team") for url in urls} == {num}


async def test_a_new_limit_holds_for_who_is_in_the_middle_of_using_a_key(
    pair: SharedCluster, office: LimitOffice, caller: Caller
) -> None:
    """A key without any limit is known to both gateways; then it gets a size, a rate and a quota, one after another."""
    customer = await office.customer()
    urls = [gateway.url for gateway in pair.gateways]
    assert {(await caller.ask(url, customer.key, output=40)).output for url in urls} == {40}

    await office.set(customer, Held("key", OutputSize(amount=15)))
    await known(pair, customer, lambda look: len(look.limits) == 1, "the size")
    assert {(await caller.ask(url, customer.key, output=40)).output for url in urls} == {15}
    await office.set(customer, Held("team", RequestRate(amount=1, period="day", burst=5)))
    await known(pair, customer, lambda look: len(look.limits) == 2, "the rate")
    answers = [await caller.ask(urls[i % 2], customer.key) for i in range(7)]
    assert [answer.status for answer in answers] == [200] * 5 + [429] * 2
    await office.remove(customer, Held("team", RequestRate(amount=1, period="day", burst=5)))
    await office.set(customer, Held("organization", QuotaRule(unit="tokens", period="day", amount=60)))
    await known(pair, customer, lambda look: [each["scope"] for each in look.limits] == ["organization", "key"], "it")
    answers = [await caller.ask(urls[i % 2], customer.key) for i in range(3)]
    assert [answer.total for answer in answers] == [30, 30, 0], "what was used before it was set does not count"
