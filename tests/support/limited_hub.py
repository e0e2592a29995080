"""An inference service over one script, whose caller has limits that are kept in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from identity_kit import PRINCIPAL, SteppedClock

from gateway.backends.scripted import Script, ScriptedBackend, ScriptedGeneration, Step
from gateway.domain.events import ChoiceFinished, GenerationEvent
from gateway.domain.ids import new_request_id
from gateway.domain.ledger import Opening
from gateway.domain.limits.policy import Limit, Rule
from gateway.domain.principal import Principal
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.request import GenerationRequest, Text
from gateway.limit_opening import in_memory
from gateway.services.call import Call
from gateway.services.catalog import Catalog, FixedListing
from gateway.services.inference import Inference
from gateway.services.limit_store import LimitStore
from gateway.services.limiter import Limiter, Refresh
from gateway.services.ports import Running

MODEL = "m"
ORGANIZATION = PRINCIPAL.organization_id


def limited(*rules: Rule) -> Principal:
    """Whose key has these limits."""
    limits = tuple(Limit(scope="key", scope_id=PRINCIPAL.key_id, rule=rule, changed_at_ms=0) for rule in rules)
    return msgspec.structs.replace(PRINCIPAL, limits=limits)


def cause(events: Sequence[GenerationEvent]) -> str | None:
    """Why the only answer was cut."""
    [end] = [event for event in events if isinstance(event, ChoiceFinished)]
    return end.cause


class LimitedHub:
    """
    Attributes:
        principal: who asks.
        records: of requests that have ended.
    """

    def __init__(
        self,
        *rules: Rule,
        script: Sequence[Step] = (),
        window: int = 4096,
        refresh: Refresh | None = None,
        store: LimitStore | None = None,
    ) -> None:
        self.clock = SteppedClock()
        self.principal = limited(*rules)
        self.records: list[RequestRecord] = []
        self.store = in_memory(self.clock) if store is None else store
        self.limiter = Limiter(self.store, self.clock, refresh=refresh)
        self.backend = ScriptedBackend({MODEL: Script(steps=tuple(script))}, window=window, sleep=self.clock.sleep)
        catalog = Catalog(self.backend, FixedListing())
        self.inference = Inference(self.backend, catalog, self.clock, self, self.limiter)

    def opened(self, opening: Opening, running: Running) -> None:
        """Implements `gateway.services.ports.Recorder`, with the next."""

    def settled(self, record: RequestRecord) -> None:
        self.records.append(record)

    async def begun(self, committed: dict[str, int] | None = None) -> LimitedHub:
        """Itself, once its store knows what is committed."""
        await self.store.begin_epoch(ORGANIZATION, committed or {}, ())
        return self

    async def call(self, *prompts: str, most: int | None = None, num_choices: int = 1) -> Call:
        info = RequestInfo(
            request_id=new_request_id(0),
            principal=self.principal,
            request_class="interactive",
            endpoint="completions",
            stream=False,
        )
        wanted = GenerationRequest(
            model=MODEL,
            prompts=tuple(map(Text, prompts or ("a b c",))),
            num_choices=num_choices,
            max_output_tokens=most,
        )
        return await self.inference.prepare(wanted, info)

    async def ask(
        self, *prompts: str, most: int | None = None, num_choices: int = 1
    ) -> tuple[Call, Sequence[GenerationEvent]]:
        """To its end, or 5 s at most."""
        async with asyncio.timeout(5), await self.call(*prompts, most=most, num_choices=num_choices) as call:
            return call, [event async for events in call for event in events]

    async def left(self) -> Sequence[int]:
        """Of each limit."""
        return await self.store.look(ORGANIZATION, self.limiter.plan(self.principal, MODEL, ()).uses)

    @property
    def generation(self) -> ScriptedGeneration:
        return self.backend.generations[-1]
