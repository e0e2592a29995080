"""The local backend and limits: how much the engine may make, when it asks for more, and what an end was used for."""

from __future__ import annotations

from typing import Any

import pytest
from local_backend_kit import FakeClient, FakeStream, events_of, request, started, tokens

from engine.errors import EngineUnavailable
from engine.messages import Output
from gateway.domain.events import ChoiceFinished
from gateway.domain.request import Text
from gateway.domain.usage import TokenUsage
from gateway.errors import DeadlineExceeded, EngineDown
from gateway.services.ports import Progress


def told(client: FakeClient) -> list[tuple[int, bool]]:
    return [(submit["output_cap"], submit["hold_at_cap"]) for submit in client.submits]


def news(choice: int = 0, **fields: Any) -> Output:
    return Output(request_id="req_1", choice=choice, **fields)


async def test_the_engine_holds_those_answers_that_ask_for_more_than_there_is() -> None:
    client = FakeClient(FakeStream(), FakeStream(), FakeStream(), max_model_len=100)
    wanted = request(Text("a" * 10), Text("a" * 95), Text("a" * 90), num_choices=2)
    await started(client, wanted, output_caps=[80, 5, 10], held_cap=10)

    assert told(client) == [(10, True), (5, False), (10, False)]


async def test_without_a_held_cap_it_holds_none() -> None:
    client = FakeClient(FakeStream(), FakeStream())
    await started(client, request(Text("a"), Text("a"), max_output_tokens=50), output_caps=[40, 50])

    assert told(client) == [(40, False), (50, False)]


async def test_a_cap_is_raised_for_each_prompt_as_far_as_it_asked_and_said_to_be_the_last_there() -> None:
    """The same cap again is the last word."""
    streams = FakeStream(), FakeStream()
    generation = await started(FakeClient(*streams), request(Text("a"), Text("a")), output_caps=[60, 30], held_cap=10)
    caps = []
    for cap in (20, 30, 50, 60):
        generation.raise_cap(cap)
        caps.append(tuple(streams[0].caps))
        caps.append(tuple(streams[1].caps))

    assert caps[:4] == [(20,), (20,), (20, 30), (20, 30, 30)]
    assert streams[0].caps == [20, 30, 50, 60, 60]
    assert set(streams[1].caps) == {20, 30}


async def test_the_old_cap_is_the_last_word_for_all() -> None:
    streams = FakeStream(), FakeStream()
    generation = await started(FakeClient(*streams), request(Text("a"), Text("a")), output_caps=[60, 8], held_cap=10)
    generation.raise_cap(10)

    assert (streams[0].caps, streams[1].caps) == ([10], [8, 8])


async def test_whoever_waits_at_its_cap_calls_for_more() -> None:
    stream, calls = FakeStream(), []
    generation = await started(FakeClient(stream), request(num_choices=2), held_cap=3)
    generation.on_held(lambda: calls.append(generation.progress))
    stream.feed(tokens("abc", choice=0), news(0, held_at_cap=True), tokens("d", choice=1))
    await generation.__anext__()
    assert calls == []
    await generation.__anext__()

    assert calls == [Progress(num_open=2, ended_tokens=0, most_tokens=3)]


async def test_one_that_has_stopped_by_its_text_waits_for_nothing() -> None:
    stream, calls = FakeStream(), []
    generation = await started(FakeClient(stream), request(num_choices=2, stop=("!",)), held_cap=3)
    generation.on_held(lambda: calls.append(0))
    stream.feed(tokens("ab!", choice=0, held_at_cap=True), news(0, held_at_cap=True), tokens("d", choice=1))
    await generation.__anext__()
    await generation.__anext__()

    assert calls == []
    assert generation.progress == Progress(num_open=1, ended_tokens=3, most_tokens=1)


