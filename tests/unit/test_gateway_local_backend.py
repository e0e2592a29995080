"""The local backend, inward and to the end: what the engine is told, what is refused, and how requests end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest
from byte_text import VOCAB_SIZE, ids_of
from local_backend_kit import ASSETS, FakeClient, FakeStream, events_of, request, started, text_of, tokens

from engine.errors import EngineError, EngineUnavailable, RequestRejected
from engine.messages import Output
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate
from gateway.backends.local import LocalBackend
from gateway.domain.events import TextDelta
from gateway.domain.request import Conversation, GenerationRequest, Message, Prompt, Sampling, Text, TokenIds
from gateway.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDown,
    EvenhandError,
    InvalidRequest,
    ModelNotFound,
)


async def test_the_engine_is_told_who_asks_and_how_much_it_may_make() -> None:
    client = FakeClient(FakeStream(), max_model_len=50)
    wanted = request(Text("hello"), sampling=Sampling(seed=7, top_k=3), num_choices=2, deadline_ms=900)
    await started(client, wanted)
    [submit] = client.submits

    assert [(node.id, node.weight) for node in submit["path"]] == [
        ("org:o1", 1),
        ("team:t1", 3),
        ("key:k1", 1),
        ("session:s1", 1),
    ]
    assert submit["cache_salt"] == "team:t1"
    assert submit["request_class"] == "standard"
    assert submit["request_id"] == "req_1"
    assert submit["token_ids"] == ids_of(ASSETS, "hello")
    assert submit["output_cap"] == 45
    assert submit["num_choices"] == 2
    assert submit["deadline_ms"] == 900
    assert (submit["sampling"].seed, submit["sampling"].top_k) == (7, 3)


@pytest.mark.parametrize(("asked", "cap"), [(None, 45), (7, 7), (45, 45), (46, 45), (10**12, 45)])
async def test_output_is_clamped_to_what_the_window_leaves(asked: int | None, cap: int) -> None:
    client = FakeClient(FakeStream(), max_model_len=50)
    await started(client, request(Text("hello"), max_output_tokens=asked))

    assert client.submits[0]["output_cap"] == cap


async def test_messages_become_a_prompt_by_the_models_template() -> None:
    client = FakeClient(FakeStream())
    await started(client, request(Conversation((Message("user", "hi"),))))

    expected = "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    assert client.submits[0]["token_ids"] == ASSETS.tokenizer.encode(expected)


@pytest.mark.parametrize("limits", [{"max_model_len": 50}, {"max_model_len": 900, "kv_capacity_tokens": 50}])
@pytest.mark.parametrize("length", [50, 51, 3000])
async def test_a_prompt_that_fills_the_window_is_refused(limits: dict[str, int], length: int) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"50 tokens. However, your messages resulted in {length} tokens"):
        await started(FakeClient(**limits), request(Text("x" * length)))


@pytest.mark.parametrize(
    "prompt", [Text("x" * 9_000_000), Conversation((Message("user", ""),) * 300_000)], ids=["one text", "many messages"]
)
async def test_megabytes_that_cannot_fit_are_refused_without_reading_them(prompt: Prompt) -> None:
    began = time.perf_counter()

    with pytest.raises(ContextLengthExceeded, match="maximum context length is 50 tokens"):
        await started(FakeClient(max_model_len=50), request(prompt))

    assert time.perf_counter() - began < 2


async def test_every_sampling_field_reaches_the_engine() -> None:
    wanted = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={5: 1.0},
        seed=7,
        num_logprobs=2,
        stop_token_ids=(3,),
        min_tokens=2,
        ignore_eos=True,
    )
    client = FakeClient(FakeStream(), max_model_len=50)
    await started(client, request(Text("hello"), sampling=wanted))

    sent = client.submits[0]["sampling"]
    names = SamplingParams.__struct_fields__

    assert {name: getattr(sent, name) for name in names} == {name: getattr(wanted, name) for name in names}
    assert all(getattr(wanted, name) != getattr(Sampling(), name) for name in names), "a default would prove nothing"


async def test_a_prompt_that_leaves_one_token_runs() -> None:
    client = FakeClient(FakeStream(), max_model_len=50)
    await started(client, request(Text("x" * 49)))

    assert client.submits[0]["output_cap"] == 1


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        (request(Text("")), "prompt"),
        (request(TokenIds((1, VOCAB_SIZE))), "prompt"),
        (request(TokenIds((-1,))), "prompt"),
        (request(sampling=Sampling(logit_bias={VOCAB_SIZE: 1.0})), "logit_bias"),
        (request(sampling=Sampling(stop_token_ids=(-1,))), "stop_token_ids"),
    ],
    ids=["empty", "id too large", "id below zero", "logit_bias", "stop_token_ids"],
)
async def test_token_ids_that_do_not_exist_are_refused(wanted: GenerationRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await started(FakeClient(), wanted)

    assert raised.value.param == param


async def test_messages_that_the_template_refuses_are_the_callers_error() -> None:
    template = ChatTemplate("{{ raise_exception('no system please') }}", None, None)
    assets = dataclasses.replace(ASSETS, chat_template=template)
    with pytest.raises(InvalidRequest, match="no system please"):
        await LocalBackend(FakeClient(), {"m": assets}).prepare(request(Conversation((Message("user", "x"),))))


async def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        await LocalBackend(FakeClient(), {"m": ASSETS}).prepare(GenerationRequest(model="other", prompts=(Text("x"),)))


async def test_an_engine_that_is_down_refuses_before_anything_is_done() -> None:
    client = FakeClient()
    backend = LocalBackend(client, {"m": ASSETS})
    client.up = False

    assert not backend.readiness().is_ready
    assert [card.id for card in backend.cards()] == ["m"]
    with pytest.raises(EngineDown):
        await backend.prepare(request())

    client.known = None
    assert backend.cards() == []
    with pytest.raises(EngineDown):
        await backend.prepare(request())


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [(EngineUnavailable("gone"), EngineDown), (RequestRejected("over_capacity", "x"), InvalidRequest)],
)
async def test_a_refused_prompt_takes_its_siblings_back(refusal: EngineError, kind: type[EvenhandError]) -> None:
    client = FakeClient(FakeStream(), FakeStream(), FakeStream())
    client.refusal = refusal
    with pytest.raises(kind):
        await started(client, request(Text("a"), Text("b"), Text("c")))

    assert [stream.num_aborts for stream in client.streams] == [1, 1, 0]


@pytest.mark.parametrize(
    ("news", "kind"),
    [
        (EngineUnavailable("the process died"), EngineDown),
        (RequestRejected("over_capacity", "never fits"), InvalidRequest),
        (Output(request_id="req_1", finish="error", error="a step failed"), EngineDown),
        (Output(request_id="req_1", finish="abort"), EngineDown),
        (Output(request_id="req_1", finish="deadline", num_delivered_tokens=3), DeadlineExceeded),
    ],
    ids=["lost", "rejected", "error", "aborted by the engine", "deadline"],
)
async def test_every_bad_end_is_an_error(news: Any, kind: type[EvenhandError]) -> None:
    generation = await started(FakeClient(FakeStream().feed(tokens("one"), news)), request())

    assert await generation.__anext__() == [TextDelta(0, "one", 3)]
    with pytest.raises(kind):
        await generation.__anext__()
    assert generation.ended
    assert generation.usage.completion_tokens == 3


async def test_what_was_made_until_an_abort_is_counted() -> None:
    stream = FakeStream().feed(tokens("one"))
    generation = await started(FakeClient(stream), request())
    await generation.__anext__()
    generation.abort()
    stream.feed(Output(request_id="req_1", finish="abort", num_delivered_tokens=9, num_cached_tokens=1))
    await generation.wait_ended(5)

    assert generation.ended
    assert generation.usage.completion_tokens == 9
    assert generation.usage.cached_tokens == 1


async def test_an_engine_that_never_confirms_an_abort_is_not_waited_for() -> None:
    generation = await started(FakeClient(FakeStream().feed(tokens("one"))), request())
    await generation.__anext__()
    generation.abort()
    await generation.wait_ended(0.01)

    assert not generation.ended
    assert generation.usage.completion_tokens == 3


async def test_a_cancelled_wait_loses_nothing() -> None:
    streams = FakeStream(), FakeStream()
    generation = await started(FakeClient(*streams), request(Text("a"), Text("b")))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(generation.__anext__(), 0.01)
    streams[1].feed(tokens("late", finish="length"))
    streams[0].feed(tokens("early", finish="length"))
    events = await events_of(generation)

    assert (text_of(events, 0), text_of(events, 1)) == ("early", "late")


async def test_prompts_are_requests_of_their_own_with_choices_numbered_through() -> None:
    streams = FakeStream(), FakeStream()
    client = FakeClient(*streams)
    generation = await started(client, request(Text("aa"), TokenIds((1, 2, 3)), num_choices=2))
    streams[0].feed(
        tokens("p0c1", choice=1, finish="length", num_cached_tokens=2),
        tokens("p0c0", choice=0, finish="length", num_cached_tokens=0),
    )
    streams[1].feed(
        tokens("p1c0", choice=0, finish="length", num_cached_tokens=3),
        tokens("p1c1", choice=1, finish="length", num_cached_tokens=1),
    )
    events = await events_of(generation)

    assert [submit["request_id"] for submit in client.submits] == ["req_1-0", "req_1-1"]
    assert [text_of(events, i) for i in range(4)] == ["p0c0", "p0c1", "p1c0", "p1c1"]
    assert generation.usage.prompt_tokens == 5
    assert generation.usage.completion_tokens == 16
    assert generation.usage.cached_tokens == 0 + 1
    assert generation.ended


async def test_a_stopped_prompt_is_aborted_while_its_siblings_run() -> None:
    streams = FakeStream(), FakeStream()
    generation = await started(FakeClient(*streams), request(Text("a"), Text("b"), stop=("!",)))
    streams[0].feed(tokens("hey!"))
    await generation.__anext__()

    assert streams[0].num_aborts == 1
    assert streams[1].num_aborts == 0


async def test_one_lost_prompt_fails_the_request() -> None:
    streams = FakeStream().feed(EngineUnavailable("gone")), FakeStream()
    generation = await started(FakeClient(*streams), request(Text("a"), Text("b")))
    with pytest.raises(EngineDown):
        await generation.__anext__()
    generation.abort()

    assert streams[1].num_aborts == 1


async def test_echo_texts_are_the_prompts_own() -> None:
    prompt = TokenIds(tuple(ids_of(ASSETS, "as ids")))
    prepared = await LocalBackend(FakeClient(), {"m": ASSETS}).prepare(request(Text("as text"), prompt, echo=True))

    assert prepared.echo_texts == ["as text", "as ids"]
