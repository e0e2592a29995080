"""The audit's chain on real databases: what somebody who writes to the table by hand cannot hide."""

from __future__ import annotations

import msgspec
import pytest
from admin_kit import ACTOR, Office
from sqlalchemy import Executable, delete, update

from gateway.domain.audit import chain_hash
from gateway.services.audit import breaks
from gateway.services.stores import Storage
from gateway.storage.tables import audit


@pytest.fixture
async def office(storage: Storage) -> Office:
    """With five entries."""
    office = Office(storage)
    for n in range(5):
        await office.admin.tenants.create_organization(ACTOR, name=f"o{n}")
    return office


async def _found(storage: Storage) -> list[str]:
    return [each async for each in breaks(storage)]


async def test_a_chain_that_was_left_alone_is_whole(office: Office, storage: Storage) -> None:
    assert await _found(storage) == []


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (update(audit).where(audit.c.sequence == 3).values(actor="cli:nobody"), ["Entry 3 is not what was written"]),
        (update(audit).where(audit.c.sequence == 1).values(after="{}"), ["Entry 1 is not what was written"]),
        (delete(audit).where(audit.c.sequence == 2), ["Entry 3 comes where 2 was expected"]),
        (delete(audit).where(audit.c.sequence == 1), ["Entry 2 comes where 1 was expected"]),
        (
            update(audit).where(audit.c.sequence == 2).values(hash=b"\x01" * 32),
            ["Entry 2 is not what was written", "Entry 3 is not what was written"],
        ),
    ],
)
async def test_what_was_changed_or_removed_is_named(
    office: Office, storage: Storage, statement: Executable, expected: list[str]
) -> None:
    async with storage.writing() as work:
        await work._transaction.run(statement)  # type: ignore[attr-defined]

    found = await _found(storage)
    assert len(found) == len(expected)
    assert all(line.startswith(begin) for line, begin in zip(found, expected, strict=True))


async def test_an_entry_forged_with_its_hash_is_found_at_the_next_one(office: Office, storage: Storage) -> None:
    """Every hash takes in the one before it, so that a forger had to write all later entries anew."""
    third = (await office.audit())[2]
    forged = msgspec.structs.replace(third.draft, actor="cli:nobody")
    new_hash = chain_hash(3, forged, third.previous_hash)
    async with storage.writing() as work:
        for statement in (
            update(audit).where(audit.c.sequence == 3).values(actor=forged.actor, hash=new_hash),
            update(audit).where(audit.c.sequence == 4).values(previous_hash=new_hash),
        ):
            await work._transaction.run(statement)  # type: ignore[attr-defined]

    [found] = await _found(storage)
    assert found.startswith("Entry 4 is not what was written")
