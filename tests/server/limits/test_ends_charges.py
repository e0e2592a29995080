"""A client that leaves is charged for what ran: nothing while its request waits, what was computed of its prompt, its
prompt and what was written; at once, and what was reserved beyond can be used by the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import FAIR_ENGINE, MODEL, SharedCluster, running_cluster
from limit_books import balanced, store_books
from limit_kit import Customer, Held, LimitOffice, begun, eventually, limit_office, standings
from limit_load import calling
from raw_client import RawClient, post, raw_client

from gateway.domain.ledger import LedgerRow
from gateway.domain.limits.policy import Concurrency, QuotaRule, RequestRate, TokenRate

pytestmark = pytest.mark.slow

NUM_SLOTS = 2
"""Of the engine."""
LEASE_S = 3
READ = 37
WANTED = 4_000
FEW = 30
"""Tokens that a choice may get before the engine hears that its client has left: 0.16 s."""
SOON_S = 2.0
TOKEN = 1000
AMOUNT = 12_000
QUOTA_AT = ("organization", "quota-tokens/month")
TREE = (
    Held("organization", QuotaRule(unit="tokens", period="month", amount=AMOUNT)),
    Held("team", QuotaRule(unit="tokens", period="day", amount=100, is_hard=False)),
    Held("team", TokenRate(amount=1, period="day", burst=1_000_000)),
    Held("key", QuotaRule(unit="microusd", period="week", amount=1_000_000)),
    Held("key", RequestRate(amount=1, period="day", burst=1_000)),
    Held("key", Concurrency(amount=100)),
)


@pytest.fixture(scope="module")
def fair(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[SharedCluster]:
    """The real core of the engine, which queues, and computes prompts in parts."""
    folder, models = tmp_path_factory.mktemp("fair"), smollm2_path.parents[1]
    with running_cluster(
        folder,
        models,
        free_port,
        engine=(FAIR_ENGINE, str(NUM_SLOTS)),
        settings={"EVENHAND_LIMITS__LEASE_S": str(LEASE_S)},
    ) as cluster:
        cluster.command("price", "set", MODEL, "--prompt", "1", "--completion", "3")
        yield cluster


@pytest.fixture
async def office(fair: SharedCluster) -> AsyncIterator[LimitOffice]:
    async with limit_office(fair) as office:
        yield office


def body(num_prompt: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [TOKEN] * num_prompt, "max_tokens": WANTED, **fields}


async def begin(client: RawClient, customer: Customer, wanted: dict[str, Any]) -> str:
    """Send it as a stream and read the headers, which come as soon as it is admitted; its id."""
    client.write(post("/v1/completions", customer.key, {**wanted, "stream": True}))
    status, headers = await client.read_head()
    assert status == 200
    return headers["x-request-id"]


async def read_texts(client: RawClient, num: int) -> None:
    found = 0
    while found < num:
        found += (await client.read_chunk()).count(b'"text":"')


async def standing(
    fair: SharedCluster, customer: Customer, request_id: str, is_as_wanted: Callable[[dict[str, Any]], bool], what: str
) -> None:
    """Wait until the request stands so in the engine."""
    headers = {"authorization": f"Bearer {customer.key}"}
    async with httpx.AsyncClient(base_url=fair.gateways[1].url, headers=headers, timeout=10) as client:

        async def is_so() -> bool:
            answer = await client.get(f"/v1/requests/{request_id}")
            return answer.status_code == 200 and is_as_wanted(answer.json())

        await eventually(is_so, what)


def is_queued(told: dict[str, Any]) -> bool:
    return bool(told["status"] == "queued")


def is_in_prefill(told: dict[str, Any]) -> bool:
    """In the middle of it: the whole takes two seconds."""
    return told["status"] == "running" and told["timings"]["prefill_us"] > 300_000


async def row_of(office: LimitOffice, customer: Customer, request_id: str) -> LedgerRow:
    """As soon as it is there."""
    found: list[LedgerRow] = []

    async def is_there() -> bool:
        found[:] = [row for row in await office.rows(customer) if row.request_id == request_id]
        return bool(found)

    await eventually(is_there, f"a row of {request_id}")
    return found[0]


async def left(fair: SharedCluster, customer: Customer) -> dict[tuple[str, str], int]:
    """By the gateway that the tests do not send their requests to."""
    seen = await standings(fair.gateways[1].url, customer.key)
    return {(each["scope"], each["name"]): each["remaining"] for each in seen.limits}


def charges_of_tokens(prompt: int, output: int, *, requests: int = 1) -> dict[tuple[str, str], int]:
    """What is less of each limit for a request, worked out anew."""
    return {
        QUOTA_AT: prompt + output,
        ("team", "quota-tokens/day"): prompt + output,
        ("team", "tokens/day"): prompt + output,
        ("key", "quota-microusd/week"): prompt + 3 * output,
        ("key", "requests/day"): requests,
        ("key", "concurrent"): 0,
    }


async def check_what_is_left(
    fair: SharedCluster, customer: Customer, before: dict[tuple[str, str], int], row: LedgerRow, *, requests: int = 1
) -> None:
    drops = charges_of_tokens(row.prompt_tokens, row.completion_tokens, requests=requests)

    async def is_so() -> bool:
        return {limit: before[limit] - units for limit, units in drops.items()} == await left(fair, customer)

    await eventually(is_so, f"{drops} less is left", SOON_S)
    charged = {charge.key.partition(":")[0]: charge.units for charge in row.charges}
    assert charged == {name: units for (_, name), units in drops.items() if name.startswith("quota")}


@pytest.mark.parametrize("by_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("n", [1, 2])
async def test_after_37_of_4000_tokens(fair: SharedCluster, office: LimitOffice, n: int, by_reset: bool) -> None:
    """What breaks it: no row for whom nobody told of an end, a full refund, the whole reservation as a charge, or an
    engine that goes on; and were what is left not free at once, the next could not have it to the token."""
    customer = await office.customer(*TREE)
    await begun(fair, customer)
    before = await left(fair, customer)
    async with raw_client(fair.gateways[0].url) as client:
        request_id = await begin(client, customer, body(30, n=n))
        reserved = charges_of_tokens(30, n * WANTED)
        assert (await left(fair, customer))[QUOTA_AT] == before[QUOTA_AT] - reserved[QUOTA_AT]
        await read_texts(client, READ * n)
        left_at_s = time.time()
        client.close(by_reset=by_reset)
    row = await row_of(office, customer, request_id)

    assert row.outcome == "client_gone"
    assert row.prompt_tokens == 30
    assert READ * n <= row.completion_tokens <= (READ + FEW) * n
    assert row.closed_at_ms / 1000 - left_at_s < SOON_S
    assert row.decode_us > 0, "the engine has confirmed its end, with its counts"
    await check_what_is_left(fair, customer, before, row)
    await the_rest_can_be_used_at_once(fair, customer)


async def the_rest_can_be_used_at_once(fair: SharedCluster, customer: Customer) -> None:
    """To the last token, which is nobody else's: not clamped, and then there is nothing left."""
    rest = (await left(fair, customer))[QUOTA_AT]
    num_prompt, num_output = rest - 6 * 5, 5
    prompts = [[TOKEN] * size for size in split(num_prompt, 6)]
    async with calling() as caller:
        fields = {"model": MODEL, "prompt": prompts, "max_tokens": num_output}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"{fair.gateways[1].url}/v1/completions",
                json=fields,
                headers={"authorization": f"Bearer {customer.key}"},
            )
        assert answer.status_code == 200, answer.text
        assert "x-evenhand-output-cap" not in answer.headers
        assert answer.json()["usage"]["total_tokens"] == rest
        refused = await caller.ask(fair.gateways[0].url, customer.key, prompt=1, output=1)
    assert (refused.status, refused.code) == (429, "insufficient_quota")


