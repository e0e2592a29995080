"""Bodies with escapes, against the standard library's reading of them; large ones, and what the rest waits for them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.web.decoding import BodyDecoder
from gateway.web.inference import InferenceHttp
from gateway.web.openai.requests import MAX_MESSAGES, MAX_NAMED_TOKENS, chat_to_domain
from gateway.web.openai.schema import ChatRequest

ANYTHING = BodyDecoder(dict[str, Any])
CHAT = BodyDecoder(ChatRequest)

ESCAPES = (rb"\ud83d", rb"\uDE00", rb"\uDBFF", rb"\udfff", rb"\ud7ff", rb"\ue000", rb"\u0000", rb"\\", rb"\"", rb"\n")
CUT = (rb"\u00", rb"\ud8", rb"\ud83", rb"\x")
PIECES = st.sampled_from([*ESCAPES, *CUT, rb"ud83d", rb"d83d", "\U0001f600".encode(), b"u", b"a", b"]"])
TEXTS = st.lists(PIECES, max_size=12).map(b"".join)


@given(TEXTS, TEXTS, TEXTS)
def test_escapes_are_read_as_json_has_them_with_lone_halves_replaced(key: bytes, first: bytes, second: bytes) -> None:
    body = b'{"' + key + b'": ["' + first + b'", "' + second + b'"]}'
    try:
        parsed = json.loads(body)
    except ValueError:
        with pytest.raises(InvalidRequest, match="could not parse"):
            ANYTHING.decode(body)
        return
    # UTF-16 joins nothing that was not a pair before: halves that meet are one already for the standard library.
    text = json.dumps(parsed, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    assert ANYTHING.decode(body) == json.loads(text)


def test_an_escaped_backslash_before_something_like_half_a_pair_is_text() -> None:
    assert ANYTHING.decode(rb'{"a": "\\ud83d", "b": "\\\ud83d"}') == {"a": r"\ud83d", "b": "\\\ufffd"}


def test_halves_outside_of_texts_are_malformed() -> None:
    with pytest.raises(InvalidRequest, match="could not parse"):
        ANYTHING.decode(rb'{"a": \ud83d}')


def conversation(num_messages: int, text: bytes) -> bytes:
    message = b'{"role":"user","content":"' + text + b'"}'
    return b'{"model":"m","messages":[' + b",".join([message] * num_messages) + b"]}"


async def test_the_loop_goes_on_while_a_large_body_full_of_halves_is_decoded() -> None:
    body = conversation(250_000, rb"\ud83d")
    started = time.perf_counter()
    with pytest.raises(InvalidRequest):
        chat_to_domain(CHAT.decode(body), None)
    alone_s = time.perf_counter() - started
    http = InferenceHttp(
        None,  # type: ignore[arg-type]  # reading a body does not need it
        max_body_bytes=len(body),
        body_timeout_s=60,
        heartbeat_s=60,
    )

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    scope: Any = {"headers": []}
    reading = asyncio.create_task(http.read(scope, receive, CHAT))
    longest_s, last = 0.0, time.perf_counter()
    while not reading.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest_s, last = max(longest_s, now - last), now

    assert len((await reading).messages) == 250_000
    assert longest_s < alone_s / 2


def test_a_conversation_has_so_many_messages_and_a_message_so_many_parts() -> None:
    assert chat_to_domain(CHAT.decode(conversation(MAX_MESSAGES, b"a")), None).num_answers == 1
    with pytest.raises(InvalidRequest, match="Too many messages") as raised:
        chat_to_domain(CHAT.decode(conversation(MAX_MESSAGES + 1, b"a")), None)
    assert raised.value.param == "messages"
    parts = [{"type": "text", "text": "a"}] * (MAX_MESSAGES + 1)
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": parts}]})
    with pytest.raises(InvalidRequest, match="parts at most") as raised:
        chat_to_domain(CHAT.decode(body), None)
    assert raised.value.param == "messages[0].content"


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_no_more_tokens_can_be_named_than_a_vocabulary_has(field: str) -> None:
    ids = range(MAX_NAMED_TOKENS + 1)
    value = dict.fromkeys(map(str, ids), 1) if field == "logit_bias" else list(ids)
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], field: value}
    with pytest.raises(InvalidRequest, match="at most") as raised:
        chat_to_domain(CHAT.decode(msgspec.json.encode(body)), None)

    assert raised.value.param == field
