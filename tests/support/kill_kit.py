"""Load on limits while something is killed, and what must be true of it afterwards."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import redis
from cluster import SharedCluster
from evenhand_process import wait_until
from limit_books import balanced, store_books
from limit_kit import Customer, Held, LimitOffice, eventually
from limit_load import Answer, Caller
from open_load import LEAVES, Attempt

from gateway.domain.ledger import LedgerRow
from gateway.domain.limits.policy import Concurrency, QuotaRule, RequestRate, TokenRate

LEASE_S = 6
"""Of the cluster `ends`. Longer than it takes to recover what a killed gateway has left."""
PROMPT, OUTPUT = 20, 300
"""Of a request that uses a quota up."""
WATCH_S = 0.05


def tree(amount: int) -> Sequence[Held]:
    """Limits of an organization, its team and its key at once, hard and soft, in tokens and in money.

    Args:
        amount: of the one that may be used up.
    """
    return (
        Held("organization", QuotaRule(unit="tokens", period="month", amount=amount)),
        Held("organization", RequestRate(amount=100_000, period="minute")),
        Held("organization", Concurrency(amount=500)),
        Held("team", QuotaRule(unit="tokens", period="month", amount=20_000, is_hard=False)),
        Held("team", TokenRate(amount=10_000_000, period="minute", max_debt=10_000_000)),
        Held("key", QuotaRule(unit="tokens", period="day", amount=10_000_000)),
        Held("key", QuotaRule(unit="microusd", period="month", amount=10_000_000)),
        Held("key", Concurrency(amount=400)),
    )


@asynccontextmanager
async def all_back(cluster: SharedCluster) -> AsyncIterator[None]:
    """Afterwards everything runs again that was ended or stopped meanwhile, whatever became of the test."""
    try:
        yield
    finally:
        for server in (cluster.postgres, cluster.redis):
            if not server.is_running:
                await asyncio.to_thread(server.start)
        for member in cluster.members:
            if member.is_running:
                member.send(signal.SIGCONT)
            else:
                member.start()
        for gateway in cluster.gateways:
            await asyncio.to_thread(gateway.wait_ready)


@asynccontextmanager
async def never_over(cluster: SharedCluster, customer: Customer, amount: int) -> AsyncIterator[None]:
    """Fails if meanwhile more is committed and reserved of the organization's quota of tokens than there is."""
    begin = f"quota-tokens/month:{customer.organization_id}:"
    worst = 0

    async def watch() -> None:
        nonlocal worst
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                books = await asyncio.to_thread(store_books, cluster, customer)
            except (redis.RedisError, OSError):
                continue
            if books.is_known:
                used = [sum(each) for key, each in books.quotas.items() if key.startswith(begin)]
                worst = max(worst, *used, 0)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert worst <= amount


async def use_up(cluster: SharedCluster, caller: Caller, customer: Customer) -> None:
    """Ask by turns at the gateways until a hard quota refuses; nothing is left of it then that a request could have."""
    urls = itertools.cycle(gateway.url for gateway in cluster.gateways)

    def is_all(answer: Answer) -> bool:
        assert answer.code in (None, "insufficient_quota", "limits_unavailable"), answer.error
        return answer.code == "insufficient_quota" or answer.is_clamped

    for num_choices in (16, 1):  # first many answers at once, while there is enough for that
        await caller.ask_until(
            is_all, lambda n=num_choices: caller.ask(next(urls), customer.key, prompt=PROMPT, output=OUTPUT, n=n)
        )
    for gateway in cluster.gateways:
        last = await caller.ask(gateway.url, customer.key, prompt=PROMPT, output=OUTPUT)
        assert last.code == "insufficient_quota", last.error


async def used_up_to_the_token(
    cluster: SharedCluster, office: LimitOffice, caller: Caller, customer: Customer, amount: int
) -> None:
    """What is left can be used, no more and no less, whatever came before: by the store and by the ledger."""
    await use_up(cluster, caller, customer)
    await balanced(cluster, office, customer)
    used = sum(row.prompt_tokens + row.completion_tokens for row in await office.rows(customer))
    assert amount - PROMPT <= used <= amount


async def check_books(
    cluster: SharedCluster, office: LimitOffice, customer: Customer, attempts: Sequence[Attempt]
) -> Mapping[str, LedgerRow]:
    """Every 200 is in the ledger exactly once, with what its client saw; nothing else is."""
    answered = {str(each.request_id): each for each in attempts if each.status == 200}
    rows: dict[str, LedgerRow] = {}

    async def are_there() -> bool:
        nonlocal rows
        rows = {row.request_id: row for row in await office.rows(customer)}
        return answered.keys() <= rows.keys()

    await eventually(are_there, "every 200 is in the ledger", 60)
    await asyncio.to_thread(wait_until, lambda: all_is_posted(cluster), 60)
    found = await office.rows(customer)
    rows = {row.request_id: row for row in found}
    assert len(rows) == len(found)
    known = {each.request_id for each in attempts if each.request_id is not None}
    assert len(rows.keys() - known) <= sum(each.status is None for each in attempts), "rows without a request"
    for request_id, attempt in answered.items():
        check_row(attempt, rows[request_id])
    return rows


def check_row(attempt: Attempt, row: LedgerRow) -> None:
    if attempt.is_whole and attempt.kind != LEAVES:
        assert attempt.usage is not None
        expected = (attempt.usage["prompt_tokens"], attempt.usage["completion_tokens"], "finished")
        assert (row.prompt_tokens, row.completion_tokens, row.outcome) == expected
    else:
        assert row.completion_tokens >= attempt.num_chunks
        assert row.outcome in {"finished", "client_gone", "engine_down", "lost", "cancelled"}


def all_is_posted(cluster: SharedCluster) -> bool:
    """Nothing runs, nothing waits to be posted, no process that died has left anything open, and all adds up."""
    report = cluster.command("ledger", "verify").splitlines()
    is_complete = len(report) == 4 and report[1].endswith(" 0 of them not posted yet") and report[2].startswith("0 ")
    return is_complete and report[3] == "clean"


def what_became(attempts: Sequence[Attempt]) -> str:
    """For messages."""
    counts = Counter(f"{each.status} {_reason(each)}" for each in attempts)
    return "\n".join(f"{count:5} {what}" for what, count in counts.most_common())


def _reason(attempt: Attempt) -> str:
    try:
        return str(json.loads(attempt.error)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return attempt.error[:100]
