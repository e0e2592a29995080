"""A limit is the same limit wherever a request comes in: not one for each gateway, nor for each worker."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import pytest
from cluster import MODEL, SharedCluster
from limit_kit import Customer, Held, LimitOffice, standings
from limit_load import Answer, Caller, taken, what_happened

from gateway.domain.limits.policy import Concurrency, RequestRate, TokenRate

pytestmark = pytest.mark.slow

SECONDS = 3.0
TOKENS = 50
"""Of each request, prompt and output."""


class Shared(NamedTuple):
    """A limit, and how many requests of `TOKENS` tokens it takes: at once and a second."""

    held: Held
    burst: int
    rate_s: float

    def most(self, answers: Sequence[Answer]) -> float:
        """What it can have taken of these at the very most."""
        first, last = answers[0].sent_s, max(answer.decided_s for answer in answers)
        return self.burst + self.rate_s * (last - first)

    def least(self, answers: Sequence[Answer]) -> float:
        """And at least, if there was always one that asked; less by what a gap between two may cost."""
        return self.burst + self.rate_s * (answers[-1].sent_s - answers[0].decided_s) - 1


SHARED = {
    "a key's requests a minute": Shared(Held("key", RequestRate(amount=60, period="minute", burst=10)), 10, 1),
    "a team's requests a second": Shared(Held("team", RequestRate(amount=7, period="second", burst=3)), 3, 7),
    "an organization's requests an hour": Shared(
        Held("organization", RequestRate(amount=7200, period="hour", burst=20)), 20, 2
    ),
    "a key's tokens a minute": Shared(
        Held("key", TokenRate(amount=9_000, period="minute", burst=500, is_strict=True)), 10, 3
    ),
    "an organization's tokens a second of one model": Shared(
        Held("organization", TokenRate(amount=200, period="second", burst=600), MODEL), 12, 4
    ),
}


@pytest.fixture(scope="module")
def alias(pair: SharedCluster) -> Iterator[str]:
    """Another name of the model, which counts for the model's own limits."""
    pair.command("alias", "create", "fast-model", "--model", MODEL)
    yield "fast-model"
    pair.command("alias", "remove", "fast-model")


@pytest.mark.parametrize("name", SHARED)
async def test_both_gateways_take_no_more_than_one_would(
    pair: SharedCluster, office: LimitOffice, caller: Caller, alias: str, name: str
) -> None:
    """30 a second over both, from all keys that the limit holds for, some by an alias of the model.

    What breaks it: with a limit in each process its burst is taken twice, which is 3 to 20 requests too many."""
    shared = SHARED[name]
    customer = await office.customer(shared.held)
    senders = [customer]
    if shared.held.scope != "key":
        senders.append(await office.colleague(customer))
    if shared.held.scope == "organization":
        senders.append(await office.colleague(customer, same_team=False))
    turns = itertools.cycle(senders)

    answers = await caller.ask_steadily(
        30,
        SECONDS,
        lambda i: caller.ask(
            pair.gateways[i % 2].url,
            next(turns).key,
            model=alias if i % 4 == 3 else MODEL,
            prompt=20,
            output=TOKENS - 20,
            stream=i % 5 == 0,
        ),
    )

    check_rate(shared, answers)
    for each in taken(answers):
        kind = "tokens" if isinstance(shared.held.rule, TokenRate) else "requests"
        assert int(each.headers[f"x-ratelimit-limit-{kind}"]) == shared.held.rule.capacity  # type: ignore[union-attr]


def check_rate(shared: Shared, answers: Sequence[Answer]) -> None:
    num_taken = len(taken(answers))
    assert num_taken <= math.floor(shared.most(answers)), what_happened(answers)
    assert num_taken >= math.floor(shared.least(answers)), what_happened(answers)
    assert {answer.code for answer in answers} == {None, "rate_limit_exceeded"}


@pytest.mark.parametrize("scope", ["organization", "team", "key"])
async def test_slots_are_the_same_ones_at_both(
    pair: SharedCluster, office: LimitOffice, caller: Caller, scope: str
) -> None:
    """Five slots, twelve long streams at once over both: five run. As each of them ends, one more is taken."""
    held = Held(scope, Concurrency(amount=5))  # type: ignore[arg-type]
    customer = await office.customer(held)
    urls = [gateway.url for gateway in pair.gateways]
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(caller.running(urls[i % 2], customer.key, output=3_000)) for i in range(5)
        ]
        refused = await caller.ask_all(caller.ask(urls[i % 2], customer.key) for i in range(12))
        assert {answer.code for answer in refused} == {"concurrency_limit_exceeded"}
        for i, each in enumerate(running):
            await each.leave()
            tries = await caller.ask_until(
                lambda answer: answer.is_taken, lambda url=urls[i % 2]: caller.ask(url, customer.key)
            )
            assert tries[-1].decided_s - tries[0].sent_s < 1
            assert not any(later.answer.is_over for later in running[i + 1 :])
    assert await left(urls, customer, held) == [5, 5]


async def left(urls: Sequence[str], customer: Customer, held: Held) -> list[int]:
    return [(await standings(url, customer.key)).left(held.rule.name, held.scope, held.model) for url in urls]
