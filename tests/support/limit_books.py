"""Both sides of the books of one customer: what the store of limits has in Redis, and what the ledger was charged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import redis
from cluster import SharedCluster
from limit_kit import Customer, LimitOffice, eventually

from gateway.domain.ledger import LedgerRow
from gateway.limits.redis_scripts import prefix


class Amount(NamedTuple):
    committed: int
    reserved: int


class StoreBooks(NamedTuple):
    """What Redis has of an organization at one moment.

    Attributes:
        quotas: by the key of the meter.
        slots: requests at a time, by the key of the meter; those that nobody holds are left out.
        requests: that have a reservation, with the end of their leases by Redis' clock, which is at `now_ms`.
        is_known: hard quotas hold; else the store has lost them.
    """

    quotas: Mapping[str, Amount]
    slots: Mapping[str, int]
    requests: Mapping[str, int]
    now_ms: int
    is_known: bool

    @property
    def committed(self) -> Mapping[str, int]:
        return {key: amount.committed for key, amount in self.quotas.items() if amount.committed}

    @property
    def reserved(self) -> int:
        """Over all quotas."""
        return sum(amount.reserved for amount in self.quotas.values())

    @property
    def is_idle(self) -> bool:
        return not self.requests and not self.slots and not self.reserved


def store_books(cluster: SharedCluster, customer: Customer) -> StoreBooks:
    """Raises `redis.RedisError` if Redis does not answer."""
    of = prefix(customer.organization_id)
    with redis.Redis.from_url(cluster.redis.url, decode_responses=True, socket_timeout=5) as client:
        names = [name.removeprefix(of) for name in client.scan_iter(f"{of}*", count=1000)]
        names = [name for name in names if name[:2] in ("q:", "l:")]
        with client.pipeline(transaction=True) as pipe:
            for name in names:
                pipe.get(of + name)
            pipe.zrange(f"{of}due", 0, -1, withscores=True)
            pipe.time()
            pipe.exists(f"{of}epoch")
            *values, due, (now_s, now_us), is_known = pipe.execute()
    figures = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    return StoreBooks(
        quotas={name[2:]: Amount(*map(int, kept.split())) for name, kept in figures.items() if name.startswith("q:")},
        slots={name[2:]: int(kept) for name, kept in figures.items() if name.startswith("l:") and int(kept)},
        requests={request_id: int(due_ms) for request_id, due_ms in due},
        now_ms=now_s * 1000 + now_us // 1000,
        is_known=bool(is_known),
    )


def charged(rows: Sequence[LedgerRow]) -> Mapping[str, int]:
    """Of each quota the sum of what the rows were charged."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({each.key: each.units for each in row.charges})
    return +sums


async def balanced(
    cluster: SharedCluster, office: LimitOffice, customer: Customer, within_s: float = 20.0
) -> StoreBooks:
    """Wait until nothing is held any more and the store, the ledger's rows and the ledger's sums say the same."""
    seen = "nothing"

    async def is_so() -> bool:
        nonlocal seen
        try:
            books = store_books(cluster, customer)
        except redis.RedisError as e:
            seen = repr(e)
            return False
        rows = await office.rows(customer)
        sums = {key: units for key, units in (await office.committed(customer)).items() if units}
        seen = f"store {books}, rows {charged(rows)}, sums {sums}"
        return books.is_idle and books.committed == charged(rows) == sums

    try:
        await eventually(is_so, "the books balance", within_s)
    except AssertionError as e:
        raise AssertionError(f"{e}: {seen}") from None
    return store_books(cluster, customer)
