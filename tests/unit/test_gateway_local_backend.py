"""The local backend over a client that the test plays itself, with the real tokenizer, detokenizer and stop matcher."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import pytest
from byte_text import EOS, VOCAB_SIZE, byte_assets, ids_of
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError, EngineUnavailable, RequestRejected
from engine.messages import Output, Ready, Timings, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate
from gateway.backends.local import LocalBackend
from gateway.backends.local_generation import LocalGeneration
from gateway.domain.events import ChoiceFinished, GenerationEvent, TextDelta, TokenLogprob
from gateway.domain.ids import RequestId
from gateway.domain.principal import Principal
from gateway.domain.record import RequestInfo
from gateway.domain.request import Conversation, GenerationRequest, Message, Prompt, Sampling, Text, TokenIds
from gateway.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDown,
    EvenhandError,
    InvalidRequest,
    ModelNotFound,
)

ASSETS = byte_assets()
INFO = RequestInfo(
    request_id=RequestId("req_1"),
    principal=Principal(organization="acme", team="red", key_id="k1", team_weight=3),
    request_class="standard",
    endpoint="chat",
    stream=True,
)


class FakeStream:
    """Plays outputs; what the test has not fed yet is waited for."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[Output | EngineError] = asyncio.Queue()
        self.num_aborts = 0

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Output:
        news = await self.news.get()
        if isinstance(news, EngineError):
            raise news
        return news

    def abort(self) -> None:
        self.num_aborts += 1

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
        self.refusal: EngineError | None = None

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


async def started(client: FakeClient, wanted: GenerationRequest) -> LocalGeneration:
    prepared = await LocalBackend(client, {"m": ASSETS}).prepare(wanted)
    return prepared.start(INFO)


async def events_of(generation: LocalGeneration) -> list[GenerationEvent]:
    return [event async for events in generation for event in events]


def text_of(events: Sequence[GenerationEvent], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.choice == choice)


def tokens(text: str, **fields: Any) -> Output:
    return Output(request_id="req_1", token_ids=tuple(ids_of(ASSETS, text)), **fields)


TIMINGS = Timings(queue_us=10, prefill_us=20, decode_us=30)


async def test_tokens_become_text_and_the_end_token_counts_but_is_not_told() -> None:
    end = Output(request_id="req_1", token_ids=(EOS,), finish="stop", stop_token_id=EOS, timings=TIMINGS)
    generation = await started(FakeClient(FakeStream().feed(tokens("hel"), tokens("lo"), end)), request())
    events = await events_of(generation)

    assert events == [TextDelta(0, "hel", 3), TextDelta(0, "lo", 2), ChoiceFinished(0, "stop")]
    assert generation.usage.completion_tokens == 6
    assert generation.usage.prompt_tokens == 2
    assert generation.ended
    assert generation.timings is not None
    assert generation.timings.queue_us == 10


async def test_a_character_is_told_when_it_is_whole() -> None:
    ids = ids_of(ASSETS, "\u6f22!")
    outputs = [Output(request_id="req_1", token_ids=(token,)) for token in ids]
    outputs[-1] = Output(request_id="req_1", token_ids=(ids[-1],), finish="length")
    events = await events_of(await started(FakeClient(FakeStream().feed(*outputs)), request()))

    assert events == [TextDelta(0, "\u6f22", 3), TextDelta(0, "!", 1), ChoiceFinished(0, "length")]


async def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    ids = ids_of(ASSETS, "a\u6f22")[:-1]
    output = Output(request_id="req_1", token_ids=tuple(ids), finish="length")
    events = await events_of(await started(FakeClient(FakeStream().feed(output)), request()))

    assert text_of(events) == "a\ufffd"


async def test_a_stop_string_ends_the_answer_and_the_engines_work() -> None:
    """Counted through the token that completes it; what the engine had made beyond is not billed."""
    stream = FakeStream().feed(tokens("one tw"), tokens("o three", num_delivered_tokens=13))
    generation = await started(FakeClient(stream), request(stop=("two",)))
    events = await events_of(generation)

    assert text_of(events) == "one "
    assert events[-1] == ChoiceFinished(0, "stop")
    assert generation.usage.completion_tokens == len("one two")
    assert stream.num_aborts == 1
    assert not generation.ended

    stream.feed(Output(request_id="req_1", finish="abort", num_delivered_tokens=20, timings=TIMINGS))
    await generation.wait_ended(5)
    assert generation.ended
    assert generation.usage.completion_tokens == len("one two")
    assert generation.timings is not None