def split(total: int, num: int) -> list[int]:
    return [total // num + (i < total % num) for i in range(num)]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_while_it_waits(fair: SharedCluster, office: LimitOffice, stream: bool) -> None:
    """Nothing, not even the request of a request rate. What breaks it: a charge for the prompt when it is admitted."""
    customer = await office.customer(*TREE)
    await begun(fair, customer)
    async with AsyncExitStack() as stack:
        for _ in range(NUM_SLOTS):
            other = await stack.enter_async_context(raw_client(fair.gateways[0].url))
            await begin(other, customer, body(10))
            await read_texts(other, 1)
        before, known = await left(fair, customer), set(store_books(fair, customer).requests)
        async with raw_client(fair.gateways[0].url) as client:
            client.write(post("/v1/completions", customer.key, body(500, stream=stream)))

            async def is_held() -> bool:
                return len(store_books(fair, customer).requests) > len(known)

            await eventually(is_held, "it is admitted")
            [request_id] = set(store_books(fair, customer).requests) - known
            await standing(fair, customer, request_id, is_queued, "it is queued")
            assert before != await left(fair, customer), "it has reserved something"
        row = await row_of(office, customer, request_id)
        assert row.outcome == "client_gone"
        assert (row.prompt_tokens, row.completion_tokens, row.cost_microusd) == (0, 0, 0)
        assert {charge.units for charge in row.charges} == {0}
        await check_what_is_left(fair, customer, before, row, requests=0)
    await balanced(fair, office, customer)


@pytest.mark.parametrize("end", ["it leaves", "its deadline passes"])
async def test_during_prefill(fair: SharedCluster, office: LimitOffice, end: str) -> None:
    """As much of the prompt as was computed. What breaks it: a charge for nothing that was answered, or for all of a
    prompt of which half was computed."""
    customer = await office.customer(*TREE)
    await begun(fair, customer)
    before = await left(fair, customer)
    async with raw_client(fair.gateways[0].url) as client:
        if end == "it leaves":
            request_id = await begin(client, customer, body(6_000, max_tokens=100))
            await standing(fair, customer, request_id, is_in_prefill, "it is computed")
        else:
            wanted = post(
                "/v1/completions", customer.key, body(6_000, max_tokens=100), {"x-evenhand-deadline-ms": "900"}
            )
            client.write(wanted)
            answer = await client.read()
            assert answer.status == 408
            request_id = answer.headers["x-request-id"]
    row = await row_of(office, customer, request_id)

    assert row.outcome == {"it leaves": "client_gone", "its deadline passes": "deadline"}[end]
    assert 0 < row.prompt_tokens < 6_000
    assert row.completion_tokens == 0
    await check_what_is_left(fair, customer, before, row)
    await balanced(fair, office, customer)


async def test_one_after_the_other_to_the_last_token(fair: SharedCluster, office: LimitOffice) -> None:
    """Clients that leave at all times, many at once; then somebody uses what is left. What breaks it: any of them being
    charged for a token more or less than its row says."""
    customer = await office.customer(*TREE)
    await begun(fair, customer)

    async def visit(number: int) -> None:
        async with raw_client(fair.gateways[number % 2].url) as client:
            await begin(client, customer, body(20 + number, max_tokens=300))
            await read_texts(client, number % 4)

    await asyncio.gather(*(visit(number) for number in range(20)))
    await balanced(fair, office, customer)
    await the_rest_can_be_used_at_once(fair, customer)
