"""Who is shut out while requests come in at both gateways is out within the promised time, and leaves no key behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import asyncpg
import httpx
import pytest
from cluster import SharedCluster
from limit_kit import Customer, Held, LimitOffice, begun, eventually
from limit_load import Answer, Caller, taken, what_happened

from gateway.domain.limits.policy import Concurrency, QuotaRule

pytestmark = pytest.mark.slow

BOUND_S = 2.0
"""What is promised for a change to be known everywhere."""
RATE_S = 20
AFTER_S = BOUND_S + 1.0


class ShutOut(NamedTuple):
    """What is done to a customer, and what it is told from then on."""

    do: Callable[[LimitOffice, Customer], Awaitable[None]]
    status: int
    code: str


SHUT_OUT = {
    "revoked key": ShutOut(LimitOffice.revoke, 401, "invalid_api_key"),
    "disabled team": ShutOut(LimitOffice.disable_team, 403, "team_disabled"),
    "disabled organization": ShutOut(LimitOffice.disable_organization, 403, "organization_disabled"),
}


@pytest.mark.parametrize("what", SHUT_OUT)
async def test_the_last_one_is_taken_within_the_bound_and_what_runs_is_finished_and_charged(
    pair: SharedCluster, office: LimitOffice, caller: Caller, what: str
) -> None:
    """20 requests a second over both. A stream that began before runs to its end: what was promised it is delivered.
    Its slot and its reservation come back, as all others' do; colleagues who are not concerned notice nothing.

    What breaks it: a cache of keys that lives longer than the bound, in one of the processes."""
    shut = SHUT_OUT[what]
    quota = Held("organization", QuotaRule(unit="tokens", period="day", amount=100_000))
    customer = await office.customer(quota, Held("organization", Concurrency(amount=50)))
    colleague = await office.colleague(customer, same_team=what == "revoked key")
    await begun(pair, customer)
    urls = [gateway.url for gateway in pair.gateways]
    answers: list[Answer] = []
    others: list[Answer] = []
    async with caller.running(urls[1], customer.key, output=2_000) as running:
        sending = asyncio.create_task(send(caller, urls, customer, colleague, answers, others))

        async def both_have_served() -> bool:
            return {each.url for each in taken(answers[10:])} == set(urls)

        await eventually(both_have_served, "both gateways know the key")
        await shut.do(office, customer)
        shut_s = time.monotonic()
        lasting = await running.end()
        await sending

    last_s = max(each.decided_s for each in taken(answers))
    assert last_s - shut_s < BOUND_S
    late = [each for each in answers if each.sent_s > shut_s + BOUND_S]
    assert len(late) > RATE_S * (AFTER_S - BOUND_S) / 2
    assert {(each.status, each.code) for each in late} == {(shut.status, shut.code)}, what_happened(late)
    assert {each.status for each in answers if each.decided_s < shut_s} == {200}
    assert (lasting.output, lasting.reasons, lasting.ended_s > shut_s) == (2_000, {0: "length"}, True)
    if what != "disabled organization":
        assert {each.status for each in others} == {200}

    expected = {each.request_id for each in [*taken(answers), lasting]}

    async def are_posted() -> bool:
        rows = await office.rows(customer)
        return {row.request_id for row in rows if row.key_id == customer.key_id} == expected

    await eventually(are_posted, "each that was taken has a row, and nothing else has one")
    used = sum(each.total for each in [*answers, *others, lasting])
    await eventually(lambda: is_committed(office, customer, used), "all is charged")
    await check_no_key_is_anywhere(pair, customer, answers)


async def send(
    caller: Caller,
    urls: list[str],
    customer: Customer,
    colleague: Customer,
    answers: list[Answer],
    others: list[Answer],
) -> None:
    """At a steady rate, in turn at both, until nobody has been taken for a while."""
    begun_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        i = 0
        while not answers or time.monotonic() - last_taken_s(answers) < AFTER_S:
            await asyncio.sleep(max(0.0, begun_s + i / RATE_S - time.monotonic()))
            who, to = (colleague, others) if i % 8 == 7 else (customer, answers)
            answer = Answer(urls[i % 3 % 2])
            to.append(answer)
            group.create_task(caller.ask(answer.url, who.key, output=5, stream=i % 3 == 0, answer=answer))
            i += 1


def last_taken_s(answers: list[Answer]) -> float:
    return max((each.decided_s for each in taken(answers)), default=time.monotonic())


async def is_committed(office: LimitOffice, customer: Customer, used: int) -> bool:
    return list((await office.committed(customer)).values()) == [used]


async def check_no_key_is_anywhere(pair: SharedCluster, customer: Customer, answers: list[Answer]) -> None:
    """Not in what was answered, logged or kept; of its secret not even a part."""
    secret = customer.key.split("_")[2][:20]
    seen = [f"{answer.headers} {answer.error}" for answer in answers]
    seen += [member.log for member in pair.members]
    async with httpx.AsyncClient() as client:
        seen += [(await client.get(f"http://127.0.0.1:{each.metrics_port}/metrics")).text for each in pair.gateways]
    seen += [path.read_bytes().decode("latin-1") for path in files(pair.home)]
    seen += await tables(pair.database_url)
    assert len(seen) > len(answers) + 10
    assert [text[:300] for text in seen if secret in text] == []


def files(home: Path) -> Iterator[Path]:
    for path in home.iterdir():
        if path.name != "models":
            yield from [path] if path.is_file() else (each for each in path.rglob("*") if each.is_file())


async def tables(database_url: str) -> list[str]:
    connection = await asyncpg.connect(database_url)
    try:
        names = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        rows = [await connection.fetch(f'SELECT t::text AS row FROM "{name[0]}" t') for name in names]  # noqa: S608 - ours
        return [row["row"] for some in rows for row in some]
    finally:
        await connection.close()
