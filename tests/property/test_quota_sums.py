"""Whoever posts which rows in whatever order and how often, what is committed of quotas is the sum over the rows."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_kit import NOW_MS, ledger_row

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.ledger import Charge, LedgerRow
from gateway.storage.database import Database

NUM_ROWS = 12
FAR_MS = NOW_MS + 5

_runs = itertools.count()

# Of a quota: its number, when its period ends (organizations move to other time zones), and the units.
charges = st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 50))
batches = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=8), max_size=5)


def rows_of(run: int, drawn: list[list[tuple[int, int, int]]]) -> list[LedgerRow]:
    """Each example has requests, quotas and an organization of its own: the database is the same for all of them."""
    return [
        ledger_row(
            n,
            request_id=RequestId(f"req_{run}_{n}"),
            organization_id=OrganizationId(f"org_{run}"),
            charges=tuple(Charge(f"quota {run} {quota}", NOW_MS + end, units) for quota, end, units in each),
        )
        for n, each in enumerate(drawn)
    ]


async def post(storage: Database, batches: list[list[LedgerRow]], num_pauses: int) -> int:
    """One after the other, each in a transaction that lasts a bit; how many were new."""
    num_new = 0
    for batch in batches:
        async with storage.writing() as work:
            num_new += await work.ledger.post(batch)
            for _ in range(num_pauses):
                await asyncio.sleep(0)
    return num_new


async def check(url: str, rows: list[LedgerRow], posts: list[list[list[LedgerRow]]], num_pauses: int) -> None:
    organization_id = rows[0].organization_id
    posted = {row.request_id: row for poster in posts for batch in poster for row in batch}
    expected: dict[str, int] = {}
    ends: dict[str, int] = {}
    for row in posted.values():
        for charge in row.charges:
            expected[charge.key] = expected.get(charge.key, 0) + charge.units
            ends[charge.key] = max(ends.get(charge.key, 0), charge.ends_at_ms)

    processes = [Database.open(url, Path("unused")) for _ in posts]
    try:
        num_new = await asyncio.gather(
            *(post(storage, batches, num_pauses) for storage, batches in zip(processes, posts, strict=True))
        )
        async with processes[0].reading() as work:
            assert sum(num_new) == len(posted)
            assert await work.ledger.committed(organization_id, since_ms=0) == expected
            every_key = [charge.key for row in rows for charge in row.charges]
            assert await work.ledger.committed_of(every_key) == expected
            for at_ms in range(NOW_MS, FAR_MS):
                lasting = {key: units for key, units in expected.items() if ends[key] >= at_ms}
                assert await work.ledger.committed(organization_id, since_ms=at_ms) == lasting
            assert [sentence async for sentence in work.ledger.mismatches()] == []
    finally:
        for storage in processes:
            await storage.close()


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=st.lists(st.lists(charges, max_size=6), min_size=NUM_ROWS, max_size=NUM_ROWS),
    first=batches,
    second=batches,
    num_pauses=st.integers(0, 5),
)
def test_two_posters_of_any_batches_leave_the_sum_over_the_distinct_rows(
    database_url: str,
    drawn: list[list[tuple[int, int, int]]],
    first: list[list[int]],
    second: list[list[int]],
    num_pauses: int,
) -> None:
    rows = rows_of(next(_runs), drawn)
    posts = [[[rows[n] for n in batch] for batch in poster] for poster in (first, second)]
    asyncio.run(check(database_url, rows, posts, num_pauses))
