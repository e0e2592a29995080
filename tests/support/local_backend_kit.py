"""A local backend over an engine's client that the test plays itself, with the real tokenizer and detokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from byte_text import EOS, VOCAB_SIZE, byte_assets, ids_of

from engine.errors import EngineError
from engine.messages import Output, Ready, Timings
from gateway.backends.local import LocalBackend
from gateway.backends.local_generation import LocalGeneration
from gateway.domain.events import GenerationEvent, TextDelta
from gateway.domain.ids import KeyId, OrganizationId, RequestId, SessionId, TeamId
from gateway.domain.principal import Principal
from gateway.domain.record import RequestInfo
from gateway.domain.request import GenerationRequest, Prompt, Text

ASSETS = byte_assets()
INFO = RequestInfo(
    request_id=RequestId("req_1"),
    principal=Principal(
        organization_id=OrganizationId("o1"),
        team_id=TeamId("t1"),
        key_id=KeyId("k1"),
        organization="acme",
        team="red",
        team_weight=3,
    ),
    request_class="standard",
    endpoint="chat",
    stream=True,
    session_id=SessionId("s1"),
)


class FakeStream:
    """Plays outputs; what the test has not fed yet is waited for. `caps` are those it was raised to."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[Output | EngineError] = asyncio.Queue()
        self.num_aborts = 0
        self.caps: list[int] = []

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Output:
        news = await self.news.get()
        if isinstance(news, EngineError):
            raise news
        return news

    def abort(self) -> None:
        self.num_aborts += 1

    def raise_cap(self, output_cap: int) -> None:
        self.caps.append(output_cap)

    def feed(self, *outputs: Output | EngineError) -> FakeStream:
        for output in outputs:
            self.news.put_nowait(output)
        return self


class FakeClient:
    """Takes every submit and hands out the streams it was given."""

    def __init__(self, *streams: FakeStream, max_model_len: int = 100, kv_capacity_tokens: int = 10_000) -> None:
        self.up = True
        self.known: Ready | None = Ready(
            engine_id="engine-0",
            model="m",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            kv_capacity_tokens=kv_capacity_tokens,
            max_sequences=4,
        )
        self.streams = list(streams)
        self.submits: list[dict[str, Any]] = []
        self.weights: list[tuple[str, int]] = []
        self.refusal: EngineError | None = None

    def set_weight(self, node_id: str, weight: int) -> None:
        self.weights.append((node_id, weight))

    def card(self, model: str) -> Ready | None:
        return self.known if model == "m" else None

    def is_up(self, model: str) -> bool:
        return self.up and model == "m"

    def submit(self, model: str, **submit: Any) -> FakeStream:
        if self.refusal is not None and len(self.submits) == len(self.streams) - 1:
            raise self.refusal
        self.submits.append({"model": model, **submit})
        return self.streams[len(self.submits) - 1]


def request(*prompts: Prompt, **fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", prompts=prompts or (Text("hi"),), **fields)


async def started(client: FakeClient, wanted: GenerationRequest, **options: Any) -> LocalGeneration:
    prepared = await LocalBackend(client, {"m": ASSETS}).prepare(wanted)
    return prepared.start(INFO, **options)


async def events_of(generation: LocalGeneration) -> list[GenerationEvent]:
    return [event async for events in generation for event in events]


def text_of(events: Sequence[GenerationEvent], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.choice == choice)


def tokens(text: str, **fields: Any) -> Output:
    return Output(request_id="req_1", token_ids=tuple(ids_of(ASSETS, text)), **fields)


TIMINGS = Timings(queue_us=10, prefill_us=20, decode_us=30)
