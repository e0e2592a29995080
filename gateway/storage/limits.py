"""What administrators set of limits and top-ups, and what was told of quotas. How much is used is in `quotas`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import delete, insert, select, tuple_

from gateway.domain.ids import OrganizationId
from gateway.domain.limits.policy import Limit, Rule, Scope, TopUp
from gateway.storage.tables import limits, quota_alerts, top_ups
from gateway.storage.transaction import Row, Transaction

_ALL_MODELS = ""
_PLACE = (limits.c.scope_id, limits.c.name, limits.c.model)
_CHUNK = 1000
"""Scopes in one statement."""


class SqlLimits:
    """See `services.stores.LimitPolicyStore`."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def set(self, limit: Limit) -> None:
        statement = self._transaction.insert(limits).values(_columns_of(limit))
        place = [column.name for column in _PLACE]
        rest = {column.name: statement.excluded[column.name] for column in limits.c if column.name not in place}
        await self._transaction.run(statement.on_conflict_do_update(index_elements=place, set_=rest))

    async def remove(self, scope_id: str, model: str | None, name: str) -> bool:
        return await self._transaction.run(delete(limits).where(*_is_at(scope_id, model, name))) == 1

    async def get(self, scope_id: str, model: str | None, name: str) -> Limit | None:
        statement = select(limits).where(*_is_at(scope_id, model, name))
        row = await self._transaction.row(self._transaction.locking(statement))
        return None if row is None else _limit_of(row)

    async def of(self, scope_ids: Sequence[str]) -> Sequence[Limit]:
        found: list[Limit] = []
        order = {scope_id: place for place, scope_id in enumerate(dict.fromkeys(scope_ids))}
        for chunk in _chunks(list(order)):
            statement = select(limits).where(limits.c.scope_id.in_(chunk))
            rows = await self._transaction.rows(self._transaction.locking(statement))
            found.extend(_limit_of(row) for row in rows)
        return sorted(found, key=lambda each: (order[each.scope_id], each.name, each.model or _ALL_MODELS))

    async def page(self, *, after: tuple[str, str, str], limit: int, scope: Scope | None = None) -> Sequence[Limit]:
        statement = select(limits).where(tuple_(*_PLACE) > tuple_(*after)).order_by(*_PLACE).limit(limit)
        if scope is not None:
            statement = statement.where(limits.c.scope == scope)
        return [_limit_of(row) for row in await self._transaction.rows(statement)]

    async def add_top_up(self, top_up: TopUp) -> None:
        await self._transaction.run(insert(top_ups).values(_columns_of(top_up)))

    async def top_ups(self, scope_ids: Sequence[str], *, since_ms: int) -> Sequence[TopUp]:
        found: list[TopUp] = []
        for chunk in _chunks(list(dict.fromkeys(scope_ids))):
            statement = select(top_ups).where(top_ups.c.scope_id.in_(chunk), top_ups.c.created_at_ms >= since_ms)
            found.extend(TopUp(**_fields_of(row)) for row in await self._transaction.rows(statement))
        return sorted(found, key=lambda each: each.id)

    async def alert(self, key: str, percent: int, *, organization_id: OrganizationId, at_ms: int) -> bool:
        columns = {"key": key, "percent": percent, "organization_id": organization_id, "at_ms": at_ms}
        statement = self._transaction.insert(quota_alerts).values(columns).on_conflict_do_nothing()
        return await self._transaction.run(statement) == 1

    async def alerts_of(self, keys: Sequence[str]) -> Mapping[str, Sequence[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for chunk in _chunks(list(dict.fromkeys(keys))):
            statement = select(quota_alerts).where(quota_alerts.c.key.in_(chunk))
            for row in await self._transaction.rows(statement):
                found.setdefault(row["key"], []).append((row["percent"], row["at_ms"]))
        return found

    async def alerts(self, organization_id: OrganizationId, *, limit: int) -> Sequence[tuple[str, int, int]]:
        statement = (
            select(quota_alerts)
            .where(quota_alerts.c.organization_id == organization_id)
            .order_by(quota_alerts.c.at_ms.desc(), quota_alerts.c.key, quota_alerts.c.percent.desc())
            .limit(limit)
        )
        return [(row["key"], row["percent"], row["at_ms"]) for row in await self._transaction.rows(statement)]


def _is_at(scope_id: str, model: str | None, name: str) -> tuple[Any, ...]:
    return limits.c.scope_id == scope_id, limits.c.name == name, limits.c.model == (model or _ALL_MODELS)


def _columns_of(value: Limit | TopUp) -> dict[str, Any]:
    columns = msgspec.structs.asdict(value)
    columns["model"] = value.model or _ALL_MODELS
    if isinstance(value, Limit):
        columns |= {"name": value.name, "rule": msgspec.to_builtins(value.rule)}
    return columns


def _fields_of(row: Row) -> dict[str, Any]:
    return {**row, "model": row["model"] or None}


def _limit_of(row: Row) -> Limit:
    """The name is the rule's own, and a column only for the key."""
    fields = _fields_of(row)
    del fields["name"]
    return Limit(**fields | {"rule": msgspec.convert(row["rule"], Rule)})


def _chunks(values: Sequence[str]) -> Sequence[Sequence[str]]:
    return [values[start : start + _CHUNK] for start in range(0, len(values), _CHUNK)]
