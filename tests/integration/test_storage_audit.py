"""The audit's chain, and several processes on one database, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from storage_kit import draft, ledger_row

from gateway.domain.audit import AuditEntry, follows
from gateway.storage.database import Database

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = Path(__file__).parents[2]

OTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from storage_kit import draft, ledger_row
from gateway.storage.database import Database

async def main(url, first):
    database = Database.open(url, Path("unused"))
    for n in range(first, first + 20):
        async with database.writing() as work:
            await work.version()
            await work.count_change()
            await work.audit.append(draft(n))
            await work.ledger.post([ledger_row(n), ledger_row(1)])
        async with database.writing() as work:
            await work.ledger.roll_up(3)
    await database.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def chain(storage: Database) -> list[AuditEntry]:
    async with storage.reading() as work:
        return list(await work.audit.page(after=0, limit=10_000))


def is_unbroken(entries: list[AuditEntry]) -> bool:
    return all(follows(entry, previous) for entry, previous in zip(entries, [None, *entries[:-1]], strict=True))


async def test_entries_come_back_chained_and_in_pages(storage: Database) -> None:
    kept = []
    for n in range(1, 6):
        async with storage.writing() as work:
            kept.append(await work.audit.append(draft(n)))

    assert await chain(storage) == kept
    assert is_unbroken(kept)
    async with storage.reading() as work:
        assert await work.audit.page(after=2, limit=2) == kept[2:4]


async def test_several_entries_of_one_transaction_are_a_chain(storage: Database) -> None:
    async with storage.writing() as work:
        for n in range(3):
            await work.audit.append(draft(n))

    assert is_unbroken(await chain(storage))


async def test_twenty_writers_at_once_make_no_fork(storage: Database) -> None:
    async def write(n: int) -> None:
        async with storage.writing() as work:
            if n % 2:
                await work.count_change()
            await work.audit.append(draft(n))
            await work.count_change()

    await asyncio.gather(*(write(n) for n in range(20)))

    entries = await chain(storage)
    assert is_unbroken(entries)
    assert {entry.draft.object_id for entry in entries} == {draft(n).object_id for n in range(20)}


async def test_an_entry_that_was_not_committed_leaves_no_gap(storage: Database) -> None:
    for n in range(4):
        task = asyncio.create_task(_append(storage, n, fails=n % 2 == 1))
        await asyncio.wait([task])
        assert (task.exception() is None) == (n % 2 == 0)

    entries = await chain(storage)
    assert [entry.sequence for entry in entries] == [1, 2]
    assert is_unbroken(entries)


async def _append(storage: Database, n: int, *, fails: bool) -> None:
    async with storage.writing() as work:
        await work.audit.append(draft(n))
        if fails:
            raise KeyError(n)


async def test_processes_on_one_database_do_not_disturb_each_other(storage: Database, database_url: str) -> None:
    others = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", OTHER_PROCESS, database_url, str(first)),
            env={"PYTHONPATH": f"{ROOT}:{SUPPORT}"},
            stderr=subprocess.PIPE,
        )
        for first in (100, 200, 300)
    ]
    ending = asyncio.gather(*(other.communicate() for other in others))
    num_reads = 0
    while not ending.done():
        async with storage.reading() as work:
            await work.version()
        num_reads += 1

    assert [stderr for _, stderr in await ending] == [b""] * 3
    assert num_reads > 0
    entries = await chain(storage)
    assert is_unbroken(entries)
    assert len(entries) == 60
    rows = [ledger_row(n) for first in (100, 200, 300) for n in range(first, first + 20)]
    async with storage.reading() as work:
        assert await work.version() == 60
        assert (await work.ledger.page(after="", limit=100))[::-1] == [ledger_row(1), *rows]
        assert [sentence async for sentence in work.ledger.mismatches()] == []
