"""An answer is the same streamed and whole, however its text was cut: text, usage, reason, log probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_server import ScriptedServer, chat_body

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of a stream's events, without ``[DONE]``, which must be last."""
    *events, done, rest = [block for block in text.split("\n\n") if not block.startswith(":")]
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def put_together(events: list[dict[str, Any]], num_choices: int) -> dict[str, Any]:
    """What a whole answer would hold, from a stream's events."""
    texts, reasons = [""] * num_choices, [None] * num_choices
    logprobs: list[list[Any]] = [[] for _ in range(num_choices)]
    for event in events[:-1]:
        [choice] = event["choices"]
        index = choice["index"]
        assert reasons[index] is None, "nothing follows a finish_reason"
        texts[index] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        logprobs[index] += (choice["logprobs"] or {}).get("content", [])
        reasons[index] = choice["finish_reason"]
    assert events[-1]["choices"] == []
    return {"texts": texts, "reasons": reasons, "logprobs": logprobs, "usage": events[-1]["usage"]}


def taken_apart(body: dict[str, Any]) -> dict[str, Any]:
    choices = body["choices"]
    return {
        "texts": [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices],
        "reasons": [choice["finish_reason"] for choice in choices],
        "logprobs": [(choice["logprobs"] or {}).get("content", []) for choice in choices],
        "usage": body["usage"],
    }


STOPS = [None, "\U0001f468\u200d", "\u5b57 e", "o, w", ["zzz", "!"], "\n", "e\u0301"]
LIMITS = [None, 1, 4]


@pytest.mark.parametrize("stop", STOPS, ids=ascii)
@pytest.mark.parametrize("model", ["hello", "emoji", "two-voices", "silent"])
def test_chat_is_equal_streamed_and_whole(scripted: ScriptedServer, model: str, stop: Any) -> None:
    for limit in LIMITS:
        for n in (1, 2):
            body = chat_body(model, stop=stop, max_tokens=limit, n=n, logprobs=True, top_logprobs=1)
            whole = scripted.post(CHAT, body)
            stream = scripted.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})

            assert taken_apart(whole.json()) == put_together(events_of(stream.text), n)


@pytest.mark.parametrize("stop", STOPS, ids=ascii)
@pytest.mark.parametrize("model", ["hello", "emoji"])
def test_completions_are_equal_streamed_and_whole(scripted: ScriptedServer, model: str, stop: Any) -> None:
    for echo in (False, True):
        body = {"model": model, "prompt": ["A \u6f22", "B"], "n": 2, "stop": stop, "max_tokens": 100, "echo": echo}
        whole = scripted.post(TEXT, body)
        stream = scripted.post(TEXT, {**body, "stream": True, "stream_options": {"include_usage": True}})

        assert taken_apart(whole.json()) == put_together(events_of(stream.text), 4)
