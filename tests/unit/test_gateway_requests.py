"""From body bytes to the domain's request: defaults, spellings, and text that is not quite text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.domain.request import Conversation, Message, Sampling, Text, TokenIds
from gateway.errors import InvalidRequest
from gateway.web.decoding import BodyDecoder
from gateway.web.inference import deadline_ms
from gateway.web.openai.requests import chat_to_domain, completion_to_domain
from gateway.web.openai.schema import ChatRequest, CompletionRequest

CHAT = BodyDecoder(ChatRequest)
TEXT = BodyDecoder(CompletionRequest)


def chat(**fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_to_domain(CHAT.decode(msgspec.json.encode(body)), None)


def completion(**fields: Any) -> Any:
    return completion_to_domain(TEXT.decode(msgspec.json.encode({"model": "m", "prompt": "hi", **fields})), 500)


def test_what_is_not_said_has_the_vendors_default() -> None:
    for request in (chat(), completion()):
        assert request.sampling == Sampling()
        assert (request.stop, request.num_choices, request.echo) == ((), 1, False)
    assert chat().max_output_tokens is None
    assert completion().max_output_tokens == 16
    assert completion().deadline_ms == 500


def test_null_means_not_said() -> None:
    names = (set(ChatRequest.__struct_fields__) | {"unknown"}) - {"model", "messages"}

    assert chat(**dict.fromkeys(names)) == chat()


def test_every_sampling_field_arrives() -> None:
    sampling = chat(
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"5": 2, "17": -100},
        logprobs=True,
        top_logprobs=4,
        seed=-7,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        stop_token_ids=[3, 4],
        min_tokens=2,
        ignore_eos=True,
    ).sampling

    assert sampling == Sampling(
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={5: 2.0, 17: -100.0},
        num_logprobs=4,
        seed=-7,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        stop_token_ids=(3, 4),
        min_tokens=2,
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_logprobs_are_off_on_or_with_alternatives(fields: dict[str, Any], expected: int | None) -> None:
    assert chat(**fields).sampling.num_logprobs == expected


def test_minus_one_asks_for_all_tokens() -> None:
    """As vLLM spells it."""
    assert chat(top_k=-1).sampling.top_k == 0


def test_max_completion_tokens_is_the_newer_word() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_output_tokens == 7
    assert chat(max_tokens=5).max_output_tokens == 5


def test_a_stop_string_may_be_one_or_many() -> None:
    assert chat(stop="x").stop == ("x",)
    assert chat(stop=["x", "y"]).stop == ("x", "y")
    assert chat(stop=[]).stop == ()


def test_roles_and_contents_become_plain_turns() -> None:
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "d"}]},
        {"role": "tool", "content": "e"},
        {"role": "function", "name": "f", "content": "f"},
        {"role": "user", "content": []},
    ]

    [conversation] = chat(messages=messages).prompts
    assert conversation == Conversation(
        (
            Message("system", "a"),
            Message("user", "bc"),
            Message("assistant", ""),
            Message("assistant", "d"),
            Message("tool", "e"),
            Message("tool", "f"),
            Message("user", ""),
        )
    )


def test_prompts_come_in_four_forms() -> None:
    assert completion(prompt="a").prompts == (Text("a"),)
    assert completion(prompt=["a", "b"]).prompts == (Text("a"), Text("b"))
    assert completion(prompt=[1, 2]).prompts == (TokenIds((1, 2)),)
    assert completion(prompt=[[1], [2, 3]]).prompts == (TokenIds((1,)), TokenIds((2, 3)))


def test_best_of_is_fine_where_it_says_nothing_new() -> None:
    assert completion(n=2, best_of=2).num_choices == 2
    assert completion(best_of=1).num_choices == 1


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\uD83D", "\ufffd"),
        (rb"\ude00", "\ufffd"),
        (rb"\ude00\ud83d", "\ufffd\ufffd"),
        (rb"a\ud83db\u0000", "a\ufffdb\x00"),
    ],
)
def test_half_a_surrogate_pair_becomes_a_replacement(escaped: bytes, text: str) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "' + escaped + b'"}]}'

    assert CHAT.decode(body).messages[0].content == text


def test_a_wrong_field_beside_half_a_pair_is_still_named() -> None:
    with pytest.raises(InvalidRequest) as raised:
        CHAT.decode(rb'{"model": 5, "messages": [], "user": "\ud83d"}')

    assert raised.value.param == "model"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{}", "model", "Missing required parameter: 'model'."),
        (b'{"model": "m", "messages": [{}]}', "messages[0].role", "Missing required parameter: 'messages[0].role'."),
        (b'{"model": "m", "messages": 5}', "messages", "Invalid value for 'messages': expected `array`, got `int`."),
        (b"[1]", None, "Invalid request body: expected `object`, got `array`."),
    ],
)
def test_a_wrong_shape_is_explained(body: bytes, param: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        CHAT.decode(body)

    assert (raised.value.param, raised.value.message) == (param, message)


def test_a_deadline_comes_as_a_header() -> None:
    scope: Any = {"headers": [(b"host", b"x"), (b"x-evenhand-deadline-ms", b"1500")]}

    assert deadline_ms(scope) == 1500
    assert deadline_ms({"headers": []}) is None  # type: ignore[typeddict-item]
