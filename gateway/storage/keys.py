"""API keys; of secrets only what `Secret` keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import insert, select, update

from gateway.domain.ids import KeyId, TeamId
from gateway.domain.tenancy import ApiKey, KeyHolder
from gateway.storage.secret_columns import with_secret_columns, without_secret_columns
from gateway.storage.tables import keys, organizations, teams
from gateway.storage.tenants import organization_of, team_of
from gateway.storage.transaction import Transaction

_TEAM = "team."
_ORGANIZATION = "organization."
_HOLDERS = (
    select(
        keys,
        *(column.label(_TEAM + column.name) for column in teams.c),
        *(column.label(_ORGANIZATION + column.name) for column in organizations.c),
    )
    .join(teams, teams.c.id == keys.c.team_id)
    .join(organizations, organizations.c.id == teams.c.organization_id)
)
"""A key's columns under their own names, the others' with a prefix."""


class SqlKeys:
    """See `services.stores.ApiKeyStore`."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def add(self, key: ApiKey) -> None:
        await self._transaction.run(insert(keys).values(with_secret_columns(key)))

    async def get(self, key_id: KeyId) -> ApiKey | None:
        row = await self._transaction.row(self._transaction.locking(select(keys).where(keys.c.id == key_id)))
        return None if row is None else _key_of(row)

    async def holder(self, public_id: str) -> KeyHolder | None:
        row = await self._transaction.row(_HOLDERS.where(keys.c.public_id == public_id))
        if row is None:
            return None
        return KeyHolder(
            key=_key_of({name: value for name, value in row.items() if "." not in name}),
            team=team_of(_part(row, _TEAM)),
            organization=organization_of(_part(row, _ORGANIZATION)),
        )

    async def replace(self, key: ApiKey) -> None:
        num_rows = await self._transaction.run(update(keys).where(keys.c.id == key.id).values(with_secret_columns(key)))
        assert num_rows == 1, "what is replaced was read before, and nothing is ever deleted"

    async def page(self, *, after: str, limit: int, team_id: TeamId | None = None) -> Sequence[ApiKey]:
        statement = select(keys).where(keys.c.id > after).order_by(keys.c.id).limit(limit)
        if team_id is not None:
            statement = statement.where(keys.c.team_id == team_id)
        return [_key_of(row) for row in await self._transaction.rows(statement)]


def _key_of(row: Mapping[str, Any]) -> ApiKey:
    fields = without_secret_columns(row)
    for name in ("models", "endpoints", "networks"):
        fields[name] = None if fields[name] is None else tuple(fields[name])
    return ApiKey(**fields)


def _part(row: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
