"""Requests with limits from their preparation to their settlement, over a scripted engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limiter_kit import MODEL, Process, info_of

from gateway.backends.scripted import Script, ScriptedBackend, ScriptedGeneration
from gateway.domain.events import ChoiceFinished, GenerationEvent, TextDelta
from gateway.domain.ledger import Opening
from gateway.domain.limits.policy import Limit, Price, Rule
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.request import GenerationRequest, Prompt, Text
from gateway.errors import Unavailable
from gateway.services.call import Call
from gateway.services.catalog import Catalog, FixedListing
from gateway.services.inference import Inference
from gateway.services.ports import Backend, Running

TEN = Text("one two three four five six seven eight nine ten")
"""Tokens."""


class Calls(Process):
    """A process that answers with a script.

    Attributes:
        steps: what became of requests, in order: ``opened``, ``settled``.
        refuse: raised when a request is to be put on record.
    """

    def __init__(self, script: Script, *limits: Limit | Rule, prices: Sequence[Price] = (), **fields: Any) -> None:
        super().__init__(*limits, **fields)
        self.steps: list[str] = []
        self.openings: list[Opening] = []
        self.records: list[RequestRecord] = []
        self.refuse: Unavailable | None = None
        self.backend = ScriptedBackend({MODEL: script}, sleep=self.clock.sleep)
        self.serve(self.backend, prices)

    def serve(self, backend: Backend, prices: Sequence[Price] = ()) -> None:
        """From now on with this one."""
        catalog = Catalog(backend, FixedListing(prices=prices))
        self.inference = Inference(backend, catalog, self.clock, self, self.limiter)

    def opened(self, opening: Opening, running: Running) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.steps.append("opened")
        self.openings.append(opening)

    def settled(self, record: RequestRecord) -> None:
        self.steps.append("settled")
        self.records.append(record)

    async def call(
        self, *prompts: Prompt, most: int | None = 100, num_choices: int = 1, info: RequestInfo | None = None
    ) -> Call:
        wanted = GenerationRequest(
            model=MODEL, prompts=prompts or (TEN,), max_output_tokens=most, num_choices=num_choices
        )
        return await self.inference.prepare(wanted, info or info_of(self.principal))

    async def answer(self, *prompts: Prompt, **options: Any) -> list[GenerationEvent]:
        return await drained(await self.call(*prompts, **options))

    @property
    def generation(self) -> ScriptedGeneration:
        return self.backend.generations[-1]


async def drained(call: Call) -> list[GenerationEvent]:
    async with call:
        return [event async for events in call for event in events]


def ends(events: Sequence[GenerationEvent]) -> dict[int, tuple[str, str | None]]:
    """Of each answer: how it ended, and why."""
    return {event.choice: (event.reason, event.cause) for event in events if isinstance(event, ChoiceFinished)}


def lengths(events: Sequence[GenerationEvent]) -> dict[int, int]:
    """Of each answer that has any: its tokens."""
    found: dict[int, int] = {}
    for event in events:
        if isinstance(event, TextDelta):
            found[event.choice] = found.get(event.choice, 0) + event.num_tokens
    return found
