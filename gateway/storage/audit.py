"""The audit trail's chain."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import insert, select

from gateway.domain.audit import GENESIS, AuditDraft, AuditEntry, chain_hash
from gateway.storage.tables import audit
from gateway.storage.transaction import Row, Transaction, Turn


class SqlAudit:
    """See `services.stores.AuditStore`."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def append(self, draft: AuditDraft) -> AuditEntry:
        # Without the turn two transactions would both see the same last entry.
        await self._transaction.take_turn(Turn.CHANGE)
        statement = select(audit.c.sequence, audit.c.hash).order_by(audit.c.sequence.desc()).limit(1)
        last = await self._transaction.row(statement)
        sequence, previous_hash = (last["sequence"] + 1, last["hash"]) if last else (1, GENESIS)
        entry = AuditEntry(
            sequence=sequence,
            draft=draft,
            previous_hash=previous_hash,
            hash=chain_hash(sequence, draft, previous_hash),
        )
        columns = msgspec.structs.asdict(draft) | {
            "sequence": sequence,
            "previous_hash": previous_hash,
            "hash": entry.hash,
        }
        await self._transaction.run(insert(audit).values(columns))
        return entry

    async def page(self, *, after: int, limit: int) -> Sequence[AuditEntry]:
        statement = select(audit).where(audit.c.sequence > after).order_by(audit.c.sequence).limit(limit)
        return [_entry_of(row) for row in await self._transaction.rows(statement)]


def _entry_of(row: Row) -> AuditEntry:
    draft = AuditDraft(**{name: row[name] for name in AuditDraft.__struct_fields__})
    return AuditEntry(sequence=row["sequence"], draft=draft, previous_hash=row["previous_hash"], hash=row["hash"])
