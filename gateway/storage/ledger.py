"""The ledger's rows. What is summed up from them is in `rollups` and `quotas`, what must hold in `ledger_checks`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import insert, select, tuple_

from gateway.domain.ids import OrganizationId, TeamId
from gateway.domain.ledger import Charge, HourlyUsage, LedgerRow, UsageTotals
from gateway.storage import ledger_checks, quotas, rollups
from gateway.storage.tables import ledger, rollup_queue
from gateway.storage.transaction import Row, Transaction

_CHUNK = 1000
"""Request ids in one statement: both databases bound the parameters of a statement (SQLite at 32,766)."""


class SqlLedger:
    """See `services.stores.LedgerStore`."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def post(self, rows: Sequence[LedgerRow]) -> int:
        if not rows:
            return 0
        by_id: dict[str, LedgerRow] = {}
        for row in rows:
            by_id.setdefault(row.request_id, row)
        # In order, so that two who post the same rows wait for each other one way round only.
        values = [_columns_of(row) for _, row in sorted(by_id.items())]
        statement = self._transaction.insert(ledger).on_conflict_do_nothing().returning(ledger.c.request_id)
        new = await self._transaction.run_returning(statement, values)
        if new:
            await self._transaction.run(insert(rollup_queue), [{"request_id": each} for each in new])
            await quotas.commit(self._transaction, [by_id[each] for each in new])
        return len(new)

    async def present(self, request_ids: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for start in range(0, len(request_ids), _CHUNK):
            chunk = request_ids[start : start + _CHUNK]
            rows = await self._transaction.rows(select(ledger.c.request_id).where(ledger.c.request_id.in_(chunk)))
            found.update(row["request_id"] for row in rows)
        return found

    async def rows(self, request_ids: Sequence[str]) -> Sequence[LedgerRow]:
        found: list[LedgerRow] = []
        for start in range(0, len(request_ids), _CHUNK):
            chunk = request_ids[start : start + _CHUNK]
            rows = await self._transaction.rows(select(ledger).where(ledger.c.request_id.in_(chunk)))
            found.extend(_row_of(row) for row in rows)
        return found

    async def page(self, *, after: str, limit: int, team_id: TeamId | None = None) -> Sequence[LedgerRow]:
        place = (ledger.c.closed_at_ms, ledger.c.request_id)
        statement = select(ledger).order_by(*(column.desc() for column in place)).limit(limit)
        if team_id is not None:
            statement = statement.where(ledger.c.team_id == team_id)
        if after:
            last = await self._transaction.row(select(*place).where(ledger.c.request_id == after))
            if last is None:
                return []
            statement = statement.where(tuple_(*place) < tuple_(*last.values()))
        return [_row_of(row) for row in await self._transaction.rows(statement)]

    async def committed(self, organization_id: OrganizationId, *, since_ms: int) -> Mapping[str, int]:
        return await quotas.committed(self._transaction, organization_id, since_ms=since_ms)

    async def committed_of(self, keys: Sequence[str]) -> Mapping[str, int]:
        return await quotas.committed_of(self._transaction, keys)

    async def roll_up(self, limit: int) -> int:
        return await rollups.roll_up(self._transaction, min(limit, _CHUNK))

    async def hourly(
        self, *, from_ms: int, until_ms: int, team_id: TeamId | None = None, limit: int
    ) -> Sequence[HourlyUsage]:
        return await rollups.hourly(self._transaction, from_ms=from_ms, until_ms=until_ms, team_id=team_id, limit=limit)

    def mismatches(self) -> AsyncIterator[str]:
        return ledger_checks.mismatches(self._transaction)

    async def totals(self) -> UsageTotals:
        return await rollups.totals(self._transaction)


def _columns_of(row: LedgerRow) -> dict[str, Any]:
    columns = msgspec.structs.asdict(row)
    columns["charges"] = [msgspec.structs.astuple(each) for each in row.charges] or None
    return columns


def _row_of(columns: Row) -> LedgerRow:
    """Charges that somebody has made unreadable are left out: the row can be looked at, and `ledger_checks` tells."""
    try:
        charges = msgspec.convert(columns["charges"] or (), tuple[Charge, ...])
    except msgspec.ValidationError:
        charges = ()
    return LedgerRow(**{**columns, "charges": charges})
