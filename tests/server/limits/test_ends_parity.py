"""Whether an answer is streamed, and whether its client asks for the usage, changes nothing of what it is charged; and
its limits are settled before its last byte."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from cluster import MODEL, SharedCluster
from endings import Ending, Plot
from limit_kit import Customer, Held, LimitOffice, begun, standings
from raw_client import RawAnswer, post, raw_client

from gateway.domain.ledger import LedgerRow
from gateway.domain.limits.policy import Concurrency, QuotaRule, RequestRate, TokenRate

pytestmark = pytest.mark.slow

PROMPT = "Tell me something about ledgers, and be brief."
TOKEN = 1000
PROMPT_COST, CACHED_COST, OUTPUT_COST = 1_000_000, 500_000, 3_000_000
"""Micro-USD for a million tokens, as `ends` sells them."""
RATE = TokenRate(amount=1, period="day", burst=10_000_000, prompt_percent=100, cached_percent=20, output_percent=250)
TREE = (
    Held("organization", QuotaRule(unit="tokens", period="month", amount=10_000_000)),
    Held("organization", Concurrency(amount=1)),
    Held("team", QuotaRule(unit="tokens", period="week", amount=1_000_000, is_hard=False)),
    Held("team", RATE),
    Held("team", Concurrency(amount=1)),
    Held("key", QuotaRule(unit="microusd", period="day", amount=10_000_000), MODEL),
    Held("key", RequestRate(amount=1, period="day", burst=100_000)),
    Held("key", Concurrency(amount=1)),
)
"""Hardly anything is refilled while a test looks."""

ENDS: dict[str, dict[str, Any]] = {
    "at its cap": {"max_tokens": 23},
    "by itself": {"max_tokens": 400, "seed": Plot(Ending.STOP, 9).seed},
    "with a part found in the cache": {"max_tokens": 400, "seed": Plot(Ending.STOP, 11, cached=13).seed},
    "with several answers": {"max_tokens": 7, "n": 3},
    "at a stop string": {"max_tokens": 400, "stop": "a later word"},
    "with a failure of the engine": {"max_tokens": 400, "seed": Plot(Ending.FAIL, 6).seed},
    "at its deadline": {"max_tokens": 400, "seed": Plot(Ending.STALL, 5).seed},
}
PARTIAL = {"with a failure of the engine", "at its deadline"}
DEADLINE = {"x-evenhand-deadline-ms": "150"}

Drops = Mapping[tuple[str, str], int]


class Seen(NamedTuple):
    """What one request came to.

    Attributes:
        usage: as its client was told, if it was.
        drops: of each limit: how much less is left at once after its last byte.
    """

    request_id: str
    usage: Mapping[str, Any] | None
    drops: Drops
    text: str


class Way(NamedTuple):
    """One to ask in.

    Attributes:
        include_usage: what is said of it; None says nothing.
    """

    endpoint: str
    stream: bool
    include_usage: bool | None = None
    by_openai: bool = False

    @property
    def tells_usage(self) -> bool:
        return not self.stream or self.include_usage is True

    @property
    def fields(self) -> dict[str, Any]:
        options = {} if self.include_usage is None else {"stream_options": {"include_usage": self.include_usage}}
        return {"stream": self.stream, **options}


WAYS = [
    Way(endpoint, stream, include_usage, by_openai)
    for endpoint in ("chat", "completions")
    for stream, include_usage in ((False, None), (True, None), (True, False), (True, True))
    for by_openai in (False, True)
]


@pytest.mark.parametrize("end", ENDS)
async def test_no_way_to_ask_changes_what_is_charged(ends: SharedCluster, ends_office: LimitOffice, end: str) -> None:
    """What breaks it: usage that only a client's wish makes known, a stream that is settled for nothing or by another
    count, a settlement behind the last byte (the next look would not see it), costs that are counted for each chunk."""
    customer = await ends_office.customer(*TREE)
    await begun(ends, customer)
    fields = dict(ENDS[end])
    first = await ask(ends, customer, Way("chat", stream=False), {"max_tokens": 40}, num_prompt=0)
    assert first.usage is not None
    if "stop" in fields:
        fields["stop"] = first.text[len(first.text) // 2 :][:3]
    seen = {way: await ask(ends, customer, way, fields, num_prompt=first.usage["prompt_tokens"]) for way in WAYS}

    rows = {row.request_id: row for row in await ends_office.settled(customer, 1 + len(WAYS))}
    charges = {way: common(rows[each.request_id]) for way, each in seen.items()}
    assert len({each.request_id for each in seen.values()}) == len(WAYS)
    for way, each in seen.items():
        row = rows[each.request_id]
        assert (row.endpoint, row.stream) == (way.endpoint, way.stream)
        assert charges[way] == charges[WAYS[0]], way
        assert each.drops == drops_of(row), way
        assert (each.usage is not None) == (way.tells_usage and end not in PARTIAL), way
        if each.usage is not None:
            assert counts_of(each.usage) == (row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    assert row.completion_tokens == {"at its cap": 23, "by itself": 9, "with several answers": 21}.get(
        end, row.completion_tokens
    )
    assert row.prompt_tokens == first.usage["prompt_tokens"]
    assert row.completion_tokens > 0


def common(row: LedgerRow) -> dict[str, Any]:
    names = ("organization_id", "team_id", "key_id", "model", "request_class", "outcome", "finish_reason", "error_code",
             "prompt_tokens", "cached_tokens", "completion_tokens", "cost_microusd", "charges")  # fmt: skip
    return {name: getattr(row, name) for name in names}


def counts_of(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return usage["prompt_tokens"], cached, usage["completion_tokens"]


def drops_of(row: LedgerRow) -> Drops:
    """By the rules that were set, worked out anew."""
    prompt, cached, output = row.prompt_tokens, row.cached_tokens, row.completion_tokens
    weighted = (prompt - cached) * 100 + cached * 20 + output * 250
    cost = -(-((prompt - cached) * PROMPT_COST + cached * CACHED_COST + output * OUTPUT_COST) // 1_000_000)
    assert row.cost_microusd == cost
    return {
        ("organization", "quota-tokens/month"): prompt + output,
        ("organization", "concurrent"): 0,
        ("team", "quota-tokens/week"): prompt + output,
        ("team", "tokens/day"): -(-weighted // 100),
        ("team", "concurrent"): 0,
        ("key", "quota-microusd/day"): cost,
        ("key", "requests/day"): 1,
        ("key", "concurrent"): 0,
    }


async def ask(ends: SharedCluster, customer: Customer, way: Way, fields: Mapping[str, Any], *, num_prompt: int) -> Seen:
    """Ask at one gateway, and look at the other one what is left, right before and at once after."""
    at, beside = ends.gateways
    before = await standings(beside.url, customer.key)
    body: dict[str, Any] = {"model": MODEL, **fields, **way.fields}
    if way.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        body["prompt"] = [TOKEN] * num_prompt
    headers = DEADLINE if fields.get("seed") == ENDS["at its deadline"]["seed"] else {}
    send = by_openai if way.by_openai else by_httpx
    request_id, usage, text = await send(at.url, customer.key, way, body, headers)
    after = await standings(beside.url, customer.key)
    drops = {
        (old["scope"], old["name"]): old["remaining"] - new["remaining"]
        for old, new in zip(before.limits, after.limits, strict=True)
    }
    return Seen(request_id, usage, drops, text)


async def by_httpx(
    url: str, key: str, way: Way, body: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[str, Mapping[str, Any] | None, str]:
    path = "/v1/chat/completions" if way.endpoint == "chat" else "/v1/completions"
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        answer = await client.post(path, json=body, headers={"authorization": f"Bearer {key}", **headers})
    if way.stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        events = [answer.json()]
    usages = [event["usage"] for event in events if event.get("usage")]
    assert len(usages) <= 1
    texts = [text_of(choice) for event in events for choice in event.get("choices", ())]
    return answer.headers["x-request-id"], usages[0] if usages else None, "".join(texts)


def text_of(choice: Mapping[str, Any]) -> str:
    found = choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content")
    return found or ""


async def by_openai(
    url: str, key: str, way: Way, body: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[str, Mapping[str, Any] | None, str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30) as client:
        api: Any = client.chat.completions if way.endpoint == "chat" else client.completions
        usage = None
        try:
            raw = await api.with_raw_response.create(**body, extra_headers=headers)
        except openai.APIStatusError as e:
            return e.response.headers["x-request-id"], None, ""
        request_id = raw.headers["x-request-id"]
        parsed = raw.parse()
        try:
            if way.stream:
                async for event in parsed:
                    usage = event.usage or usage
            else:
                usage = parsed.usage
        except openai.APIError:
            pass  # the stream says what went wrong
    return request_id, None if usage is None else usage.model_dump(), ""


Loop = Callable[[SharedCluster, list[bytes]], Awaitable[list[RawAnswer]]]


async def on_one_connection(ends: SharedCluster, requests: list[bytes]) -> list[RawAnswer]:
    async with raw_client(ends.gateways[0].url) as client:
        answers = []
        for request in requests:
            client.write(request)
            answers.append(await client.read())
    return answers


async def pipelined(ends: SharedCluster, requests: list[bytes]) -> list[RawAnswer]:
    """All requests are written before the first answer is read: the server has the next one when it ends one."""
    async with raw_client(ends.gateways[0].url) as client:
        for request in requests:
            client.write(request)
        return [await client.read() for _ in requests]


async def by_turns_at_two_gateways(ends: SharedCluster, requests: list[bytes]) -> list[RawAnswer]:
    async with raw_client(ends.gateways[0].url) as one, raw_client(ends.gateways[1].url) as other:
        answers = []
        for client, request in zip(itertools.cycle((one, other)), requests, strict=False):
            client.write(request)
            answers.append(await client.read())
    return answers


@pytest.mark.parametrize("loop", [on_one_connection, pipelined, by_turns_at_two_gateways])
@pytest.mark.parametrize("kind", ["whole", "stream", "mixed"])
async def test_the_slot_is_free_before_the_next_request_can_come(
    ends: SharedCluster, ends_office: LimitOffice, kind: str, loop: Loop
) -> None:
    """What breaks it: a slot that is given back when the answer's task ends, or a log line is written, which is after
    its last byte. It is also looked at that a slot is needed at all: a second request is refused while one runs."""
    customer = await ends_office.customer(*TREE)
    await begun(ends, customer)
    kinds = {"whole": [False], "stream": [True], "mixed": [True, False, False, True, True]}[kind]
    requests = [
        post(
            "/v1/chat/completions" if number % 3 else "/v1/completions",
            customer.key,
            {
                "model": MODEL,
                **({"messages": [{"role": "user", "content": "Hi"}]} if number % 3 else {"prompt": "Hi"}),
                "max_tokens": 1 + number % 3,
                "stream": kinds[number % len(kinds)],
            },
        )
        for number in range(200)
    ]

    async with asyncio.timeout(60):
        answers = await loop(ends, requests)

    assert [answer.status for answer in answers] == [200] * len(requests)
    await a_slot_is_needed(ends, customer)


async def a_slot_is_needed(ends: SharedCluster, customer: Customer) -> None:
    body = {"model": MODEL, "prompt": "Hi", "stream": True, "seed": Plot(Ending.STALL, 3).seed}
    request = post("/v1/completions", customer.key, body)
    async with raw_client(ends.gateways[0].url) as running, raw_client(ends.gateways[1].url) as other:
        running.write(request)
        assert (await running.read_head())[0] == 200
        while b"text" not in await running.read_chunk():
            pass
        other.write(request)
        refused = await other.read()
    assert (refused.status, refused.code) == (429, "concurrency_limit_exceeded")
