"""What is committed of quotas: the sums of the ledger rows' charges, kept with the rows and never behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import case, select

from gateway.domain.ids import OrganizationId
from gateway.domain.ledger import LedgerRow
from gateway.storage.tables import quota_usage
from gateway.storage.transaction import Transaction

_CHUNK = 1000
"""Keys in one statement: both databases bound the parameters of a statement (SQLite at 32,766)."""


async def commit(transaction: Transaction, rows: Iterable[LedgerRow]) -> None:
    """Add the charges of rows that have just been written. Nobody sees the one without the other.

    Each key once and in order: a row of the table is held until the transaction ends, so two who commit at once wait
    for each other one way round only. The statement is sent once, with all keys as its sets of parameters; one for each
    number of keys would fill the driver's cache of statements.
    """
    sums: dict[str, tuple[OrganizationId, int, int]] = {}
    for row in rows:
        for charge in row.charges:
            _, ends_at_ms, units = sums.get(charge.key, (row.organization_id, 0, 0))
            sums[charge.key] = row.organization_id, max(ends_at_ms, charge.ends_at_ms), units + charge.units
    if not sums:
        return
    statement = transaction.insert(quota_usage)
    new, known = statement.excluded, quota_usage.c
    added = {
        "committed": known.committed + new.committed,
        # Of one period there are two ends if the organization has moved to another time zone meanwhile.
        "ends_at_ms": case((new.ends_at_ms > known.ends_at_ms, new.ends_at_ms), else_=known.ends_at_ms),
    }
    await transaction.run(
        statement.on_conflict_do_update(index_elements=["key"], set_=added),
        [
            {"key": key, "organization_id": organization_id, "ends_at_ms": ends_at_ms, "committed": units}
            for key, (organization_id, ends_at_ms, units) in sorted(sums.items())
        ],
    )


async def committed(transaction: Transaction, organization_id: OrganizationId, *, since_ms: int) -> Mapping[str, int]:
    """See `services.stores.LedgerStore.committed`."""
    statement = select(quota_usage.c.key, quota_usage.c.committed).where(
        quota_usage.c.organization_id == organization_id, quota_usage.c.ends_at_ms >= since_ms
    )
    # Streamed: each key of the organization may have a quota a day, which takes longer than a call may otherwise.
    return {row["key"]: row["committed"] async for row in transaction.stream(statement)}


async def committed_of(transaction: Transaction, keys: Sequence[str]) -> Mapping[str, int]:
    """See `services.stores.LedgerStore.committed_of`."""
    found: dict[str, int] = {}
    for start in range(0, len(keys), _CHUNK):
        chunk = keys[start : start + _CHUNK]
        statement = select(quota_usage.c.key, quota_usage.c.committed).where(quota_usage.c.key.in_(chunk))
        found.update({row["key"]: row["committed"] for row in await transaction.rows(statement)})
    return found
