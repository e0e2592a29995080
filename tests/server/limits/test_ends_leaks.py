"""However requests end, a hundred of them and several at once, none of them leaves a slot or a reservation behind."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cluster import MODEL, SharedCluster
from endings import Ending, Plot
from evenhand_process import wait_until
from kill_kit import LEASE_S
from limit_books import balanced, store_books
from limit_kit import Customer, Held, LimitOffice, begun, eventually, standings
from raw_client import RawClient, is_ready, post, raw_client

from gateway.domain.limits.policy import Concurrency, ContextSize, QuotaRule, RequestRate, Scope, TokenRate

pytestmark = pytest.mark.slow

NUM_ENDS = 100
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FOREVER = 3000
"""More tokens than any request gets to."""
REST = (
    Held("organization", QuotaRule(unit="tokens", period="month", amount=50_000_000)),
    Held("organization", RequestRate(amount=1_000_000, period="minute")),
    Held("team", QuotaRule(unit="tokens", period="day", amount=1_000, is_hard=False)),
    Held("team", TokenRate(amount=100_000_000, period="minute")),
    Held("key", QuotaRule(unit="microusd", period="week", amount=500_000_000)),
    Held("key", ContextSize(amount=4_000)),
)


class Guest:
    """A client with bad manners.

    Attributes:
        came_to: what its requests came to, for messages.
    """

    def __init__(self, cluster: SharedCluster, customer: Customer, rng: random.Random) -> None:
        self.cluster = cluster
        self.customer = customer
        self.rng = rng
        self.came_to: Counter[str] = Counter()

    def body(self, *, after: int = 0, ending: Ending = Ending.CAP, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "prompt": "Go on.", "max_tokens": FOREVER, "seed": Plot(ending, after).seed, **fields}

    def request(self, body: Any, headers: dict[str, str] | None = None) -> bytes:
        if isinstance(body, dict) and self.rng.random() < 0.5:
            messages = [{"role": "user", "content": body["prompt"]}]
            return post(CHAT, self.customer.key, {**body, "messages": messages}, headers)
        return post(TEXT, self.customer.key, body, headers)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[RawClient]:
        """To a gateway that says it is ready."""
        urls = [gateway.url for gateway in self.cluster.gateways]
        ready: list[str] = []

        async def is_any_ready() -> bool:
            nonlocal ready
            ready = [url for url in self.rng.sample(urls, len(urls)) if await is_ready(url)]
            return bool(ready)

        await eventually(is_any_ready, "a gateway is ready")
        async with raw_client(ready[0]) as client:
            yield client

    @asynccontextmanager
    async def streaming(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> AsyncIterator[RawClient]:
        """A stream whose headers came. Asked for until there is a slot, since one that was left is free a little later:
        if none ever is, that is what the test is for."""
        request = self.request({**body, "stream": True}, headers)
        while True:
            async with self.connected() as client:
                client.write(request)
                status, answered = await client.read_head()
                if status == 200:
                    self.came_to["admitted"] += 1
                    yield client
                    return
                self.came_to[f"{status}"] += 1
                assert status in (429, 503), answered

    async def whole(self, body: Any, headers: dict[str, str] | None = None) -> None:
        """Send it and read what comes."""
        async with self.connected() as client:
            client.write(self.request(body, headers))
            answer = await client.read()
            self.came_to[f"{answer.status}" if answer.status == 200 else f"{answer.status} {answer.code}"] += 1


async def read_texts(client: RawClient, num: int) -> None:
    found = 0
    while found < num:
        chunk = await client.read_chunk()
        if not chunk:
            return
        found += chunk.count(b'"content":"') + chunk.count(b'"text":"')


async def breaks_off_in_its_body(guest: Guest) -> None:
    request = guest.request(guest.body())
    async with guest.connected() as client:
        client.write(request[: guest.rng.randint(len(request) - 50, len(request) - 1)])


async def leaves_at_once(guest: Guest) -> None:
    async with guest.connected() as client:
        client.write(guest.request(guest.body(stream=guest.rng.random() < 0.5)))
        for _ in range(guest.rng.randint(0, 30)):
            await asyncio.sleep(0)
        client.close(by_reset=guest.rng.random() < 0.5)


async def leaves_before_the_first_text(guest: Guest) -> None:
    async with guest.streaming(guest.body(ending=Ending.STALL)):
        pass


async def leaves_in_the_middle(guest: Guest) -> None:
    async with guest.streaming(guest.body(n=guest.rng.choice([1, 1, 3]))) as client:
        await read_texts(client, guest.rng.randint(1, 12))
        client.close(by_reset=guest.rng.random() < 0.5)


async def leaves_while_a_whole_answer_is_made(guest: Guest) -> None:
    before = set(store_books(guest.cluster, guest.customer).requests)
    async with guest.connected() as client:
        client.write(guest.request(guest.body(ending=Ending.STALL, after=5)))
        reading = asyncio.ensure_future(client.read())

        async def is_there() -> bool:
            requests = await asyncio.to_thread(store_books, guest.cluster, guest.customer)
            return reading.done() or not before >= set(requests.requests)

        await eventually(is_there, "it runs, or is refused")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def fails_in_the_engine(guest: Guest) -> None:
    body = guest.body(ending=Ending.FAIL, after=guest.rng.randint(0, 9))
    if guest.rng.random() < 0.5:
        await guest.whole(body)
        return
    async with guest.streaming(body) as client:
        await read_texts(client, FOREVER)


async def is_rejected_by_the_engine(guest: Guest) -> None:
    await guest.whole(guest.body(ending=Ending.REJECT, stream=guest.rng.random() < 0.5))


async def misses_its_deadline(guest: Guest) -> None:
    headers = {"x-evenhand-deadline-ms": str(guest.rng.randint(1, 80))}
    body = guest.body(ending=Ending.STALL, after=guest.rng.randint(0, 9))
    if guest.rng.random() < 0.5:
        await guest.whole(body, headers)
        return
    async with guest.streaming(body, headers) as client:
        await read_texts(client, FOREVER)


async def says_nothing_that_is_json(guest: Guest) -> None:
    await guest.whole(b'{"model": "' + MODEL.encode() + b'", "prompt": ')


async def asks_for_an_unknown_model(guest: Guest) -> None:
    await guest.whole(guest.body(model="nobody"))


async def sends_too_much(guest: Guest) -> None:
    await guest.whole(guest.body(prompt="word " * guest.rng.choice([5_000, 50_000])))


async def has_no_key(guest: Guest) -> None:
    async with guest.connected() as client:
        client.write(post(TEXT, "nonsense", guest.body()))
        assert (await client.read()).status in (401, 429), "or it was tried too often"


async def stops_at_a_string(guest: Guest) -> None:
    await guest.whole(guest.body(stop=["e", "a", "t"], n=guest.rng.choice([1, 4]), stream=guest.rng.random() < 0.5))


async def comes_to_its_end(guest: Guest) -> None:
    await guest.whole(guest.body(ending=Ending.STOP, after=guest.rng.randint(1, 20), stream=guest.rng.random() < 0.5))


ENDS: list[Callable[[Guest], Awaitable[None]]] = [
    breaks_off_in_its_body,
    leaves_at_once,
    leaves_before_the_first_text,
    leaves_in_the_middle,
    leaves_while_a_whole_answer_is_made,
    fails_in_the_engine,
    is_rejected_by_the_engine,
    misses_its_deadline,
    says_nothing_that_is_json,
    asks_for_an_unknown_model,
    sends_too_much,
    has_no_key,
    stops_at_a_string,
    comes_to_its_end,
]


def kill_engine(cluster: SharedCluster) -> None:
    cluster.engine.kill()
    cluster.engine.start()


def kill_gateway(cluster: SharedCluster) -> None:
    cluster.gateways[0].kill()
    cluster.gateways[0].start()


def end_gateway(cluster: SharedCluster) -> None:
    gateway = cluster.gateways[1]
    gateway.send(signal.SIGTERM)
    assert gateway.wait() == 0, gateway.log
    gateway.start()


CASES: dict[str, tuple[Scope, int, Callable[[SharedCluster], None] | None]] = {
    "two slots of a key": ("key", 2, None),
    "two slots of a team, and the engine dies": ("team", 2, kill_engine),
    "two slots of an organization, and a gateway dies": ("organization", 2, kill_gateway),
    "two slots of a key, and a gateway is restarted": ("key", 2, end_gateway),
    "forty slots of a team, and a gateway dies": ("team", 40, kill_gateway),
}


@pytest.mark.parametrize("case", CASES)
async def test_nothing_is_left_of_a_hundred_bad_ends(ends: SharedCluster, ends_office: LimitOffice, case: str) -> None:
    """What breaks it: any end that is not followed by a settlement (a slot is never free again, and soon nobody gets
    one), one that is followed by two (the count goes below what runs, and a third gets a slot), or a process that dies
    with what it holds."""
    scope, num_slots, kill = CASES[case]
    rng = random.Random(case)
    slots = Held(scope, Concurrency(amount=num_slots))
    customer = await ends_office.customer(slots, *REST)
    await begun(ends, customer)
    todo = [end for end, _ in zip(itertools.cycle(ENDS), range(NUM_ENDS + num_slots), strict=False)]
    rng.shuffle(todo)
    guests = [Guest(ends, customer, random.Random(f"{case} {i}")) for i in range(num_slots)]

    async def visit(guest: Guest) -> None:
        while todo:
            end = todo.pop()
            try:
                await end(guest)
            except (ConnectionError, asyncio.IncompleteReadError):
                guest.came_to[f"{end.__name__}: cut"] += 1  # its gateway died

    async def is_time() -> bool:
        return len(todo) < NUM_ENDS / 2 and bool(store_books(ends, customer).requests)

    async with asyncio.timeout(90), asyncio.TaskGroup() as group:
        for guest in guests:
            group.create_task(visit(guest))
        if kill is not None:
            await eventually(is_time, "half of them have come, and some run", 60)
            await asyncio.to_thread(kill, ends)
    for gateway in ends.gateways:
        await asyncio.to_thread(gateway.wait_ready)
    await asyncio.to_thread(wait_until, lambda: all(gateway.is_ready() for gateway in ends.gateways))

    books = await balanced(ends, ends_office, customer, LEASE_S + 2)
    came_to = sum((guest.came_to for guest in guests), Counter())
    assert came_to["admitted"] > NUM_ENDS / 10, came_to
    assert books.is_idle
    for gateway in ends.gateways:
        assert (await standings(gateway.url, customer.key)).left("concurrent", scope) == num_slots
    if num_slots == 2:
        await all_slots_can_be_used(ends, customer, slots)


async def all_slots_can_be_used(ends: SharedCluster, customer: Customer, slots: Held) -> None:
    """At once, and not one more."""
    assert isinstance(slots.rule, Concurrency)
    guest = Guest(ends, customer, random.Random(1))
    body = guest.body(ending=Ending.STALL, after=1)
    async with guest.streaming(body) as first, guest.streaming(body) as second:
        await read_texts(first, 1)
        await read_texts(second, 1)
        async with guest.connected() as client:
            client.write(guest.request(body))
            refused = await client.read()
    assert (refused.status, refused.code) == (429, "concurrency_limit_exceeded")
    assert guest.came_to == {"admitted": 2}
