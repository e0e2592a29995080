"""Processes that admit, settle and post requests without an engine, and a store of limits that can be lost or away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
from metering_kit import NOTHING_YET, PRINCIPAL, Clock, Finals, MemoryStorage, record

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.ledger import LedgerRow, Opening
from gateway.domain.limits.admission import Settlement
from gateway.domain.limits.policy import Limit, Rule
from gateway.domain.principal import Principal
from gateway.domain.record import RequestInfo
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable
from gateway.journal.folder import JournalFolder
from gateway.journal.writer import JournalWriter
from gateway.limits.memory import MemoryLimits
from gateway.services.grants import Grant
from gateway.services.limit_keeping import LimitKeeping
from gateway.services.limiter import Limiter
from gateway.services.metering import MeteringRecorder
from gateway.services.ports import Prepared
from gateway.services.posting import Poster
from gateway.services.quota_alerts import QuotaAlerts
from gateway.services.recovery import Recovery
from gateway.services.stores import Storage

PROMPT_TOKENS = 20


def customer(*rules: Rule, organization_id: str = PRINCIPAL.organization_id, is_shadow: bool = False) -> Principal:
    """A key that is held to these rules."""
    limits = tuple(
        Limit(scope="key", scope_id=PRINCIPAL.key_id, rule=rule, is_shadow=is_shadow, changed_at_ms=0) for rule in rules
    )
    return msgspec.structs.replace(PRINCIPAL, organization_id=OrganizationId(organization_id), limits=limits)


class SharedStore(MemoryLimits):
    """Outlives the processes that use it.

    Attributes:
        away: organizations of which it answers nothing but admissions.
        born: another number means that it was lost meanwhile.
        reported: organizations, once for each report.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda: int(clock.time() * 1000))
        self.away: set[str] = set()
        self.born = 1
        self.reported: list[str] = []

    def lose(self) -> None:
        self._books.clear()
        self.born += 1

    async def born_ms(self) -> int | None:
        return self.born

    async def settle(
        self, organization_id: OrganizationId, request_id: RequestId, usage: TokenUsage
    ) -> Settlement | None:
        self._answer(organization_id)
        return await super().settle(organization_id, request_id, usage)

    async def report(
        self, organization_id: OrganizationId, outputs: Mapping[RequestId, int], lease_ms: int
    ) -> Sequence[RequestId]:
        self._answer(organization_id)
        self.reported.append(organization_id)
        return await super().report(organization_id, outputs, lease_ms)

    def _answer(self, organization_id: OrganizationId) -> None:
        if organization_id in self.away:
            raise LimitsUnavailable


class _Prepared(msgspec.Struct):
    model: str = "scripted"
    num_prompt_tokens: int = PROMPT_TOKENS
    prompt_lengths: tuple[int, ...] = (PROMPT_TOKENS,)
    output_caps: tuple[int, ...] = (100,)


class Process:
    """One with a journal in this home; others may come after it, or run beside it."""

    def __init__(self, home: Path, store: SharedStore, ledger: MemoryStorage, clock: Clock, name: str) -> None:
        self.name, self.clock = name, clock
        folder = JournalFolder(home)
        self.limiter = Limiter(store, clock, owner=name)
        self.keeping = LimitKeeping(self.limiter, cast("Storage", ledger), clock)
        self.alerts = QuotaAlerts(cast("Storage", ledger), clock, self.limiter.quotas.get)
        self.journal = JournalWriter(folder, name)
        self.recorder = MeteringRecorder(self.journal, clock)
        self.poster = Poster(self.journal, ledger, self._posted, self.keeping.is_told)
        self.recovery = Recovery(
            folder,
            ledger,
            Finals(),
            clock,
            writer_id=name,
            is_open=self.recorder.is_open,
            on_posted=self._recovered,
            is_told=self.keeping.is_told,
        )

    def _posted(self, rows: Sequence[LedgerRow]) -> None:
        self.recorder.posted(rows)
        self.keeping.posted(rows)
        self.alerts.posted(rows)

    def _recovered(self, rows: Sequence[LedgerRow]) -> None:
        self.keeping.recovered(rows)
        self.alerts.posted(rows)

    async def begin(self, name: str, principal: Principal) -> tuple[Grant, Opening]:
        """A request that runs."""
        info = RequestInfo(
            request_id=RequestId(name), principal=principal, request_class="interactive", endpoint="chat", stream=False
        )
        grant = await self.limiter.admit(info, cast("Prepared", _Prepared()), (), num_choices=1)
        opening = Opening(
            request_id=info.request_id,
            opened_at_ms=int(self.clock.time() * 1000),
            organization_id=principal.organization_id,
            team_id=principal.team_id,
            key_id=principal.key_id,
            model="scripted",
            requested_model="scripted",
            endpoint="chat",
            stream=False,
            request_class=grant.request_class,
            prompt_tokens=PROMPT_TOKENS,
            quotas=grant.plan.quotas,
        )
        self.recorder.opened(opening, NOTHING_YET)
        return grant, opening

    async def end(self, grant: Grant, opening: Opening, completion_tokens: int) -> None:
        settled = record(opening, completion_tokens=completion_tokens)
        await self.limiter.settle(grant, settled.usage)
        self.recorder.settled(settled)

    async def answer(self, name: str, principal: Principal, completion_tokens: int = 80) -> Grant:
        """A request from its admission to its row in the journal."""
        grant, opening = await self.begin(name, principal)
        await self.end(grant, opening, completion_tokens)
        return grant

    async def leave(self) -> None:
        """End in order."""
        is_finished = await self.poster.drain(1)
        self.journal.close(remove=is_finished)

    async def left(self, grant: Grant) -> int:
        """Of the first quota of the request, by the store."""
        return (await self.limiter.store.look(grant.organization_id, grant.plan.uses))[0]
