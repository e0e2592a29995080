"""The ledger and its hourly sums, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import delete, insert, update
from storage_kit import NOW_MS, ledger_row

from gateway.domain.ids import KeyId, RequestId, TeamId
from gateway.domain.ledger import HOUR_MS, HourlyUsage, LedgerRow, UsageTotals
from gateway.storage.database import Database
from gateway.storage.tables import hourly_usage, ledger, rollup_queue

FIRST_HOUR_MS = NOW_MS - NOW_MS % HOUR_MS
ALL = {"from_ms": 0, "until_ms": FIRST_HOUR_MS + 100 * HOUR_MS, "limit": 10_000}


def sums_of(rows: list[LedgerRow]) -> UsageTotals:
    return UsageTotals(
        num_requests=len(rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        cached_tokens=sum(row.cached_tokens for row in rows),
        completion_tokens=sum(row.completion_tokens for row in rows),
        engine_us=sum(row.engine_us for row in rows),
        cost_microusd=sum(row.cost_microusd for row in rows),
    )


async def post(storage: Database, rows: list[LedgerRow]) -> int:
    async with storage.writing() as work:
        return await work.ledger.post(rows)


async def roll_up(storage: Database, limit: int = 1000) -> int:
    async with storage.writing() as work:
        return await work.ledger.roll_up(limit)


async def hourly(storage: Database, **filters: Any) -> list[HourlyUsage]:
    async with storage.reading() as work:
        return list(await work.ledger.hourly(**ALL | filters))


async def mismatches(storage: Database) -> list[str]:
    async with storage.reading() as work:
        return [sentence async for sentence in work.ledger.mismatches()]


async def test_a_row_comes_back_as_it_was_posted(storage: Database) -> None:
    rows = [
        ledger_row(1),
        ledger_row(2, error_code="engine_unavailable", ttft_us=5, total_us=None, prompt_tokens=1 << 40),
        ledger_row(3, requested_model="'; DROP TABLE ledger; --", finish_reason="", outcome="lost"),
    ]

    assert await post(storage, rows) == 3
    async with storage.reading() as work:
        assert await work.ledger.page(after="", limit=9) == rows[::-1]
        assert await work.ledger.present(["req_000001", "req_none"]) == {"req_000001"}
        assert await work.ledger.present([]) == set()
        assert await work.ledger.totals() == sums_of(rows)


async def test_an_empty_ledger(storage: Database) -> None:
    assert await post(storage, []) == 0
    assert await roll_up(storage) == 0
    assert await hourly(storage) == []
    assert await mismatches(storage) == []
    async with storage.reading() as work:
        assert await work.ledger.page(after="", limit=9) == []
        assert await work.ledger.totals() == UsageTotals()


async def test_posting_again_changes_nothing(storage: Database) -> None:
    assert await post(storage, [ledger_row(1), ledger_row(2)]) == 2
    assert await post(storage, [ledger_row(2, prompt_tokens=99), ledger_row(3), ledger_row(1)]) == 1
    assert await roll_up(storage) == 3
    assert await post(storage, [ledger_row(n) for n in (1, 2, 3)]) == 0
    assert await roll_up(storage) == 0

    async with storage.reading() as work:
        assert await work.ledger.page(after="", limit=9) == [ledger_row(n) for n in (3, 2, 1)]
        assert await work.ledger.totals() == sums_of([ledger_row(n) for n in (1, 2, 3)])


async def test_a_row_twice_in_one_post_counts_once(storage: Database) -> None:
    assert await post(storage, [ledger_row(1), ledger_row(1)]) == 1


async def test_thousands_of_rows_in_one_post(storage: Database) -> None:
    rows = [ledger_row(n) for n in range(1, 3501)]

    assert await post(storage, rows[:500]) == 500
    assert await post(storage, rows) == 3000
    async with storage.reading() as work:
        assert await work.ledger.present([row.request_id for row in rows]) == {row.request_id for row in rows}
        assert await work.ledger.totals() == sums_of(rows)


async def test_posting_the_same_at_once_counts_each_row_once(storage: Database) -> None:
    """In whatever order each of them has the rows: none waits for one that waits for it."""
    rows = [ledger_row(n) for n in range(1, 1001)]
    posts = [post(storage, rows[start : start + 900][:: 1 if start % 50 else -1]) for start in range(0, 101, 25)]

    assert sum(await asyncio.gather(*posts)) == 1000
    async with storage.reading() as work:
        assert await work.ledger.totals() == sums_of(rows)
    assert await mismatches(storage) == []


async def test_pages_go_from_the_newest_back_without_gaps(storage: Database) -> None:
    rows = [
        ledger_row(
            n, closed_at_ms=NOW_MS + n // 3, team_id=TeamId(f"team_{n % 2}"), request_id=RequestId(f"req_{n * 7 % 50}")
        )
        for n in range(50)
    ]
    await post(storage, rows)

    for team_id in (None, TeamId("team_1")):
        seen: list[LedgerRow] = []
        async with storage.reading() as work:
            while page := await work.ledger.page(after=seen[-1].request_id if seen else "", limit=7, team_id=team_id):
                seen += page
        expected = [row for row in rows if team_id in (None, row.team_id)]
        assert seen == sorted(expected, key=lambda row: (row.closed_at_ms, row.request_id), reverse=True)
    async with storage.reading() as work:
        assert await work.ledger.page(after="req_none", limit=7) == []


async def test_hourly_sums_are_exact_before_during_and_after_rolling_up(storage: Database) -> None:
    rows = [
        ledger_row(
            n,
            closed_at_ms=FIRST_HOUR_MS + n * HOUR_MS // 4 - 1,
            key_id=KeyId(f"key_{n % 3}"),
            team_id=TeamId(f"team_{n % 2}"),
            model=f"m{n % 2}",
        )
        for n in range(1, 41)
    ]
    groups: dict[tuple[int, str, str, str], list[LedgerRow]] = {}
    for row in rows:
        hour = row.closed_at_ms - row.closed_at_ms % HOUR_MS
        groups.setdefault((hour, row.key_id, row.model, row.team_id), []).append(row)
    expected = [(name, sums_of(group)) for name, group in sorted(groups.items())]

    await post(storage, rows)
    steps = [0]
    while steps[-1] or len(steps) == 1:
        found = await hourly(storage)
        assert [((each.hour_ms, each.key_id, each.model, each.team_id), each.totals) for each in found] == expected
        assert await mismatches(storage) == []
        steps.append(await roll_up(storage, limit=7))
    assert steps == [0, 7, 7, 7, 7, 7, 5, 0]


async def test_hourly_sums_are_of_the_hours_and_the_team_asked_for(storage: Database) -> None:
    rows = [
        ledger_row(n, closed_at_ms=FIRST_HOUR_MS + n * HOUR_MS, team_id=TeamId(f"team_{n % 2}")) for n in range(1, 9)
    ]
    await post(storage, rows)
    await roll_up(storage, limit=4)

    def hours(found: list[HourlyUsage]) -> list[int]:
        return [(each.hour_ms - FIRST_HOUR_MS) // HOUR_MS for each in found]

    window = {"from_ms": FIRST_HOUR_MS + 2 * HOUR_MS, "until_ms": FIRST_HOUR_MS + 7 * HOUR_MS}
    assert hours(await hourly(storage, **window)) == [2, 3, 4, 5, 6]
    assert hours(await hourly(storage, **window, team_id=TeamId("team_1"))) == [3, 5]
    assert hours(await hourly(storage, **window, limit=2)) == [2, 3]


async def test_several_that_roll_up_while_others_post_lose_and_double_nothing(storage: Database) -> None:
    rows = [ledger_row(n, key_id=KeyId(f"key_{n % 5}")) for n in range(1, 301)]
    is_over = asyncio.Event()
    rolled = [0, 0, 0]

    async def keep_rolling(n: int) -> None:
        while not is_over.is_set():
            rolled[n] += await roll_up(storage, limit=20)

    async def keep_posting(part: list[LedgerRow]) -> None:
        for start in range(0, len(part), 10):
            await post(storage, part[start : start + 10])
            assert sum(each.totals.num_requests for each in await hourly(storage)) >= start + 10

    rolling = [asyncio.create_task(keep_rolling(n)) for n in range(3)]
    await asyncio.gather(keep_posting(rows[:150]), keep_posting(rows[150:]))
    is_over.set()
    await asyncio.gather(*rolling)
    while num := await roll_up(storage):
        rolled[0] += num

    assert sum(rolled) == 300
    assert await mismatches(storage) == []
    assert [each.totals for each in await hourly(storage)] == [sums_of(rows[n - 1 :: 5]) for n in (5, 1, 2, 3, 4)]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # in SQLite writers take turns anyway
async def test_who_finds_another_one_rolling_up_does_nothing(storage: Database) -> None:
    await post(storage, [ledger_row(1), ledger_row(2)])

    async with storage.writing() as first:
        assert await first.ledger.roll_up(1) == 1
        assert await roll_up(storage) == 0
    assert await roll_up(storage) == 1


PLANTED = [
    ({"prompt_tokens": -1, "cached_tokens": -2}, ["prompt_tokens is negative", "cached_tokens is negative"]),
    ({"cached_tokens": 11}, ["cached_tokens is more than prompt_tokens"]),
    ({"ttft_us": -5}, ["ttft_us is negative"]),
    ({"parked_us": -1}, ["parked_us is negative"]),
    ({"closed_at_ms": NOW_MS - 1}, ["it was closed before it was opened"]),
    ({"outcome": "vanished"}, ["its outcome is none that there is"]),
    ({"endpoint": "telepathy"}, ["its endpoint is none that there is"]),
    ({"request_class": "royal"}, ["its class is none that there is"]),
]


@pytest.mark.parametrize(("fields", "what"), PLANTED)
async def test_a_row_that_cannot_be_is_kept_and_found(
    storage: Database, fields: dict[str, Any], what: list[str]
) -> None:
    await post(storage, [ledger_row(1, **fields), ledger_row(2)])

    assert await mismatches(storage) == [f"ledger row req_000001: {each}" for each in what]


async def test_every_way_in_which_sums_can_be_wrong_is_found(storage: Database) -> None:
    await post(storage, [ledger_row(n, key_id=KeyId(f"key_{n}")) for n in range(1, 6)])
    await roll_up(storage, limit=4)
    async with storage.migrating() as connection:
        await connection.execute(update(hourly_usage).where(hourly_usage.c.key_id == "key_1").values(prompt_tokens=7))
        await connection.execute(delete(hourly_usage).where(hourly_usage.c.key_id == "key_2"))
        await connection.execute(delete(ledger).where(ledger.c.request_id == "req_000003"))
        await connection.execute(insert(rollup_queue).values(request_id="req_000004"))
        await connection.execute(insert(rollup_queue).values(request_id="req_none"))
        await connection.execute(delete(rollup_queue).where(rollup_queue.c.request_id == "req_000005"))

    found = await mismatches(storage)

    def off(n: int, sign: str) -> str:
        sums = {"num_requests": 1, "prompt_tokens": 10 * n, "cached_tokens": n, "completion_tokens": n, "engine_us": 5}
        sums["cost_microusd"] = 7 * n
        return _off(n, ", ".join(f"{sign}{value} {name}" for name, value in sums.items()))

    assert found == [
        "request req_none: is to be added to the hourly sums, but has no ledger row",
        _off(1, "-3 prompt_tokens"),
        off(2, "-"),
        off(3, "+"),
        off(4, "+"),
        off(5, "-"),
    ]


def _off(n: int, what: str) -> str:
    return f"hour 2024-10-04T00:00+00:00, team team_0001, key key_{n}, model m1: the hourly sums are off by {what}"


async def test_thousands_of_mismatches_come_one_by_one(storage: Database) -> None:
    await post(storage, [ledger_row(n, outcome="vanished") for n in range(1, 2001)])

    async with storage.reading() as work:
        found = work.ledger.mismatches()
        assert await anext(found) == "ledger row req_000001: its outcome is none that there is"
        assert len([sentence async for sentence in found]) == 1999