async def test_a_stop_string_in_the_last_token_beats_the_limit() -> None:
    stream = FakeStream().feed(tokens("a END", finish="length"))
    events = await events_of(await started(FakeClient(stream), request(stop=("END",))))

    assert (text_of(events), events[-1]) == ("a ", ChoiceFinished(0, "stop"))


async def test_text_held_back_for_a_stop_string_is_told_at_the_end() -> None:
    stream = FakeStream().feed(tokens("a EN"), tokens("", finish="length"))
    events = await events_of(await started(FakeClient(stream), request(stop=("END",))))

    assert events == [TextDelta(0, "a ", 4), TextDelta(0, "EN", 0), ChoiceFinished(0, "length")]


async def test_stop_strings_of_one_choice_leave_the_others_running() -> None:
    stream = FakeStream().feed(
        tokens("x.", choice=0),
        tokens("more", choice=0),
        tokens("y", choice=1),
        tokens("z", choice=1, finish="length"),
    )
    generation = await started(FakeClient(stream), request(stop=(".",), num_choices=2))
    events = await events_of(generation)

    assert (text_of(events, 0), text_of(events, 1)) == ("x", "yz")
    assert generation.usage.completion_tokens == 4
    assert stream.num_aborts == 1


async def test_logprobs_spell_the_text_byte_by_byte() -> None:
    ids = ids_of(ASSETS, "\u00e9!")
    output = Output(
        request_id="req_1",
        token_ids=(*ids, EOS),
        logprobs=tuple(TokenLogprobs(-0.5, ((token, -0.5), (0, -2.0))) for token in (*ids, EOS)),
        finish="stop",
        stop_token_id=EOS,
    )
    generation = await started(FakeClient(FakeStream().feed(output)), request(sampling=Sampling(num_logprobs=2)))
    [delta, _] = await events_of(generation)

    assert isinstance(delta, TextDelta)
    assert b"".join(entry.chosen.utf8 for entry in delta.logprobs) == "\u00e9!".encode()
    assert [entry.chosen.token for entry in delta.logprobs] == ["\ufffd", "\ufffd", "!"]
    assert [chance.logprob for chance in delta.logprobs[0].top] == [-0.5, -2.0]


TEXTS = [
    "plain",
    "a \U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "\u6f22\u5b57\u304b\u306a",
    "e\u0301 \u0000 \n\t",
    "",
]
STOPS = [(), ("\u200d",), ("fam", "ily"), ("\u5b57\u304b",), ("\u0301 ",), ("n",), ("nowhere",)]


@settings(deadline=None, max_examples=examples(150))
@given(st.sampled_from(TEXTS), st.sampled_from(STOPS), st.lists(st.integers(1, 4), max_size=40), st.booleans())
def test_no_cut_changes_an_answer(text: str, stops: tuple[str, ...], cuts: list[int], ends_itself: bool) -> None:
    """The same tokens in one output, and in outputs of any size: same text, tokens, reason and log probabilities."""
    ids = ids_of(ASSETS, text) + [EOS] * ends_itself
    finish = {"finish": "stop", "stop_token_id": EOS} if ends_itself else {"finish": "length"}

    def play(sizes: list[int]) -> tuple[str, list[TokenLogprob], GenerationEvent, int]:
        outputs, at = [], 0
        for size in [*sizes, len(ids)]:
            part = tuple(ids[at : at + size])
            at += size
            last = finish if at >= len(ids) else {}
            logprobs = tuple(TokenLogprobs(-float(token), ()) for token in part)
            outputs.append(Output(request_id="req_1", token_ids=part, logprobs=logprobs, **last))  # type: ignore[arg-type]
            if last:
                break

        async def run() -> tuple[str, list[TokenLogprob], GenerationEvent, int]:
            wanted = request(stop=stops, sampling=Sampling(num_logprobs=0))
            generation = await started(FakeClient(FakeStream().feed(*outputs)), wanted)
            events = await events_of(generation)
            logprobs = [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs]
            return text_of(events), logprobs, events[-1], generation.usage.completion_tokens

        return asyncio.run(run())

    assert play([]) == play(cuts)


async def test_the_engine_is_told_who_asks_and_how_much_it_may_make() -> None:
    client = FakeClient(FakeStream(), max_model_len=50)
    wanted = request(Text("hello"), sampling=Sampling(seed=7, top_k=3), num_choices=2, deadline_ms=900)
    await started(client, wanted)
    [submit] = client.submits

    assert [(node.id, node.weight) for node in submit["path"]] == [
        ("org:acme", 1),
        ("team:acme/red", 3),
        ("class:acme/red/standard", 1),
        ("key:k1", 1),
    ]
    assert submit["cache_salt"] == "team:acme/red"
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
