"""The main job, whole: a served SmolLM2, official clients, streamed and not."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from evenhand_process import EvenhandProcess
from openai.types import CompletionUsage

from engine.carriers.zeromq_client import ZeroMQClient
from engine.client import EngineClient
from engine.link import EngineLink
from engine.router import FirstReady

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
README = Path(__file__).parents[2] / "README.md"
NUM_PROMPTS = 200
AT_ONCE = 32
SEEDS_TEXT = [
    "Reply with emoji only: 🎉👩‍👩‍👧‍👦🏳️‍🌈",
    "用中文写一句关于大海的话。",
    "日本語で短い詩を書いてください。",
    "한국어로 인사해 주세요.",
    "اكتب جملة قصيرة.",
    "Écris une phrase où chaque mot porte un accent.",
    "Count from one to twenty.",
    "Write a Python function that adds two numbers.",
    "List ten animals, one per line.",
    "Tell me a story about a fox.",
]


@pytest.fixture
def client(evenhand_server: EvenhandProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=evenhand_server.base_url, api_key=evenhand_server.key, max_retries=0)


def test_the_model_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]

    answer = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=32)  # type: ignore[arg-type]
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=32, stream=True)  # type: ignore[arg-type]
    )

    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in chunks)


def test_completions_continue_a_text(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"

    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
    chunks = list(client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8, stream=True))

    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].text == "".join(c.choices[0].text for c in chunks)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def test_a_repeated_prompt_is_cached_and_answers_the_same(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Please summarize: " + "the quick brown fox jumps over the dog. " * 20}]

    first, second = (
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)  # type: ignore[arg-type]
        for _ in range(2)
    )

    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 64
    assert second.choices[0].message.content == first.choices[0].message.content


def test_choices_of_one_seeded_request_differ_and_repeat(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story about a fox."}],
            n=4,
            seed=11,
            temperature=1.2,
            max_tokens=24,
        )
        return [choice.message.content or "" for choice in answer.choices]

    first = ask()

    assert len(set(first)) == 4
    assert ask() == first


def test_logprobs_are_of_the_tokens_that_were_sent(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )

    [choice] = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(entry.token for entry in content).startswith(choice.message.content or "?")
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs), "greedy takes the likeliest"


async def test_a_client_that_leaves_frees_the_engine_within_a_second(evenhand_server: EvenhandProcess) -> None:
    """One in mid-stream, one that waits for a whole answer; seen from the engine's own counts."""
    [socket] = (evenhand_server.home / "run").glob("*/engine.sock")
    engine = EngineClient([EngineLink("engine-0", ZeroMQClient(f"ipc://{socket}"))], FirstReady())
    await engine.start()
    await engine.wait_up(MODEL, 10)
    client = openai.AsyncOpenAI(base_url=evenhand_server.base_url, api_key=evenhand_server.key, max_retries=0)
    parameters = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a very long story."}],
        "max_tokens": 4000,
        "extra_body": {"ignore_eos": True},
    }
    whole = asyncio.create_task(client.chat.completions.create(**parameters))  # type: ignore[call-overload]
    stream = await client.chat.completions.create(**parameters, stream=True)  # type: ignore[call-overload]
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    async with asyncio.timeout(10):
        while (await engine.stats(MODEL)).num_running < 2:
            pass  # every look is a message to the engine and back

    whole.cancel()
    await stream.close()
    left = time.monotonic()
    while True:
        now = await engine.stats(MODEL)
        if now.num_running + now.num_waiting == 0 and now.num_free_blocks + now.num_cached_blocks == now.num_blocks:
            break
        assert time.monotonic() - left < 1.0, f"{now.num_running} still running"
    steps = now.num_steps
    for _ in range(10):  # between two answers an engine takes a step of whatever it still has to do
        assert (await engine.stats(MODEL)).num_steps == steps

    await client.close()
    await engine.close()


