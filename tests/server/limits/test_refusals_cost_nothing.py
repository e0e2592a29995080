"""Whoever is refused by one limit has used nothing of the others, however often it asks."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import NamedTuple

import httpx
import pytest
from cluster import Gateway, SharedCluster
from limit_kit import Held, LimitOffice, begun, standings
from limit_load import Answer, Caller, what_happened
from prometheus_client.parser import text_string_to_metric_families

from gateway.domain.limits.policy import (
    SCOPES,
    Concurrency,
    ContextSize,
    QuotaRule,
    RequestRate,
    Rule,
    Scope,
    TokenRate,
)

pytestmark = pytest.mark.slow

NUM_REFUSED = 10
AMPLE: tuple[Rule, ...] = (
    RequestRate(amount=1, period="day", burst=50),
    TokenRate(amount=1, period="day", burst=5_000),
    Concurrency(amount=20),
    QuotaRule(unit="tokens", period="day", amount=5_000),
    QuotaRule(unit="microusd", period="month", amount=50_000),
    ContextSize(amount=4_000),
)
"""So slowly refilled that nothing comes back while a test looks."""


class Tight(NamedTuple):
    """A limit that takes one request, of 20 tokens and up to 40, and refuses another one of 50 and up to 10."""

    rule: Rule
    code: str
    status: int = 429


TIGHT = {
    "concurrency": Tight(Concurrency(amount=1), "concurrency_limit_exceeded"),
    "requests": Tight(RequestRate(amount=1, period="day", burst=1), "rate_limit_exceeded"),
    "tokens": Tight(TokenRate(amount=1, period="day", burst=100), "rate_limit_exceeded"),
    "strict tokens": Tight(TokenRate(amount=1, period="day", burst=110, is_strict=True), "rate_limit_exceeded"),
    "token quota": Tight(QuotaRule(unit="tokens", period="day", amount=100), "insufficient_quota"),
    "money quota": Tight(QuotaRule(unit="microusd", period="month", amount=500), "insufficient_quota"),
    "context": Tight(ContextSize(amount=45), "context_length_exceeded", 400),
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", TIGHT)
async def test_ten_refusals_leave_every_meter_as_it_was(
    pair: SharedCluster, office: LimitOffice, caller: Caller, kind: str, scope: Scope
) -> None:
    """What breaks it: meters that are charged one after the other, and not given back when a later one refuses. The
    tight one is the first, one in the middle and the last of eighteen."""
    tight = TIGHT[kind]
    await office.price(prompt=2_500_000, cached=700_000, completion=10_300_000)
    ample = [Held(each, rule) for each in SCOPES for rule in AMPLE if (each, rule.name) != (scope, tight.rule.name)]
    customer = await office.customer(*ample, Held(scope, tight.rule))
    await begun(pair, customer)
    urls = [gateway.url for gateway in pair.gateways]
    async with AsyncExitStack() as stack:
        if kind == "concurrency":
            held = await stack.enter_async_context(caller.running(urls[0], customer.key, prompt=20, output=400))
            request_ids = [held.answer.request_id]
        else:
            first = await caller.ask(urls[0], customer.key, prompt=20, output=40)
            request_ids = [first.request_id]
        before = await standings(urls[0], customer.key)
        refusals_before = sum(refusals(gateway, tight.rule.name, scope) for gateway in pair.gateways)

        answers = [await refused(caller, urls[i % 2], customer.key, i) for i in range(NUM_REFUSED)]

        assert {(answer.status, answer.code) for answer in answers} == {(tight.status, tight.code)}
        assert await standings(urls[0], customer.key) == before
        if tight.status == 429:
            assert {(each.limit["name"], each.limit["scope"]) for each in answers} == {(tight.rule.name, scope)}
            num_counted = sum(refusals(gateway, tight.rule.name, scope) for gateway in pair.gateways)
            assert num_counted - refusals_before == NUM_REFUSED
        if kind == "concurrency":
            await held.end()
            next_one = await caller.ask(urls[1], customer.key)
            assert next_one.is_taken, "the slot is free"
            request_ids.append(next_one.request_id)
    rows = await office.settled(customer, len(request_ids))
    assert [row.request_id for row in reversed(rows)] == request_ids


async def refused(caller: Caller, url: str, key: str, i: int) -> Answer:
    """One of several kinds: streamed or not, and so long that it is looked at before it is tokenized."""
    if i % 5 == 4:
        return await caller.ask(url, key, prompt="word " * 500, output=10)
    return await caller.ask(url, key, prompt=50, output=10, stream=i % 3 == 1, n=1)


def refusals(gateway: Gateway, limit: str, scope: str) -> float:
    """That the gateway has counted of limits of this name and scope."""
    text = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics", timeout=10).text
    wanted = {"limit": limit, "scope": scope}
    families = text_string_to_metric_families(text)
    samples = [each for family in families for each in family.samples]
    return sum(each.value for each in samples if each.name.endswith("limit_refusals_total") and each.labels == wanted)


async def test_after_refusals_for_want_of_a_slot_one_refill_is_enough(
    pair: SharedCluster, office: LimitOffice, caller: Caller
) -> None:
    """One request in two seconds and one slot. A runs; ten times B is refused; A ends. C is taken as soon as A's own
    request is refilled, and two requests are counted in all.

    What breaks it: were each refusal one request, C would have to wait for twenty seconds."""
    refill_s = 2.0
    rate = Held("key", RequestRate(amount=30, period="minute", burst=1))
    customer = await office.customer(rate, Held("key", Concurrency(amount=1)))
    one, other = (gateway.url for gateway in pair.gateways)
    async with caller.running(one, customer.key, output=100) as a:
        b = [await caller.ask([one, other][i % 2], customer.key) for i in range(NUM_REFUSED)]
        assert not a.answer.is_over
        await a.end()

    async def c() -> Answer:
        answer = await caller.ask(other, customer.key)
        if not answer.is_taken:  # as clients do that go by what they are told
            assert int(answer.headers["retry-after-ms"]) <= refill_s * 1000
            await asyncio.sleep(int(answer.headers["retry-after-ms"]) / 1000)
        return answer

    tries = await caller.ask_until(lambda answer: answer.is_taken, c)

    assert {answer.status for answer in b} == {429}
    assert {answer.code for answer in b} <= {"concurrency_limit_exceeded", "rate_limit_exceeded"}
    assert tries[-1].decided_s - a.answer.sent_s == pytest.approx(refill_s, abs=0.4), what_happened(tries)
    assert len(await office.settled(customer, 2)) == 2
    assert time.monotonic() - a.answer.sent_s < 2 * refill_s
