"""Admin tokens; of secrets only what `Secret` keeps."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Select, insert, select, update

from gateway.domain.ids import AdminTokenId
from gateway.domain.tenancy import AdminToken
from gateway.storage.secret_columns import with_secret_columns, without_secret_columns
from gateway.storage.tables import admin_tokens
from gateway.storage.transaction import Transaction


class SqlAdminTokens:
    """See `services.stores.AdminTokenStore`."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def add(self, token: AdminToken) -> None:
        await self._transaction.run(insert(admin_tokens).values(with_secret_columns(token)))

    async def get(self, token_id: AdminTokenId) -> AdminToken | None:
        return await self._one(self._transaction.locking(select(admin_tokens).where(admin_tokens.c.id == token_id)))

    async def by_public_id(self, public_id: str) -> AdminToken | None:
        return await self._one(select(admin_tokens).where(admin_tokens.c.public_id == public_id))

    async def replace(self, token: AdminToken) -> None:
        statement = update(admin_tokens).where(admin_tokens.c.id == token.id).values(with_secret_columns(token))
        num_rows = await self._transaction.run(statement)
        assert num_rows == 1, "what is replaced was read before, and nothing is ever deleted"

    async def page(self, *, after: str, limit: int) -> Sequence[AdminToken]:
        statement = select(admin_tokens).where(admin_tokens.c.id > after).order_by(admin_tokens.c.id).limit(limit)
        rows = await self._transaction.rows(statement)
        return [AdminToken(**without_secret_columns(row)) for row in rows]

    async def _one(self, statement: Select[tuple[object, ...]]) -> AdminToken | None:
        row = await self._transaction.row(statement)
        return None if row is None else AdminToken(**without_secret_columns(row))
