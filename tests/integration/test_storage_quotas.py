"""What is committed of quotas: the sums of the ledger rows' charges, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import delete, insert, literal_column, update
from storage_kit import NOW_MS, charge, ledger_row

from gateway.domain.ids import OrganizationId
from gateway.domain.ledger import HOUR_MS, LedgerRow
from gateway.storage.database import Database
from gateway.storage.tables import ledger, quota_usage

ORGANIZATION = OrganizationId("org_0001")
OTHER = OrganizationId("org_0002")
END_MS = charge("any", 0).ends_at_ms
WHOLE, OF_TEAM = charge("whole", 10), charge("team", 10)


async def post(storage: Database, *rows: LedgerRow) -> int:
    async with storage.writing() as work:
        return await work.ledger.post(rows)


async def committed(storage: Database, organization_id: OrganizationId = ORGANIZATION) -> dict[str, int]:
    async with storage.reading() as work:
        return dict(await work.ledger.committed(organization_id, since_ms=0))


async def mismatches(storage: Database) -> list[str]:
    async with storage.reading() as work:
        return [sentence async for sentence in work.ledger.mismatches()]


async def test_charges_are_committed_with_their_row_and_come_back_with_it(storage: Database) -> None:
    row = ledger_row(1, cost_microusd=7, charges=(WHOLE, OF_TEAM))
    async with storage.writing() as work:
        assert await work.ledger.post([row, ledger_row(2)]) == 2
        assert await committed(storage) == {}, "nobody sees the one before the other"

    assert await committed(storage) == {"whole": 10, "team": 10}
    async with storage.reading() as work:
        assert await work.ledger.rows([row.request_id]) == [row]
        assert await work.ledger.page(after="", limit=9) == [ledger_row(2), row]
        assert (await work.ledger.totals()).cost_microusd == 7 + 14


async def test_rows_with_the_same_quota_are_added_up_and_one_with_the_same_twice_too(storage: Database) -> None:
    rows = [ledger_row(n, charges=(charge("whole", n), charge(f"team {n % 2}", 1))) for n in range(1, 101)]
    rows.append(ledger_row(101, charges=(charge("whole", 1), charge("whole", 2))))

    assert await post(storage, *rows) == 101
    assert await committed(storage) == {"whole": 5053, "team 0": 50, "team 1": 50}
    assert await mismatches(storage) == []


async def test_only_rows_that_are_new_are_committed_and_of_one_id_the_first(storage: Database) -> None:
    assert await post(storage, ledger_row(1, charges=(WHOLE,)), ledger_row(1, charges=(OF_TEAM,))) == 1
    assert await post(storage, ledger_row(1, charges=(WHOLE,)), ledger_row(2, charges=(WHOLE,))) == 1
    assert await post(storage, ledger_row(2, charges=(charge("else", 1),))) == 0

    assert await committed(storage) == {"whole": 20}
    assert await mismatches(storage) == []


async def test_what_is_not_committed_leaves_nothing(storage: Database) -> None:
    async def fail() -> None:
        async with storage.writing() as work:
            await work.ledger.post([ledger_row(1, charges=(WHOLE,))])
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        await fail()

    assert await committed(storage) == {}
    assert await post(storage, ledger_row(1, charges=(WHOLE,))) == 1
    assert await committed(storage) == {"whole": 10}


async def test_committed_is_of_the_organization_and_of_periods_that_last(storage: Database) -> None:
    await post(
        storage,
        ledger_row(1, charges=(charge("ended", 1, ends_at_ms=NOW_MS), charge("lasts", 2, ends_at_ms=NOW_MS + 1))),
        ledger_row(2, charges=(charge("theirs", 3),), organization_id=OTHER),
        ledger_row(3, charges=(charge("nothing", 0),)),
    )

    async with storage.reading() as work:
        assert await work.ledger.committed(ORGANIZATION, since_ms=NOW_MS) == {"ended": 1, "lasts": 2, "nothing": 0}
        assert await work.ledger.committed(ORGANIZATION, since_ms=NOW_MS + 1) == {"lasts": 2, "nothing": 0}
        assert await work.ledger.committed(OTHER, since_ms=0) == {"theirs": 3}
        assert await work.ledger.committed(OrganizationId("org_none"), since_ms=0) == {}
        assert await work.ledger.committed_of(["theirs", "ended", "unknown"]) == {"theirs": 3, "ended": 1}
        assert await work.ledger.committed_of([]) == {}


async def test_thousands_of_quotas_at_once(storage: Database) -> None:
    names = [f"quota {n}" for n in range(2500)]
    row = ledger_row(1, charges=tuple(charge(name, n) for n, name in enumerate(names)))
    await post(storage, row)

    expected = {name: n for n, name in enumerate(names)}
    assert await committed(storage) == expected
    async with storage.reading() as work:
        assert await work.ledger.committed_of([*names, "unknown"]) == expected
        assert await work.ledger.rows([row.request_id]) == [row]
    assert await mismatches(storage) == []


async def test_a_period_whose_end_moves_with_the_time_zone_lasts_until_the_later_one(storage: Database) -> None:
    for n, ends_at_ms in enumerate((END_MS, END_MS + HOUR_MS, END_MS - HOUR_MS), start=1):
        await post(storage, ledger_row(n, charges=(charge("whole", 1, ends_at_ms=ends_at_ms),)))

    async with storage.reading() as work:
        assert await work.ledger.committed(ORGANIZATION, since_ms=END_MS + HOUR_MS) == {"whole": 3}
        assert await work.ledger.committed(ORGANIZATION, since_ms=END_MS + HOUR_MS + 1) == {}
    assert await mismatches(storage) == []


async def test_posting_to_the_same_quotas_at_once_waits_in_turn_and_loses_nothing(storage: Database) -> None:
    """In whatever order each row names them: none waits for one that waits for it."""
    names = [f"quota {n}" for n in range(20)]

    def row(n: int) -> LedgerRow:
        return ledger_row(n, charges=tuple(charge(name, n) for name in names[:: 1 if n % 2 else -1]))

    async def keep_posting(first: int) -> None:
        for n in range(first, first + 25):
            await post(storage, row(n), row(n % 7))

    await asyncio.gather(*(keep_posting(100 * poster) for poster in range(1, 5)))

    total = sum(range(7)) + sum(100 * poster + n for poster in range(1, 5) for n in range(25))
    assert await committed(storage) == dict.fromkeys(names, total)
    assert await mismatches(storage) == []


ROW = ledger_row(1, charges=(charge("a", 5), charge("b", 6)))
"""What the faults below are planted beside of."""
_A, _B = quota_usage.c.key == "a", quota_usage.c.key == "b"


def _charged(value: Any) -> Any:
    return update(ledger).where(ledger.c.request_id == ROW.request_id).values(charges=value)


def _raw(value: str) -> Any:
    return _charged(literal_column(f"'{value}'"))


def _other_end(name: str, kept: str) -> str:
    return f"quota {name} of org_0001: its period ends at {kept}, by the ledger rows at 2024-10-05T00:00:01+00:00"


NOT_CHARGED = [
    "quota a of org_0001: 5 is committed, no ledger row was charged for it",
    "quota b of org_0001: 6 is committed, no ledger row was charged for it",
]
NO_LIST = [f"ledger row {ROW.request_id}: its charges are no list", *NOT_CHARGED]
UNREADABLE = f"ledger row {ROW.request_id}: a charge cannot be read"

PLANTED = {
    "too much": (
        update(quota_usage).where(_A).values(committed=6),
        ["quota a of org_0001: 6 is committed, ledger rows were charged 5 for it"],
    ),
    "too little": (
        update(quota_usage).where(_B).values(committed=0),
        ["quota b of org_0001: 0 is committed, ledger rows were charged 6 for it"],
    ),
    "negative": (
        update(quota_usage).where(_A).values(committed=-5),
        [
            "quota a of org_0001: -5 is committed, which is negative",
            "quota a of org_0001: -5 is committed, ledger rows were charged 5 for it",
        ],
    ),
    "sum without charges": (
        insert(quota_usage).values(key="c", organization_id="org_0001", ends_at_ms=1, committed=0),
        ["quota c of org_0001: 0 is committed, no ledger row was charged for it"],
    ),
    "charges without sum": (
        delete(quota_usage).where(_A),
        ["quota a of org_0001: nothing is kept as committed, ledger rows were charged 5 for it"],
    ),
    "somebody else's": (
        update(quota_usage).where(_A).values(organization_id="org_0002"),
        [
            "quota a of org_0001: nothing is kept as committed, ledger rows were charged 5 for it",
            "quota a of org_0002: 5 is committed, no ledger row was charged for it",
        ],
    ),
    "another end": (
        update(quota_usage).where(_B).values(ends_at_ms=0),
        [_other_end("b", "1970-01-01T00:00:00+00:00")],
    ),
    "an end that no calendar has": (
        update(quota_usage).where(_B).values(ends_at_ms=1 << 60),
        [_other_end("b", str(1 << 60))],
    ),
    "row gone": (
        delete(ledger).where(ledger.c.request_id == ROW.request_id),
        [f"request {ROW.request_id}: is to be added to the hourly sums, but has no ledger row", *NOT_CHARGED],
    ),
    "charges gone": (_charged(None), NOT_CHARGED),
    "a charge gone": (_charged([["a", END_MS, 5]]), NOT_CHARGED[1:]),
    "a charge changed": (
        _charged([["a", END_MS, 5], ["b", END_MS, 7]]),
        ["quota b of org_0001: 6 is committed, ledger rows were charged 7 for it"],
    ),
    "a negative charge": (
        _charged([["a", END_MS, 5], ["b", END_MS, -6]]),
        [
            "quota b of org_0001: 6 is committed, ledger rows were charged -6 for it",
            f"ledger row {ROW.request_id}: a charge is negative",
        ],
    ),
    "null within JSON": (_raw("null"), NO_LIST),
    "an object": (_raw('{"a": 1}'), NO_LIST),
    "a list of no lists": (_raw('[1, "a", null, true]'), NOT_CHARGED + [UNREADABLE] * 4),
    "an empty charge": (_raw("[[]]"), [*NOT_CHARGED, UNREADABLE]),
    "units that are text": (_raw('[["a", 1, "five"]]'), [*NOT_CHARGED, UNREADABLE]),
    "units beyond all": (_raw('[["b", 1, 99999999999999999999]]'), [*NOT_CHARGED, UNREADABLE]),
    "an end that is none": (_raw('[["a", null, 5]]'), [*NOT_CHARGED, UNREADABLE]),
}


@pytest.mark.parametrize("fault", PLANTED)
async def test_every_way_in_which_quotas_can_be_wrong_is_found(storage: Database, fault: str) -> None:
    statement, expected = PLANTED[fault]
    await post(storage, ROW, ledger_row(2), ledger_row(3, charges=(charge("right", 1),)))
    assert await mismatches(storage) == []
    async with storage.migrating() as connection:
        await connection.execute(statement)

    assert await mismatches(storage) == expected
    async with storage.reading() as work:
        rows = await work.ledger.page(after="", limit=9)
    assert [row.request_id for row in rows] == ["req_000003", "req_000002", ROW.request_id][: 2 + (fault != "row gone")]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # PostgreSQL keeps nothing else in such a column
async def test_charges_that_are_no_json_are_found(storage: Database) -> None:
    await post(storage, ROW)
    async with storage.migrating() as connection:
        await connection.execute(_raw('[["a"'))

    assert await mismatches(storage) == NO_LIST


async def test_a_cost_that_cannot_be_is_kept_and_found(storage: Database) -> None:
    await post(storage, ledger_row(1, cost_microusd=-1), ledger_row(2, cost_microusd=1 << 40))

    assert await mismatches(storage) == ["ledger row req_000001: cost_microusd is negative"]
