"""Hourly sums of the ledger.

A ledger row is in the hourly sums or its id is in the queue, never both and never neither: the id enters the queue with
the row, and leaves it in the transaction that adds the row to the sums. So sums and queue together are exact at any
moment, and ledger rows never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, FromClause, Label, Select, cast, delete, func, literal, select, union_all

from gateway.domain.ids import TeamId
from gateway.domain.ledger import HOUR_MS, HourlyUsage, UsageTotals
from gateway.storage.tables import hourly_usage, ledger, rollup_queue
from gateway.storage.transaction import LONG_S, Row, Transaction, Turn

GROUP = ("hour_ms", "organization_id", "team_id", "key_id", "model")
SUMS = UsageTotals.__struct_fields__

hour_of_row = (ledger.c.closed_at_ms - ledger.c.closed_at_ms % HOUR_MS).label("hour_ms")


def rows_as_usage() -> Select[Any]:
    """Ledger rows with the columns of `hourly_usage`, each row a usage of its own."""
    return select(
        hour_of_row,
        *(ledger.c[name] for name in GROUP[1:]),
        literal(1, BigInteger).label(SUMS[0]),
        *(ledger.c[name] for name in SUMS[1:]),
    )


def queued_rows_as_usage() -> Select[Any]:
    """Those that are not in the hourly sums yet."""
    return rows_as_usage().join_from(rollup_queue, ledger, ledger.c.request_id == rollup_queue.c.request_id)


def total(rows: FromClause, name: str) -> Label[int]:
    """A sum that is an integer in both databases (PostgreSQL's is a decimal number) and 0 over no rows."""
    return cast(func.coalesce(func.sum(rows.c[name]), 0), BigInteger).label(name)


async def roll_up(transaction: Transaction, limit: int) -> int:
    """See `services.stores.LedgerStore.roll_up`."""
    if not await transaction.try_turn(Turn.ROLL_UP):
        return 0
    some = select(rollup_queue.c.request_id).order_by(rollup_queue.c.request_id).limit(limit).scalar_subquery()
    taken = await transaction.rows(
        delete(rollup_queue).where(rollup_queue.c.request_id.in_(some)).returning(rollup_queue.c.request_id)
    )
    if not taken:
        return 0
    rows = rows_as_usage().where(ledger.c.request_id.in_([row["request_id"] for row in taken])).subquery()
    usages = await transaction.rows(
        select(*(rows.c[name] for name in GROUP), *(total(rows, name) for name in SUMS))
        .group_by(*(rows.c[name] for name in GROUP))
        .order_by(*(rows.c[name] for name in GROUP))
    )
    statement = transaction.insert(hourly_usage)
    added = {name: hourly_usage.c[name] + statement.excluded[name] for name in SUMS}
    await transaction.run(
        statement.on_conflict_do_update(index_elements=list(GROUP), set_=added), [dict(usage) for usage in usages]
    )
    return len(taken)


async def hourly(
    transaction: Transaction, *, from_ms: int, until_ms: int, team_id: TeamId | None, limit: int
) -> Sequence[HourlyUsage]:
    """See `services.stores.LedgerStore.hourly`."""
    sums = select(hourly_usage).where(hourly_usage.c.hour_ms >= from_ms, hourly_usage.c.hour_ms < until_ms)
    queued = queued_rows_as_usage().where(hour_of_row >= from_ms, hour_of_row < until_ms)
    if team_id is not None:
        sums = sums.where(hourly_usage.c.team_id == team_id)
        queued = queued.where(ledger.c.team_id == team_id)
    both = union_all(sums, queued).subquery()
    rows = await transaction.rows(
        select(*(both.c[name] for name in GROUP), *(total(both, name) for name in SUMS))
        .group_by(*(both.c[name] for name in GROUP))
        .order_by(both.c.hour_ms, both.c.key_id, both.c.model)
        .limit(limit)
    )
    return [HourlyUsage(**{name: row[name] for name in GROUP}, totals=_totals_of(row)) for row in rows]


async def totals(transaction: Transaction) -> UsageTotals:
    """See `services.stores.LedgerStore.totals`."""
    rows = rows_as_usage().subquery()
    (row,) = await transaction.rows(select(*(total(rows, name) for name in SUMS)), limit_s=LONG_S)
    return _totals_of(row)


def _totals_of(row: Row) -> UsageTotals:
    return UsageTotals(**{name: row[name] for name in SUMS})
