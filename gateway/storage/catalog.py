"""Models, aliases and prices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import delete, insert, select, update

from gateway.domain.catalog import Alias, Model
from gateway.domain.limits.policy import Price
from gateway.storage.tables import aliases, models, prices
from gateway.storage.transaction import Transaction


class SqlCatalog:
    """See `services.stores.CatalogStore`."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def models(self) -> Sequence[Model]:
        statement = self._transaction.locking(select(models).order_by(models.c.name))
        return [Model(**row) for row in await self._transaction.rows(statement)]

    async def enter_model(self, model: Model) -> bool:
        statement = self._transaction.insert(models).values(msgspec.structs.asdict(model)).on_conflict_do_nothing()
        return await self._transaction.run(statement) == 1

    async def replace_model(self, model: Model) -> None:
        statement = update(models).where(models.c.name == model.name).values(msgspec.structs.asdict(model))
        num_rows = await self._transaction.run(statement)
        assert num_rows == 1, "what is replaced was read before, and no model is ever deleted"

    async def aliases(self) -> Sequence[Alias]:
        statement = self._transaction.locking(select(aliases).order_by(aliases.c.name))
        return [Alias(**row) for row in await self._transaction.rows(statement)]

    async def add_alias(self, alias: Alias) -> None:
        statement = insert(aliases).values(msgspec.structs.asdict(alias))
        await self._transaction.run_unique(statement, f"There is an alias named '{alias.name}' already.")

    async def replace_alias(self, alias: Alias) -> None:
        statement = update(aliases).where(aliases.c.name == alias.name).values(msgspec.structs.asdict(alias))
        num_rows = await self._transaction.run(statement)
        assert num_rows == 1, "what is replaced was read, and locked, before"

    async def remove_alias(self, name: str) -> None:
        await self._transaction.run(delete(aliases).where(aliases.c.name == name))

    async def prices(self) -> Sequence[Price]:
        statement = select(prices).order_by(prices.c.model, prices.c.valid_from_ms)
        return [Price(**row) for row in await self._transaction.rows(statement)]

    async def add_price(self, price: Price) -> None:
        statement = insert(prices).values(msgspec.structs.asdict(price))
        await self._transaction.run_unique(
            statement, f"There is a price of '{price.model}' from that moment on already."
        )
