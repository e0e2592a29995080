"""The completions endpoint as official clients and raw readers see it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted_server import KEY, ScriptedServer


@pytest.fixture
def client(scripted: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_client_reads_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="hello", prompt="say hello to me")

    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 5)


async def test_async_openai_client_reads_a_stream(scripted: ScriptedServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.completions.create(
            model="hello", prompt="x", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["Hel", "lo", ", ", "world", "!", ""]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_stream_has_the_exact_shape(scripted: ScriptedServer) -> None:
    answer = scripted.post("/v1/completions", {"model": "hello", "prompt": "x", "stream": True, "max_tokens": 1})

    created = int(re.search(rb'"created":(\d+)', answer.content)[1])  # type: ignore[index]
    head = (
        f'data: {{"id":"cmpl-{answer.headers["x-request-id"].removeprefix("req_")}","object":"text_completion",'
        f'"created":{created},"model":"hello","system_fingerprint":"evenhand-0.1.0","choices":[{{"index":0,"text":'
    )
    assert answer.text == (
        ": keep-alive\n\n"
        f'{head}"Hel","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}"","logprobs":null,"finish_reason":"length"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


@pytest.mark.parametrize(
    ("prompt", "num_prompt_tokens"),
    [
        ("one text", 2),
        (["one", "two three"], 3),
        ([5, 6, 7], 3),
        ([[5, 6], [7]], 3),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_every_form_of_prompt(client: openai.OpenAI, prompt: Any, num_prompt_tokens: int) -> None:
    num_prompts = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    answer = client.completions.create(model="hello", prompt=prompt, n=2)

    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    assert {choice.text for choice in answer.choices} == {"Hello, world!"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt_tokens
    assert answer.usage.completion_tokens == 5 * 2 * num_prompts


def test_echo_repeats_each_choices_own_prompt(client: openai.OpenAI) -> None:
    options: Any = {"model": "hello", "prompt": ["A:", "B:"], "n": 2, "echo": True}
    whole = client.completions.create(**options)
    streamed = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text

    expected = ["A:Hello, world!", "A:Hello, world!", "B:Hello, world!", "B:Hello, world!"]
    assert [choice.text for choice in whole.choices] == streamed == expected


def test_echo_of_an_answer_without_text(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="silent", prompt="A:", echo=True, stream=True))

    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks] == [("A:", "stop")]


def test_logprobs_are_the_same_streamed_and_not(client: openai.OpenAI) -> None:
    options: Any = {"model": "emoji", "prompt": "x", "logprobs": 2}
    whole = client.completions.create(**options).choices[0].logprobs
    assert whole is not None
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**options, stream=True):
        if part := chunk.choices[0].logprobs:
            for name, values in streamed.items():
                values += getattr(part, name)

    assert whole.model_dump() == streamed
    assert streamed["tokens"][:2] == ["a ", "\U0001f468"]
    assert streamed["text_offset"][:3] == [0, 2, 3]
    assert streamed["top_logprobs"][0] == {"a ": -0.5, "a 1": -1.0}


def test_without_a_limit_the_answer_has_sixteen_tokens(client: openai.OpenAI) -> None:
    """As the vendor's does; a chat answer takes what the window leaves."""
    answer = client.completions.create(model="endless", prompt="x")

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_stop_strings_end_each_choice(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="hello", prompt=["a", "b"], stop=["wor", "zzz"])

    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [("Hello, ", "stop")] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