async def test_how_far_the_answers_are() -> None:
    streams = FakeStream(), FakeStream()
    generation = await started(FakeClient(*streams), request(Text("a"), Text("b"), num_choices=2))
    assert generation.progress == Progress(num_open=4, ended_tokens=0, most_tokens=0)
    streams[0].feed(tokens("abcde", choice=1, finish="length"), tokens("xyz", choice=0))
    streams[1].feed(tokens("ab", choice=0))
    for _ in range(3):
        await generation.__anext__()
    assert generation.progress == Progress(num_open=3, ended_tokens=5, most_tokens=3)
    streams[0].feed(tokens("", choice=0, finish="stop"))
    streams[1].feed(tokens("", choice=0, finish="stop"), tokens("", choice=1, finish="stop"))
    await events_of(generation)

    assert generation.progress == Progress(num_open=0, ended_tokens=10, most_tokens=0)


# What was used


@pytest.mark.parametrize(
    ("num_computed", "num_cached", "usage"),
    [
        (0, 0, TokenUsage()),
        (7, 0, TokenUsage(7, 0)),
        (7, 4, TokenUsage(7, 0, 4)),
        (0, 6, TokenUsage(6, 0, 6)),
        (10, 0, TokenUsage(10, 0)),
        (99, 3, TokenUsage(10, 0, 3)),
    ],
)
async def test_of_a_prompt_that_was_not_computed_to_its_end_what_was_is_used(
    num_computed: int, num_cached: int, usage: TokenUsage
) -> None:
    stream = FakeStream()
    generation = await started(FakeClient(stream), request(Text("a" * 10)))
    assert generation.usage == TokenUsage()
    generation.abort()
    stream.feed(news(finish="abort", num_computed_tokens=num_computed, num_cached_tokens=num_cached))
    await generation.wait_ended(5)

    assert generation.ended
    assert generation.usage == usage


async def test_a_prompt_whose_answer_has_begun_is_used_to_its_end() -> None:
    stream = FakeStream().feed(tokens("x", num_computed_tokens=10))
    generation = await started(FakeClient(stream), request(Text("a" * 10)))
    await generation.__anext__()
    assert generation.usage == TokenUsage(10, 1)
    stream.feed(news(finish="abort", num_delivered_tokens=1))
    generation.abort()
    await generation.wait_ended(5)
    assert generation.usage == TokenUsage(10, 1)

    silent = FakeStream().feed(news(finish="stop"))
    generation = await started(FakeClient(silent), request(Text("a" * 10)))
    assert await events_of(generation) == [ChoiceFinished(0, "stop")]
    assert generation.usage == TokenUsage(10, 0)


async def test_of_several_prompts_and_answers_each_prompt_counts_once_as_far_as_its_furthest_answer_got() -> None:
    streams = FakeStream(), FakeStream()
    generation = await started(FakeClient(*streams), request(Text("a" * 10), Text("b" * 20), num_choices=2))
    streams[0].feed(news(0, finish="abort", num_computed_tokens=4), news(1, finish="abort", num_computed_tokens=0))
    streams[1].feed(
        news(0, finish="abort", num_computed_tokens=16, num_cached_tokens=16),
        news(1, finish="abort", num_computed_tokens=18, num_cached_tokens=16),
    )
    generation.abort()
    await generation.wait_ended(5)

    assert generation.usage == TokenUsage(4 + 18, 0, 16)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (news(finish="deadline", num_computed_tokens=6), DeadlineExceeded),
        (news(finish="error", num_computed_tokens=6), EngineDown),
    ],
    ids=["deadline", "error"],
)
async def test_bad_ends_before_the_first_token_use_what_was_computed(end: Output, error: type[Exception]) -> None:
    generation = await started(FakeClient(FakeStream().feed(end)), request(Text("a" * 10)))
    with pytest.raises(error):
        await generation.__anext__()

    assert generation.usage == TokenUsage(6, 0)


async def test_an_engine_that_is_lost_before_it_said_anything_has_used_nothing() -> None:
    generation = await started(FakeClient(FakeStream().feed(EngineUnavailable("gone"))), request(Text("a" * 10)))
    with pytest.raises(EngineDown):
        await generation.__anext__()

    assert (generation.ended, generation.usage) == (True, TokenUsage())