async def _texts(
    client: openai.AsyncOpenAI, index: int, prompt: str, stop: list[str] | None, gate: asyncio.Semaphore
) -> tuple[str, str, CompletionUsage, str, str, CompletionUsage]:
    """(text, finish, usage) of the same request, not streamed and streamed."""
    # A high temperature makes broken UTF-8, rare scripts and emoji, which polite answers would not.
    parameters = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 16 + index % 13,
        "temperature": [0.0, 0.8, 1.6, 2.0][index % 4],
        "seed": index,
        "stop": stop,
    }
    async with gate:
        whole = await client.chat.completions.create(**parameters)  # type: ignore[call-overload]
        text, finish, usage = "", "", None
        stream = await client.chat.completions.create(**parameters, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
            usage = chunk.usage or usage
    assert usage is not None
    [choice] = whole.choices
    return choice.message.content or "", choice.finish_reason, whole.usage, text, finish, usage


async def test_streamed_text_equals_text_in_one_piece(evenhand_server: EvenhandProcess) -> None:
    """200 prompts, each without stop strings and then with ones cut out of its own answer."""
    rng = random.Random(5)
    client = openai.AsyncOpenAI(base_url=evenhand_server.base_url, api_key=evenhand_server.key, max_retries=0)
    gate = asyncio.Semaphore(AT_ONCE)
    prompts = [f"{SEEDS_TEXT[i % len(SEEDS_TEXT)]} ({i})" for i in range(NUM_PROMPTS)]

    free = await asyncio.gather(*(_texts(client, i, prompt, None, gate) for i, prompt in enumerate(prompts)))
    stops = []
    for text, *_ in free:
        start = rng.randrange(max(1, len(text) - 4))
        stops.append([text[start : start + rng.randint(2, 7)] or "\n", "never in any answer 🦊"])
    stopped = await asyncio.gather(
        *(_texts(client, i, prompt, stop, gate) for i, (prompt, stop) in enumerate(zip(prompts, stops, strict=True)))
    )

    num_stopped = num_beyond_ascii = 0
    for i, (text, finish, usage, streamed, streamed_finish, streamed_usage) in enumerate([*free, *stopped]):
        assert text == streamed, f"prompt {i}"
        assert finish == streamed_finish, f"prompt {i}"
        assert _counts(usage) == _counts(streamed_usage), f"prompt {i}"
        num_beyond_ascii += not text.isascii()
    for (text, _, usage, *_), (cut, finish, cut_usage, *_), stop in zip(free, stopped, stops, strict=True):
        if stop[0] in text:
            assert cut == text[: text.index(stop[0])]
            assert finish == "stop"
            assert cut_usage.completion_tokens <= usage.completion_tokens
            num_stopped += 1
    assert num_stopped > NUM_PROMPTS * 0.9, "the stop strings were meant to occur"
    assert num_beyond_ascii > NUM_PROMPTS * 0.3, "the answers were meant to leave ASCII"
    await client.close()


def _counts(usage: CompletionUsage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_sampling_parameters_reach_the_model(client: openai.OpenAI) -> None:
    def ask(**parameters: object) -> openai.types.chat.chat_completion.Choice:
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=24,
            **parameters,  # type: ignore[arg-type]
        ).choices[0]

    plain = ask()
    assert "Paris" in (plain.message.content or "")
    assert plain.finish_reason == "stop"

    assert "Paris" not in (ask(extra_body={"stop": [" Paris"]}).message.content or "")
    assert ask(extra_body={"min_tokens": 24}).finish_reason == "length"
    assert ask(extra_body={"ignore_eos": True}).finish_reason == "length"
    assert ask(extra_body={"stop_token_ids": list(range(300, 49152))}).message.content == ""
    assert ask(extra_body={"logit_bias": {str(i): -100 for i in range(300, 49152)}}).message.content != (
        plain.message.content
    )
    assert ask(extra_body={"repetition_penalty": 5.0, "min_tokens": 24}).message.content != (
        ask(extra_body={"min_tokens": 24}).message.content
    )


def test_a_passed_deadline_ends_a_request(client: openai.OpenAI) -> None:
    began = time.monotonic()

    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a very long story."}],
            max_tokens=4000,
            extra_body={"ignore_eos": True},
            extra_headers={"x-evenhand-deadline-ms": "400"},
        )

    assert time.monotonic() - began < 3
    assert (raised.value.status_code, raised.value.code) == (408, "deadline_exceeded")


async def test_huge_prompts_are_refused_at_once_and_hold_nobody_up(evenhand_server: EvenhandProcess) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a " * 4_500_000}]}
    headers = {"authorization": f"Bearer {evenhand_server.key}"}
    async with httpx.AsyncClient(base_url=evenhand_server.base_url, headers=headers, timeout=60) as client:
        huge = [asyncio.create_task(client.post("/chat/completions", json=body)) for _ in range(3)]
        began = time.monotonic()
        small = await client.post(
            "/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        )
        waited_s = time.monotonic() - began
        refusals = await asyncio.gather(*huge)

    assert small.status_code == 200
    assert waited_s < 5
    assert time.monotonic() - began < 10
    assert [r.status_code for r in refusals] == [400] * 3
    assert {r.json()["error"]["code"] for r in refusals} == {"context_length_exceeded"}


def test_the_readme_s_example_names_paris(evenhand_server: EvenhandProcess) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for written, here in {
        "eh_…": evenhand_server.key,
        "http://127.0.0.1:8000/v1": evenhand_server.base_url,
    }.items():
        assert written in code
        code = code.replace(written, here)

    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "Paris" in answer.stdout


def test_the_printed_curl_line_works_as_it_stands(evenhand_server: EvenhandProcess) -> None:
    command, *_ = re.findall(r"Try it:\n(  curl (?:.*\\\n)*.*)", evenhand_server.stderr)

    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60).stdout

    assert "Paris" in answer
