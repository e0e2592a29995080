"""Requests to be metered, and stand-ins at the ports of the metering: a ledger in memory, engines' final counts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gateway.domain.ids import KeyId, OrganizationId, RequestId, TeamId
from gateway.domain.ledger import Charge, Counted, LedgerRow, Opening
from gateway.domain.limits.meters import TOKENS, Weights
from gateway.domain.principal import Principal
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.usage import EngineTimings, Outcome, TokenUsage
from gateway.errors import StorageDown
from gateway.services.metering import EngineFinal
from gateway.services.recovery import FinalsPage

NOW_MS = 1_900_000_000_000
TIMINGS = EngineTimings(queue_us=10, prefill_us=20, decode_us=30, preempted_us=40, engine_us=50, parked_us=60)
PRINCIPAL = Principal(
    organization_id=OrganizationId("org_1"),
    team_id=TeamId("team_1"),
    key_id=KeyId("key_1"),
    organization="acme",
    team="red",
)


PRICE = Weights(prompt=500_000, cached=50_000, output=2_000_000)
TOKEN_QUOTA = Counted("quota-tokens/month:org_1:2030-03:", NOW_MS + 1_000_000_000, TOKENS)
MONEY_QUOTA = Counted("quota-microusd/day:team_1:2030-03-17:scripted", NOW_MS + 10_000_000, PRICE)


class Told:
    """A running request that has been told so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.usage = TokenUsage(completion_tokens=num_tokens)


NOTHING_YET = Told(0)


class OwnRequests:
    """Implements `gateway.services.lookup.OwnRequests`."""

    def __init__(self) -> None:
        self.known: dict[str, Opening | LedgerRow] = {}

    def find(self, request_id: str) -> Opening | LedgerRow | None:
        return self.known.get(request_id)


def opening(name: str, *, prompt_tokens: int = 20, num_parts: int = 1, opened_at_ms: int = NOW_MS) -> Opening:
    """It has a price, and counts for a quota of tokens and one of money."""
    return Opening(
        request_id=RequestId(name),
        opened_at_ms=opened_at_ms,
        organization_id=PRINCIPAL.organization_id,
        team_id=PRINCIPAL.team_id,
        key_id=PRINCIPAL.key_id,
        model="scripted",
        requested_model="alias",
        endpoint="chat",
        stream=True,
        request_class="interactive",
        prompt_tokens=prompt_tokens,
        num_parts=num_parts,
        price=PRICE,
        quotas=(TOKEN_QUOTA, MONEY_QUOTA),
    )


def record(opened: Opening, *, completion_tokens: int = 8, outcome: Outcome = "finished") -> RequestRecord:
    info = RequestInfo(
        request_id=opened.request_id,
        principal=PRINCIPAL,
        request_class=opened.request_class,
        endpoint=opened.endpoint,
        stream=opened.stream,
    )
    return RequestRecord(
        info=info,
        opening=opened,
        closed_at_ms=opened.opened_at_ms + 500,
        outcome=outcome,
        usage=TokenUsage(prompt_tokens=opened.prompt_tokens, completion_tokens=completion_tokens, cached_tokens=16),
        timings=EngineTimings(queue_us=1, prefill_us=2, decode_us=3, preempted_us=4, engine_us=5, parked_us=6),
        finish_reason="stop",
        error_code=None,
        first_delta_s=0.25,
        total_s=0.5,
        inter_token_s=[],
    )


@dataclass
class Clock:
    """Implements `gateway.services.ports.Clock`; stands still until it is moved."""

    now_s: float = NOW_MS / 1000

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Final:
    """Implements `gateway.services.metering.EngineFinal`."""

    request_id: str
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    timings: EngineTimings = TIMINGS


@dataclass
class Finals:
    """Implements `gateway.services.recovery.FinalsSource`: engines that keep these until they are acknowledged."""

    kept: dict[str, list[Final]] = field(default_factory=dict)
    is_complete: bool = True

    async def collect(self, writer_id: str, acknowledge: Sequence[str] = ()) -> FinalsPage:
        rest = [final for final in self.kept.get(writer_id, []) if final.request_id not in set(acknowledge)]
        self.kept[writer_id] = rest
        finals: Sequence[EngineFinal] = list(rest)
        return FinalsPage(finals, self.is_complete)


class Crash(BaseException):
    """The process dies here."""


class MemoryStorage:
    """Implements what the metering uses of `gateway.services.stores.Storage`.

    Attributes:
        rows: the ledger.
        before_reading: awaited when the next one begins to read.
        alerts: what administrators were told of quotas: key and percent.
        num_conflicts: rows that were posted again with other values, and left alone.
        is_down: transactions raise `StorageDown`.
        crash_before, crash_after: the commit with this number (from 1) does not come about, or comes about and nobody
            learns of it.
    """

    def __init__(self) -> None:
        self.rows: dict[str, LedgerRow] = {}
        self.queue: list[str] = []
        self.alerts: list[tuple[str, int]] = []
        self.before_reading: list[Callable[[], Awaitable[None]]] = []
        self.num_conflicts = 0
        self.num_posts = 0
        self.num_commits = 0
        self.is_down = False
        self.crash_before: int | None = None
        self.crash_after: int | None = None

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Any]:
        if self.is_down:
            raise StorageDown
        while self.before_reading:
            await self.before_reading.pop()()
        yield SimpleNamespace(ledger=_Ledger(self, {}), limits=_Alerts(self))

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[Any]:
        if self.is_down:
            raise StorageDown
        new: dict[str, LedgerRow] = {}
        yield SimpleNamespace(ledger=_Ledger(self, new), limits=_Alerts(self))
        self.num_commits += 1
        if self.num_commits == self.crash_before:
            raise Crash
        self.rows.update(new)
        self.queue.extend(new)
        if self.num_commits == self.crash_after:
            raise Crash


class _Ledger:
    def __init__(self, storage: MemoryStorage, new: dict[str, LedgerRow]) -> None:
        self._storage = storage
        self._new = new

    async def post(self, rows: Sequence[LedgerRow]) -> int:
        self._storage.num_posts += 1
        for row in rows:
            known = self._storage.rows.get(row.request_id)
            if known is None:
                self._new[row.request_id] = row
            else:
                self._storage.num_conflicts += known != row
        return len(self._new)

    async def rows(self, request_ids: Iterable[str]) -> list[LedgerRow]:
        return [self._storage.rows[each] for each in request_ids if each in self._storage.rows]

    async def present(self, request_ids: Iterable[str]) -> set[str]:
        return set(request_ids) & self._storage.rows.keys()

    async def committed(self, organization_id: str, *, since_ms: int) -> dict[str, int]:
        rows = [row for row in self._storage.rows.values() if row.organization_id == organization_id]
        return _sums(charge for row in rows for charge in row.charges if charge.ends_at_ms >= since_ms)

    async def committed_of(self, keys: Sequence[str]) -> dict[str, int]:
        rows = self._storage.rows.values()
        return _sums(charge for row in rows for charge in row.charges if charge.key in keys)

    async def roll_up(self, limit: int) -> int:
        rolled, self._storage.queue = self._storage.queue[:limit], self._storage.queue[limit:]
        return len(rolled)


class _Alerts:
    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    async def alert(self, key: str, percent: int, *, organization_id: str, at_ms: int) -> bool:
        if (key, percent) in self._storage.alerts:
            return False
        self._storage.alerts.append((key, percent))
        return True


def _sums(charges: Iterable[Charge]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for charge in charges:
        sums[charge.key] = sums.get(charge.key, 0) + charge.units
    return sums
