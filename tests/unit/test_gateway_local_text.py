"""The local backend, outward: tokens to text, stop strings, hold-back, counts and log probabilities."""

from __future__ import annotations

import asyncio

from byte_text import EOS, ids_of
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from local_backend_kit import ASSETS, TIMINGS, FakeClient, FakeStream, events_of, request, started, text_of, tokens

from engine.messages import Output, TokenLogprobs
from gateway.domain.events import ChoiceFinished, GenerationEvent, TextDelta, TokenLogprob
from gateway.domain.request import Sampling


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
