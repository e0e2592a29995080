"""Redis is there and does not answer: requests are decided all the same, in time, and all is right when it goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from cluster import Gateway, SharedCluster, running_cluster
from limit_kit import Customer, Held, LimitOffice, begun, eventually, limit_office, standings
from limit_load import Answer, Caller, taken, what_happened
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from gateway.domain.limits.policy import Concurrency, QuotaRule, RequestRate, TokenRate
from gateway.services.headroom import PATIENCE_S

LEASE_S = 5
"""Of all gateways here (`conftest`)."""

pytestmark = pytest.mark.slow

BOUND_S = 0.5
"""Redis has 150 ms to answer; the rest is for a busy machine. A request that waited for Redis would take `PAUSE_S`."""
PAUSE_S = 2.0
RATE_S = 60
HEALED_S = 1.5
"""Of Redis going on, until every request is decided as before: the breaker looks twice a second."""
PAUSES = ("SIGSTOP", "CLIENT PAUSE")


@asynccontextmanager
async def paused(cluster: SharedCluster, how: str) -> AsyncIterator[None]:
    """Redis answers nothing while the block runs, connections that are there and new ones alike."""
    if how == "SIGSTOP":
        cluster.redis.freeze()
        try:
            yield
        finally:
            cluster.redis.thaw()
        return
    async with Redis.from_url(cluster.redis.url) as redis:
        await redis.execute_command("CLIENT PAUSE", int(PAUSE_S * 1000), "ALL")
        yield
        await redis.ping()  # the end of the pause is its own


class Window(NamedTuple):
    """From when to when something was so, on the monotonic clock."""

    begin_s: float
    end_s: float

    def of(self, answers: Sequence[Answer]) -> list[Answer]:
        """Those that were sent and decided within."""
        return [each for each in answers if self.begin_s <= each.sent_s and each.decided_s <= self.end_s]


class Load(NamedTuple):
    """Requests of several customers in turn at both gateways, Redis being paused in the middle.

    Attributes:
        resumed_s: when it went on.
    """

    answers: Mapping[str, Sequence[Answer]]
    pause: Window
    resumed_s: float

    def healed(self, name: str) -> list[Answer]:
        """A customer's requests from when all must be as before."""
        return [each for each in self.answers[name] if each.sent_s > self.resumed_s + HEALED_S]


