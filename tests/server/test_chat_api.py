"""The chat endpoint as official clients and raw readers see it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from scripted_server import KEY, ScriptedServer


@pytest.fixture
def client(scripted: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say hello to me"}]


def test_openai_client_reads_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="hello", messages=MESSAGES)

    assert answer.object == "chat.completion"
    assert answer.model == "hello"
    assert answer.id.startswith("chatcmpl-")
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 5, 11)


def test_openai_client_reads_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="hello", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    contents = [chunk.choices[0].delta.content for chunk in chunks[1:6]]
    assert contents == ["Hel", "lo", ", ", "world", "!"]
    assert chunks[6].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (6, 5)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1


async def test_async_openai_client_reads_both(scripted: ScriptedServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0) as client:
        whole = await client.chat.completions.create(model="hello", messages=MESSAGES)
        stream = await client.chat.completions.create(model="hello", messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert whole.choices[0].message.content == text == "Hello, world!"


def test_openai_stream_helper_adds_up(client: openai.OpenAI) -> None:
    """It sums every string field, so a role, id or name sent twice would show up doubled."""
    with client.chat.completions.stream(model="hello", messages=MESSAGES) as stream:
        message = stream.get_final_completion().choices[0].message

    assert message.role == "assistant"
    assert message.content == "Hello, world!"


def test_stream_has_the_exact_shape(scripted: ScriptedServer) -> None:
    answer = scripted.chat("hello", stream=True, stream_options={"include_usage": True})

    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    request_id = answer.headers["x-request-id"]
    created = int(re.search(rb'"created":(\d+)', answer.content)[1])  # type: ignore[index]
    head = (
        f'data: {{"id":"chatcmpl-{request_id.removeprefix("req_")}","object":"chat.completion.chunk",'
        f'"created":{created},"model":"hello","system_fingerprint":"evenhand-0.1.0","choices":['
    )

    def choice(delta: str, finish: str = "null") -> str:
        return f'{head}{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}],"usage":null}}\n\n'

    usage = (
        '{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}'
    )
    expected = [
        ": keep-alive\n\n",
        choice('{"role":"assistant","content":"","refusal":null}'),
        *(choice(f'{{"content":"{piece}"}}') for piece in ("Hel", "lo", ", ", "world", "!")),
        choice("{}", '"stop"'),
        f'{head}],"usage":{usage}}}\n\n',
        "data: [DONE]\n\n",
    ]
    assert "".join(expected) == answer.text


def test_stream_without_usage_never_mentions_it(scripted: ScriptedServer) -> None:
    answer = scripted.chat("hello", stream=True)

    assert "usage" not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_whole_answer_has_the_exact_shape(scripted: ScriptedServer) -> None:
    answer = scripted.chat("hello")

    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": "chatcmpl-" + answer.headers["x-request-id"].removeprefix("req_"),
        "object": "chat.completion",
        "model": "hello",
        "system_fingerprint": "evenhand-0.1.0",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_several_choices_keep_apart(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="two-voices", messages=MESSAGES, n=2)
    texts = ["", ""]
    reasons: dict[int, str] = {}
    roles = [0, 0]
    for chunk in client.chat.completions.create(model="two-voices", messages=MESSAGES, n=2, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason

    assert texts == [choice.message.content for choice in whole.choices] == ["left end", "right end"]
    assert roles == [1, 1]
    assert reasons == {0: "stop", 1: "stop"}
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4


def test_logprobs_are_the_same_streamed_and_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="emoji", messages=MESSAGES, logprobs=True, top_logprobs=2)
    streamed = []
    options: Any = {"model": "emoji", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []

    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content == streamed
    assert [len(entry.top_logprobs) for entry in streamed] == [2] * 8
    assert b"".join(bytes(entry.bytes or []) for entry in streamed).decode() == whole.choices[0].message.content
    assert streamed[0].logprob == pytest.approx(-0.5)


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="hello", messages=MESSAGES, logprobs=True)

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs.content or []] == ["Hel", "lo", ", ", "world", "!"]
    assert all(entry.top_logprobs == [] for entry in logprobs.content or [])


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("lo", "Hel", 2),
        (["ELLO", "o, w"], "Hell", 4),
        ("H", "", 1),
        ("!", "Hello, world", 5),
        ("nowhere", "Hello, world!", 5),
    ],
)
def test_stop_strings_end_the_answer_and_the_bill(client: openai.OpenAI, stop: Any, text: str, num_tokens: int) -> None:
    """Counted through the token that completes the stop string, even where it spans several."""
    options: Any = {"model": "hello", "messages": MESSAGES, "stop": stop}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))

    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert whole.choices[0].message.content == streamed == text
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == num_tokens


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_output_is_cut_at_the_limit(client: openai.OpenAI, field: str) -> None:
    options: Any = {field: 2}
    answer = client.chat.completions.create(model="hello", messages=MESSAGES, **options)

    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_an_answer_without_text_is_complete(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="silent", messages=MESSAGES)
    chunks = list(client.chat.completions.create(model="silent", messages=MESSAGES, stream=True))

    assert whole.choices[0].message.content == ""
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="cached", messages=MESSAGES)

    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_every_kind_of_message_is_read_as_text(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "three"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "tool", "tool_call_id": "1", "content": "four"},
        {"role": "user", "name": "bob", "content": "five"},
    ]
    answer = client.chat.completions.create(model="hello", messages=messages)

    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_fields_we_do_not_know_are_ignored(scripted: ScriptedServer) -> None:
    answer = scripted.chat(
        "hello",
        store=True,
        metadata={"a": "b"},
        prompt_cache_key="x",
        service_tier="flex",
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="auto",
        response_format={"type": "text"},
        brand_new_field=[1, {"deep": None}],
        temperature=None,
        stop=None,
        n=None,
        stream=None,
        max_tokens=None,
    )

    assert answer.status_code == 200


def test_a_body_needs_no_content_type(scripted: ScriptedServer) -> None:
    body = json.dumps({"model": "hello", "messages": [{"role": "user", "content": "hi"}]}).encode()

    assert scripted.post("/v1/chat/completions", body).status_code == 200
    assert scripted.post("/v1/chat/completions", body, headers={"content-type": "text/plain"}).status_code == 200


def test_half_a_surrogate_pair_and_nul_are_text(scripted: ScriptedServer) -> None:
    body = rb'{"model": "hello", "messages": [{"role": "user", "content": "cut \ud83d and \u0000"}]}'

    assert scripted.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_routes_exist_with_and_without_the_version(scripted: ScriptedServer, prefix: str) -> None:
    chat = scripted.post(
        f"{prefix}/chat/completions", {"model": "hello", "messages": [{"role": "user", "content": "x"}]}
    )
    completions = scripted.post(f"{prefix}/completions", {"model": "hello", "prompt": "x"})
    models = httpx.get(f"{scripted.url}{prefix}/models", headers=scripted.headers)

    assert [chat.status_code, completions.status_code, models.status_code] == [200, 200, 200]


def test_models_can_be_listed_and_read(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}

    assert "hello" in models
    assert client.models.retrieve("hello").id == "hello"
    assert client.models.retrieve("hello").object == "model"
    assert models["hello"].model_dump()["max_model_len"] == 1000


def test_the_key_may_come_as_x_api_key(scripted: ScriptedServer) -> None:
    answer = httpx.get(f"{scripted.url}/v1/models", headers={"x-api-key": KEY})

    assert answer.status_code == 200


def test_ops_routes_need_no_key(scripted: ScriptedServer) -> None:
    assert httpx.get(f"{scripted.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{scripted.url}/ready").json() == {"status": "ready"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/chat/completions", "/no/such/path"])
def test_every_response_has_an_id_of_ours(scripted: ScriptedServer, path: str) -> None:
    answer = httpx.get(scripted.url + path, headers=scripted.headers | {"x-request-id": "theirs"})

    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]


def test_a_clients_own_id_comes_back(scripted: ScriptedServer) -> None:
    sane = httpx.get(f"{scripted.url}/health", headers={"x-client-request-id": "turn-7/retry.1"})
    odd = httpx.get(f"{scripted.url}/health", headers={"x-client-request-id": "a b<script>"})

    assert sane.headers["x-client-request-id"] == "turn-7/retry.1"
    assert "x-client-request-id" not in odd.headers


def test_head_and_options_are_answered(scripted: ScriptedServer) -> None:
    head = httpx.head(f"{scripted.url}/v1/models", headers=scripted.headers)
    options = httpx.options(f"{scripted.url}/v1/chat/completions")

    assert (head.status_code, head.content) == (200, b"")
    assert options.status_code == 204
    assert options.headers["allow"] == "OPTIONS, POST"
