"""Who sends requests in tests: a well-formed key, the principal behind it, and a storage in memory."""

from __future__ import annotations

import asyncio
import copy
import string
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.domain.catalog import Alias, Model
from gateway.domain.credential import ADMIN_TOKEN, API_KEY, Peppers, issue, parse
from gateway.domain.ids import KeyId, OrganizationId, TeamId
from gateway.domain.limits.policy import Limit, Price, TopUp
from gateway.domain.principal import Principal
from gateway.domain.tenancy import ApiKey, KeyHolder, Organization, RollEntry, Secret, Team
from gateway.services.authenticate import Authenticator
from gateway.services.throttle import Guesses

KEY = "eh_TestTestTest_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG4UO6VT"
"""Well-formed, so that it is looked up and compared; nobody's outside of tests."""

PEPPERS = Peppers({"test": b"p" * 32})

PRINCIPAL = Principal(
    organization_id=OrganizationId("org_1"),
    team_id=TeamId("team_1"),
    key_id=KeyId("key_1"),
    organization="acme",
    team="red",
    public_id="TestTestTest",
)


class SteppedClock:
    """Implements `gateway.services.ports.Clock`; stands still unless it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def holder_of(raw_key: str, principal: Principal = PRINCIPAL, **key_fields: Any) -> KeyHolder:
    """The holder that a principal is made of; `key_fields` are further fields of its key."""
    public_id = parse(raw_key, API_KEY)
    assert public_id is not None, "a well-formed key"
    fields = {
        "default_class": principal.default_class,
        "models": None if principal.models is None else tuple(sorted(principal.models)),
        "endpoints": None if principal.endpoints is None else tuple(sorted(principal.endpoints)),
        "max_queue_depth": principal.max_queue_depth,
        "deadline_ms": principal.deadline_ms,
    }
    return KeyHolder(
        ApiKey(
            id=principal.key_id,
            team_id=principal.team_id,
            name="test",
            secret=Secret(public_id, *PEPPERS.digest(raw_key)),
            created_at_ms=0,
            **(fields | key_fields),
        ),
        Team(
            id=principal.team_id,
            organization_id=principal.organization_id,
            name=principal.team,
            weight=principal.team_weight,
            created_at_ms=0,
        ),
        Organization(
            id=principal.organization_id,
            name=principal.organization,
            weight=principal.organization_weight,
            time_zone=principal.time_zone,
            created_at_ms=0,
        ),
        principal.limits,
        principal.top_ups,
    )


class FixedKeys:
    """Implements `gateway.services.authenticate.Keys`: what is in `holders`; what is in `late` has to be waited for."""

    def __init__(self, *holders: KeyHolder, late: tuple[KeyHolder, ...] = ()) -> None:
        self.holders = {holder.key.secret.public_id: holder for holder in holders}
        self.late = {holder.key.secret.public_id: holder for holder in late}
        self.asked: list[str] = []

    def cached(self, public_id: str) -> KeyHolder | None:
        return self.holders.get(public_id)

    async def find(self, public_id: str) -> KeyHolder | None:
        self.asked.append(public_id)
        return self.holders.get(public_id) or self.late.get(public_id)


def fixed_authenticator(
    raw_key: str = KEY, principal: Principal = PRINCIPAL, guesses: Guesses | None = None, **key_fields: Any
) -> Authenticator:
    """Accepts this key and no other; `key_fields` are further fields of it."""
    return Authenticator(FixedKeys(holder_of(raw_key, principal, **key_fields)), PEPPERS, SteppedClock(), guesses)


def new_key() -> str:
    return issue(API_KEY)[0]


def with_other_secret(raw: str) -> str:
    """A well-formed key or token with the public id of another one, as a guesser would send it."""
    kind = ADMIN_TOKEN if raw.startswith(ADMIN_TOKEN) else API_KEY
    public_id = raw.split("_")[1]
    unchecked = f"{kind}{public_id}_{new_key().split('_')[2][:43]}"
    value, digits = zlib.crc32(unchecked.encode()), ""
    for _ in range(6):
        value, digit = divmod(value, 62)
        digits = (string.digits + string.ascii_uppercase + string.ascii_lowercase)[digit] + digits
    forged = unchecked + digits
    assert forged != raw
    assert parse(forged, kind) == parse(raw, kind) == public_id
    return forged


@dataclass
class _Tables:
    version: int = 1
    holders: dict[str, KeyHolder] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    aliases: dict[str, Alias] = field(default_factory=dict)
    prices: list[Price] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    top_ups: list[TopUp] = field(default_factory=list)


class _Keys:
    def __init__(self, storage: MemoryStorage, tables: _Tables) -> None:
        self._storage = storage
        self._tables = tables

    async def holder(self, public_id: str) -> KeyHolder | None:
        self._storage.looked_up.append(public_id)
        await self._storage.pause("holder")
        return self._tables.holders.get(public_id)


class _Teams:
    def __init__(self, storage: MemoryStorage, tables: _Tables) -> None:
        self._storage = storage
        self._tables = tables

    async def roll(self) -> list[RollEntry]:
        self._storage.num_rolls_asked += 1
        await self._storage.pause("roll")
        owners = [(each.team, each.organization) for each in self._tables.holders.values()]
        return [RollEntry(t.id, t.name, t.weight, o.id, o.name, o.weight) for t, o in owners]


class _Catalog:
    def __init__(self, storage: MemoryStorage, tables: _Tables) -> None:
        self._storage = storage
        self._tables = tables

    async def models(self) -> list[Model]:
        await self._storage.pause("models")
        return list(self._tables.models.values())

    async def aliases(self) -> list[Alias]:
        return list(self._tables.aliases.values())

    async def prices(self) -> list[Price]:
        return self._tables.prices


class _Limits:
    def __init__(self, storage: MemoryStorage, tables: _Tables) -> None:
        self._storage = storage
        self._tables = tables

    async def of(self, scope_ids: Sequence[str]) -> list[Limit]:
        await self._storage.pause("limits")
        found = [each for each in self._tables.limits if each.scope_id in scope_ids]
        return sorted(found, key=lambda each: (scope_ids.index(each.scope_id), each.name, each.model or ""))

    async def top_ups(self, scope_ids: Sequence[str], *, since_ms: int) -> list[TopUp]:
        return [each for each in self._tables.top_ups if each.scope_id in scope_ids and each.created_at_ms >= since_ms]


class _Work:
    def __init__(self, storage: MemoryStorage, tables: _Tables) -> None:
        self._storage = storage
        self._tables = tables
        self.keys = _Keys(storage, tables)
        self.teams = _Teams(storage, tables)
        self.catalog = _Catalog(storage, tables)
        self.limits = _Limits(storage, tables)

    async def version(self) -> int:
        version = self._tables.version
        self._storage.num_versions_asked += 1
        await self._storage.pause("version")
        return version


class MemoryStorage:
    """Implements the reading half of `gateway.services.stores.Storage`: version, holders, limits, catalogue and roll.

    A transaction sees what was there when it began. Tests change things through the methods below, hold up queries
    (`hold`), make them fail (`down`), and see what was asked.

    Attributes:
        down: raised by every query.
        looked_up: public ids, in order.
    """

    def __init__(self, *holders: KeyHolder) -> None:
        self._tables = _Tables()
        self._held: dict[str, asyncio.Event] = {}
        self.changed = asyncio.Event()
        self.down: Exception | None = None
        self.looked_up: list[str] = []
        self.num_versions_asked = 0
        self.num_listings_asked = 0
        self.num_rolls_asked = 0
        self.num_reading = 0
        self.most_reading = 0
        for holder in holders:
            self.put(holder)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Any]:
        if self.down is not None:
            raise self.down
        self.num_reading += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        try:
            yield _Work(self, copy.deepcopy(self._tables))
        finally:
            self.num_reading -= 1
            self._note_change()

    def put(self, holder: KeyHolder) -> None:
        """Enter or replace a key with those it belongs to; counts as a change. So do the other ones."""
        self._tables.holders[holder.key.secret.public_id] = holder
        self._tables.version += 1

    def revoke(self, holder: KeyHolder) -> None:
        key = msgspec.structs.replace(holder.key, revoked_at_ms=1)
        self.put(msgspec.structs.replace(holder, key=key))

    def put_model(self, model: Model) -> None:
        self._tables.models[model.name] = model
        self._tables.version += 1

    def put_alias(self, alias: Alias) -> None:
        self._tables.aliases[alias.name] = alias
        self._tables.version += 1

    def put_price(self, price: Price) -> None:
        self._tables.prices.append(price)
        self._tables.version += 1

    def put_limit(self, limit: Limit) -> None:
        place = (limit.scope_id, limit.model, limit.name)
        others = [each for each in self._tables.limits if (each.scope_id, each.model, each.name) != place]
        self._tables.limits = [*others, limit]
        self._tables.version += 1

    def put_top_up(self, top_up: TopUp) -> None:
        self._tables.top_ups.append(top_up)
        self._tables.version += 1

    def set_back(self) -> None:
        """As a database that was restored from a backup."""
        self._tables = _Tables()

    def hold(self, query: str) -> asyncio.Event:
        """From now on queries of this kind (``version``, ``holder``, ``limits``, ``models``, ``roll``) wait for the
        event."""
        self._held[query] = asyncio.Event()
        return self._held[query]

    def let_through(self, query: str) -> None:
        """Hold up no further ones; those that wait still wait for their event."""
        del self._held[query]

    async def pause(self, query: str) -> None:
        self._note_change()
        if query == "models":
            self.num_listings_asked += 1
        if query in self._held:
            await self._held[query].wait()
        else:
            await asyncio.sleep(0)
        if self.down is not None:
            raise self.down

    async def wait_idle(self) -> None:
        """Until no transaction is open, and those who waited for the last one have gone on."""
        await self.wait_until(lambda: not self.num_reading)

    async def wait_until(self, is_so: Any) -> None:
        """Until something is so; looks again at every query, and when one has ended."""
        async with asyncio.timeout(5):
            while not is_so():
                await self.changed.wait()

    def _note_change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