async def load_over_a_pause(
    cluster: SharedCluster,
    caller: Caller,
    customers: Mapping[str, Customer],
    how: str,
    within: Callable[[], object],
    *,
    before: int = 5,
) -> Load:
    """
    Args:
        before: requests of each customer before Redis pauses.
        within: waited for (in a thread) while Redis is paused.
    """
    names, sent = list(customers), {name: list[Answer]() for name in customers}
    stop = asyncio.Event()

    async def send() -> None:
        async with asyncio.TaskGroup() as group:
            begun_s, i = time.monotonic(), 0
            while not stop.is_set():
                await asyncio.sleep(max(0.0, begun_s + i / RATE_S - time.monotonic()))
                name, url = names[i % len(names)], cluster.gateways[i // len(names) % 2].url
                answer = Answer(url)
                sent[name].append(answer)
                asking = caller.ask(url, customers[name].key, output=5, stream=i % 5 == 0, answer=answer)
                group.create_task(asking)
                i += 1

    sending = asyncio.create_task(send())
    try:
        await decided(sent, before * len(names))
        begin_s = time.monotonic()
        async with paused(cluster, how):
            await asyncio.to_thread(within)
            await decided(sent, int(0.9 * PAUSE_S * RATE_S), since_s=begin_s)
            end_s = min(time.monotonic(), begin_s + PAUSE_S) if how == "CLIENT PAUSE" else time.monotonic()
        resumed_s = time.monotonic()
        await decided(sent, RATE_S, since_s=resumed_s + HEALED_S)
    finally:
        stop.set()
        await sending
    return Load(sent, Window(begin_s, end_s), resumed_s)


async def decided(sent: Mapping[str, Sequence[Answer]], num: int, since_s: float = 0.0) -> None:
    """Wait until so many of those that were sent since then have been decided."""

    async def are_so_many() -> bool:
        answers = [each for some in sent.values() for each in some if each.sent_s >= since_s]
        return sum(each.status > 0 for each in answers) >= num

    await eventually(are_so_many, f"{num} more decided")


def metric(gateway: Gateway, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics", timeout=10).text
    [value] = [s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return value


def readiness(gateway: Gateway) -> tuple[int, str, str]:
    answer = httpx.get(f"{gateway.url}/ready", timeout=10)
    return answer.status_code, answer.json()["status"], answer.json().get("reason", "")


def wait_for(cluster: SharedCluster, is_so: Callable[[Gateway], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for gateway in cluster.gateways:
        while not is_so(gateway):
            assert time.monotonic() < deadline, (gateway.name, readiness(gateway), metric(gateway, UP))
            time.sleep(0.02)


UP = "evenhand_limits_up"
DEGRADED = "x-evenhand-limits"


@pytest.mark.parametrize("how", PAUSES)
async def test_while_it_is_silent_what_is_limited_is_refused_in_time_and_nothing_is_lost(
    pair: SharedCluster, office: LimitOffice, caller: Caller, how: str
) -> None:
    """What breaks it: calls to Redis without a time-out of their own are decided after `PAUSE_S`; calls that Redis
    carries out when it goes on, though nobody waits for them any more, take from rates and keep slots."""
    limited = await office.customer(
        Held("organization", RequestRate(amount=1, period="day", burst=5_000)),
        Held("team", QuotaRule(unit="tokens", period="day", amount=100_000)),
        Held("key", Concurrency(amount=300)),
    )
    free = await office.customer()
    await begun(pair, limited)
    pids = [gateway.process.pid for gateway in pair.gateways if gateway.process is not None]
    async with caller.running(pair.gateways[0].url, limited.key, output=1_500) as lasting:

        def says_so() -> None:
            wait_for(pair, lambda gateway: readiness(gateway)[0] == 503, 2)

        load = await load_over_a_pause(pair, caller, {"limited": limited, "free": free}, how, says_so)
        assert not lasting.answer.error
        await lasting.end()

    answers = load.answers["limited"]
    assert max(each.took_s for some in load.answers.values() for each in some) < BOUND_S
    refused = load.pause.of(answers)
    assert {(each.status, each.code) for each in refused} == {(503, "limits_unavailable")}
    assert all(int(each.headers["retry-after"]) == 1 for each in refused)
    assert sorted(each.took_s for each in refused)[len(refused) // 2] < 0.1, "most need not wait for anything"
    assert {each.status for each in load.answers["free"]} == {200}, "whom no limit holds for has nothing to do with it"
    assert {each.status for each in load.healed("limited")} == {200}, what_happened(load.healed("limited"))
    wait_for(pair, lambda gateway: readiness(gateway) == (200, "ready", ""), 2)

    mine = [*taken(answers), lasting.answer]
    expected = {
        "requests/day": 5_000 - len(mine),
        "quota-tokens/day": 100_000 - sum(each.total for each in mine),
        "concurrent": 300,
    }

    async def is_right() -> bool:
        looks = [await standings(gateway.url, limited.key) for gateway in pair.gateways]
        return all({each["name"]: each["remaining"] for each in look.limits} == expected for look in looks)

    await eventually(is_right, f"what is left is {expected}", 2)
    rows = await office.settled(limited, len(mine))
    assert sorted(row.request_id for row in rows) == sorted(each.request_id for each in mine)
    assert [each.process.pid for each in pair.gateways if each.process is not None and each.process.poll() is None] == (
        pids
    )


async def test_the_metric_says_so_too(pair: SharedCluster, office: LimitOffice, caller: Caller) -> None:
    customer = await office.customer(Held("key", RequestRate(amount=100, period="second")))
    async with paused(pair, "SIGSTOP"):
        # Nobody finds out who does not ask.
        await caller.ask_all(caller.ask(gateway.url, customer.key) for gateway in pair.gateways for _ in range(6))
        await asyncio.to_thread(wait_for, pair, lambda gateway: metric(gateway, UP) == 0, 4)
    await asyncio.to_thread(wait_for, pair, lambda gateway: metric(gateway, UP) == 1, 6)


async def test_a_stream_that_gets_to_its_cap_meanwhile_ends_there_and_says_why(
    pair: SharedCluster, office: LimitOffice, caller: Caller
) -> None:
    """It was granted what was left, and asks for more in time; that cannot be told, so it has that, and not a token
    more. It waits for Redis to go on, but not for long."""
    customer = await office.customer(Held("key", QuotaRule(unit="tokens", period="day", amount=320)))
    await begun(pair, customer)
    async with caller.running(pair.gateways[0].url, customer.key, prompt=20, output=4_000) as running:
        async with paused(pair, "SIGSTOP"):
            answer = await running.end()
        assert (answer.output, answer.reasons, answer.causes) == (300, {0: "length"}, {0: "limits_unavailable"})
        assert answer.is_clamped
        patience_s = min(PATIENCE_S, LEASE_S / 2)
        assert patience_s <= answer.ended_s - answer.sent_s < patience_s + PAUSE_S
    await eventually(lambda: is_left(pair, customer, 0), "the quota is used up", 2)


async def test_a_stream_at_its_cap_has_the_last_word_of_a_redis_that_goes_on(
    pair: SharedCluster, office: LimitOffice, caller: Caller
) -> None:
    customer = await office.customer(Held("key", QuotaRule(unit="tokens", period="day", amount=320)))
    await begun(pair, customer)
    async with caller.running(pair.gateways[0].url, customer.key, prompt=20, output=4_000) as running:
        async with paused(pair, "SIGSTOP"):
            await asyncio.sleep(PAUSE_S)
        answer = await running.end()
    assert (answer.output, answer.reasons, answer.causes) == (300, {0: "length"}, {0: "quota_exceeded"})
    assert answer.ended_s - answer.sent_s > PAUSE_S
    await eventually(lambda: is_left(pair, customer, 0), "the quota is used up", 2)


# --- limits.when_unavailable = "degrade" ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def degrading(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[SharedCluster]:
    """Two gateways that allow their shares, one half each, while Redis does not answer."""
    folder, models = tmp_path_factory.mktemp("degrading"), smollm2_path.parents[1]
    settings = {
        "EVENHAND_LIMITS__LEASE_S": str(LEASE_S),
        "EVENHAND_LIMITS__WHEN_UNAVAILABLE": "degrade",
        "EVENHAND_LIMITS__PROCESSES": "2",
    }
    with running_cluster(folder, models, free_port, settings=settings) as cluster:
        yield cluster


@pytest.mark.parametrize("how", PAUSES)
async def test_while_it_is_silent_each_process_allows_its_share_and_no_hard_quota(
    degrading: SharedCluster, caller: Caller, how: str
) -> None:
    """What breaks it: shares that are whole limits allow twice as much; a hard quota with a share is one that two
    processes count by themselves."""
    async with limit_office(degrading) as office:
        held = {
            "requests": Held("key", RequestRate(amount=1, period="day", burst=11)),
            "tokens": Held("team", TokenRate(amount=1, period="day", burst=200, is_strict=True)),
            "hard": Held("organization", QuotaRule(unit="tokens", period="day", amount=100_000)),
            "soft": Held("team", QuotaRule(unit="tokens", period="day", amount=100_000, is_hard=False)),
        }
        share = {"requests": 5, "tokens": 4}
        customers = {name: await office.customer(each) for name, each in held.items()}
        await begun(degrading, customers["hard"])

        def says_so() -> None:
            wait_for(degrading, lambda gateway: readiness(gateway)[:2] == (200, "degraded"), 2)

        load = await load_over_a_pause(degrading, caller, customers, how, says_so, before=15)

        assert max(each.took_s for some in load.answers.values() for each in some) < BOUND_S
        for name, most in share.items():
            meanwhile = taken(load.pause.of(load.answers[name]))
            for gateway in degrading.gateways:
                num = sum(each.url == gateway.url for each in meanwhile)
                assert most - 1 <= num <= most, f"{name}: {what_happened(load.pause.of(load.answers[name]))}"
            assert {each.headers.get(DEGRADED) for each in meanwhile} == {"degraded"}
            assert any(DEGRADED in each.headers for each in load.pause.of(load.answers[name]) if not each.is_taken)
        hard, soft = (load.pause.of(load.answers[name]) for name in ("hard", "soft"))
        assert {(each.status, each.code) for each in hard} == {(503, "limits_unavailable")}
        assert {each.status for each in soft} == {200}

        assert {each.status for each in load.healed("hard")} == {200}
        assert not any(DEGRADED in each.headers for name in held for each in load.healed(name))
        for name in share:
            assert {each.status for each in load.healed(name)} == {429}, "Redis has not forgotten that it was used up"
        wait_for(degrading, lambda gateway: readiness(gateway) == (200, "ready", ""), 2)
        used = sum(each.total for each in load.answers["hard"])
        for gateway in degrading.gateways:
            left = (await standings(gateway.url, customers["hard"].key)).left("quota-tokens/day", "organization")
            assert left == 100_000 - used
        assert await standings(degrading.gateways[0].url, customers["requests"].key) == await standings(
            degrading.gateways[1].url, customers["requests"].key
        )


async def test_after_it_the_bucket_is_right_within_one_refill(degrading: SharedCluster, caller: Caller) -> None:
    """Ten a second with a burst of 20, asked for without a pause before, during and after: once Redis has gone on for
    the two seconds that fill it, it is full at both gateways, and a rush takes 20, not 20 each."""
    async with limit_office(degrading) as office:
        customer = await office.customer(Held("key", RequestRate(amount=10, period="second", burst=20)))
        load = await load_over_a_pause(degrading, caller, {"only": customer}, "SIGSTOP", lambda: None)
        meanwhile = taken(load.pause.of(load.answers["only"]))
        for gateway in degrading.gateways:
            num = sum(each.url == gateway.url for each in meanwhile)
            assert num <= 10 + 5 * PAUSE_S + 1, "its share of the burst and of the refill"
            assert num >= 5 * PAUSE_S
        stopped_s = max(each.decided_s for each in load.answers["only"])

        async def is_full() -> bool:
            looks = [await standings(gateway.url, customer.key) for gateway in degrading.gateways]
            return all(look.left("requests/second") == 20 for look in looks)

        await eventually(is_full, "the bucket is full", 2.5)
        assert time.monotonic() - stopped_s < 2.5
        rush = await caller.ask_all(caller.ask(degrading.gateways[i % 2].url, customer.key) for i in range(60))
        took_s = max(each.decided_s for each in rush) - min(each.sent_s for each in rush)
        assert 20 <= len(taken(rush)) <= 20 + 10 * took_s + 1


async def test_slots_have_shares_too_and_are_all_free_again(degrading: SharedCluster, caller: Caller) -> None:
    """Five slots are two for each of two processes. A stream that began before takes one of those of its process, and
    keeps its own in Redis, which has not forgotten it when it goes on."""
    async with limit_office(degrading) as office:
        customer = await office.customer(Held("team", Concurrency(amount=5)))
        one, other = (gateway.url for gateway in degrading.gateways)
        async with caller.running(one, customer.key, output=4_000) as before:
            async with paused(degrading, "SIGSTOP"):
                answers = await caller.ask_all(
                    caller.ask([one, other][i % 2], customer.key, output=400, stream=True) for i in range(12)
                )
            assert [sum(each.url == url for each in taken(answers)) for url in (one, other)] == [1, 2]
            assert {each.code for each in answers if not each.is_taken} == {"concurrency_limit_exceeded"}

            assert not before.answer.is_over
            await eventually(lambda: is_left(degrading, customer, 4), "the one that runs on has its slot", 2)
            await before.leave()
            await eventually(lambda: is_left(degrading, customer, 5), "all slots are free", 2)


async def is_left(cluster: SharedCluster, customer: Customer, num: int) -> bool:
    """Of the customer's one limit, at both gateways."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {customer.key}"}) as client:
        answers = [await client.get(f"{gateway.url}/v1/limits") for gateway in cluster.gateways]
    if any(answer.status_code == 503 for answer in answers):
        return False  # a gateway has not looked whether Redis answers again
    return {answer.json()["data"][0]["remaining"] for answer in answers} == {num}
