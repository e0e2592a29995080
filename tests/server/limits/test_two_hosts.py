"""Two hosts with two workers each, all as it is shipped, with the real model: they share their limits to the token."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
from databases import PostgresServer, RedisServer
from evenhand_process import EvenhandProcess
from examples import examples
from limit_kit import Customer, Held, LimitOffice, begun_at, office_at, standings
from limit_load import Caller, calling, taken, what_happened

from gateway.domain.credential import Peppers
from gateway.domain.limits.policy import QuotaRule, RequestRate

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_WORKERS = 2
RATE_S, SECONDS = 30, 10
BURST, REFILL_S = 10, 1


class Hosts(NamedTuple):
    urls: Sequence[str]
    houses: Sequence[EvenhandProcess]
    database_url: str
    redis_url: str
    peppers: Peppers

    @asynccontextmanager
    async def office(self) -> AsyncIterator[LimitOffice]:
        async with office_at(self.database_url, self.redis_url, self.peppers) as office:
            yield office


@pytest.fixture(scope="module")
def hosts(
    new_home: Callable[[], Path], free_port: Callable[[], int], postgres: PostgresServer, redis_server: RedisServer
) -> Iterator[Hosts]:
    pepper, database_url = secrets.token_hex(32), postgres.new_database()
    settings = {
        "EVENHAND_DATABASE__URL": database_url,
        "EVENHAND_REDIS__URL": redis_server.url,
        "EVENHAND_AUTH__PEPPERS": f"p1:{pepper}",
        "EVENHAND_SERVER__WORKERS": str(NUM_WORKERS),
        "EVENHAND_LIMITS__LEASE_S": "5",
    }
    houses = [EvenhandProcess(new_home(), free_port(), free_port(), settings) for _ in range(2)]
    try:
        for house in houses:
            house.wait_ready()
            house.children("gateway", NUM_WORKERS)
        peppers = Peppers({"p1": bytes.fromhex(pepper)})
        yield Hosts([house.url for house in houses], houses, database_url, redis_server.url, peppers)
        assert [house.stop() for house in houses] == [0, 0]
    finally:
        for house in houses:
            house.close()


@pytest.fixture
async def office(hosts: Hosts) -> AsyncIterator[LimitOffice]:
    async with hosts.office() as office:
        yield office


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    """Whose requests are spread over the workers of a host."""
    async with calling(new_connections=True) as caller:
        yield caller


async def test_four_workers_take_what_one_limit_allows(hosts: Hosts, office: LimitOffice, caller: Caller) -> None:
    """60 a minute with a burst of 10, and 300 requests in 10 seconds.

    What breaks it: four processes that count for themselves take 80."""
    customer = await office.customer(Held("key", RequestRate(amount=60, period="minute", burst=BURST)))

    answers = await caller.ask_steadily(
        RATE_S, SECONDS, lambda i: caller.ask(hosts.urls[i % 2], customer.key, prompt="Hi", output=1)
    )

    took_s = max(answer.decided_s for answer in answers) - answers[0].sent_s
    expected = BURST + math.floor(took_s * REFILL_S)
    assert abs(len(taken(answers)) - expected) <= 1, what_happened(answers)
    assert {answer.code for answer in answers} == {None, "rate_limit_exceeded"}
    assert took_s == pytest.approx(SECONDS, abs=1)


QUOTA = "quota-tokens/month"
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Say hello in Spanish.",
    "Count from one to five.",
    "Tell me a story about a fox.",
    "List ten animals, one per line.",
)
STOPS = (["e"], [".", "\n"], [" a", " the"], None)  # most answers have the first within a few words


@pytest.mark.parametrize("run", range(examples(1)))
async def test_what_answers_that_stop_early_give_back_is_usable_at_once(
    hosts: Hosts, office: LimitOffice, caller: Caller, run: int
) -> None:
    """Real answers end where the model ends them, or at a stop string. The quota is never exceeded, and the moment that
    the last answer is there, one request can have all that is left: it is not cut, and uses it up to the token."""
    amount = 1600
    customer = await office.customer(Held("team", QuotaRule(unit="tokens", period="month", amount=amount)))
    await begun_at(hosts.urls, customer)
    rng = random.Random(run)

    answers = await caller.ask_all(
        caller.ask(
            hosts.urls[i % 2],
            customer.key,
            prompt=rng.choice(QUESTIONS),
            output=rng.randint(20, 80),
            n=rng.choice([1, 1, 2]),
            stream=i % 3 == 0,
            stop=STOPS[i % len(STOPS)],
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
        )
        for i in range(16)
    )
    used = sum(answer.total for answer in answers)
    left = [(await standings(url, customer.key)).left(QUOTA, "team") for url in hosts.urls]
    n = 16
    prompt = 20 + (left[0] - 20) % n
    output = (left[0] - prompt) // n
    last = await caller.ask(hosts.urls[1], customer.key, prompt=prompt, output=output, n=n, ignore_eos=True)

    num_early = sum("stop" in answer.reasons.values() for answer in answers)
    assert num_early > 3, "answers were meant to stop early"
    assert {answer.code for answer in answers} <= {None, "insufficient_quota"}
    assert used <= amount
    assert left == [amount - used] * 2
    assert (last.total, last.is_clamped, set(last.reasons.values())) == (left[0], False, {"length"})
    rows = await office.settled(customer, len(taken(answers)) + 1)
    assert sum(row.prompt_tokens + row.completion_tokens for row in rows) == amount
    await check_official_client(hosts, customer)


async def check_official_client(hosts: Hosts, customer: Customer) -> None:
    """It raises what it has for this, and believes that trying again does not help."""
    for url in hosts.urls:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=customer.key, max_retries=3) as client:
            with pytest.raises(openai.RateLimitError) as raised:
                await client.completions.create(model="smollm2-135m-instruct", prompt="Hi", max_tokens=1)
        assert (raised.value.code, raised.value.type) == ("insufficient_quota",) * 2
        assert raised.value.response.headers["x-should-retry"] == "false"
        assert "x-stainless-retry-count" not in raised.value.request.headers or (
            raised.value.request.headers["x-stainless-retry-count"] == "0"
        )
