"""What is refused, and how: one shape, the right status, the field that is at fault, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted_server import KEY, ScriptedServer, chat_body, running_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error, after a look at its shape."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    for forbidden in ("Traceback", "msgspec", "litestar", 'File "', "status_code", KEY):
        assert forbidden not in answer.text
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0]"),
        ({"model": 5}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": -3}, "n"),
        ({"n": 17}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"seed": 1 << 63}, "seed"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1 << 64}, "top_k"),
        ({"min_tokens": 1 << 64}, "min_tokens"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"cat": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_bad_chat_field_is_named(scripted: ScriptedServer, fields: dict[str, Any], param: str) -> None:
    answer = scripted.post(CHAT, {**chat_body("hello"), **fields})

    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": ["a"] * 20, "n": 10}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_completion_field_is_named(scripted: ScriptedServer, fields: dict[str, Any], param: str) -> None:
    answer = scripted.post(TEXT, {"model": "hello", "prompt": "x", **fields})

    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(scripted: ScriptedServer, missing: str) -> None:
    body = chat_body("hello")
    del body[missing]
    answer = scripted.post(CHAT, body)

    assert answer.status_code == 400
    assert error_of(answer)["param"] == missing


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"not json", b'{"model": "hello"} x', b"\xff\xfe", b'{"x":' + b"[" * 200_000,
     b'{"model": "hello", "messages": NaN}', b'{"model": "\\ud83d'],
    ids=["empty", "cut", "array", "string", "word", "trailing", "not utf-8", "deep", "NaN", "cut in a surrogate"],
)  # fmt: skip
def test_a_body_that_is_no_request(scripted: ScriptedServer, body: bytes) -> None:
    for path in (CHAT, TEXT):
        answer = scripted.post(path, body, headers={"content-type": "application/json"})

        assert answer.status_code == 400
        assert error_of(answer)["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_a_wrong_address(scripted: ScriptedServer) -> None:
    for answer in (
        scripted.chat("gpt-99"),
        scripted.post(TEXT, {"model": "gpt-99", "prompt": "x"}),
        httpx.get(f"{scripted.url}/v1/models/gpt-99", headers=scripted.headers),
    ):
        assert answer.status_code == 404
        error = error_of(answer)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-99" in error["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/embeddings", "/v2/chat/completions"])
def test_a_wrong_address(scripted: ScriptedServer, path: str) -> None:
    for answer in (scripted.post(path, {}), httpx.get(scripted.url + path)):
        assert answer.status_code == 404
        assert error_of(answer)["code"] is None


def test_a_wrong_method(scripted: ScriptedServer) -> None:
    answer = httpx.delete(scripted.url + CHAT, headers=scripted.headers)

    assert answer.status_code == 405
    assert error_of(answer)["code"] == "method_not_allowed"
    assert "POST" in answer.headers["allow"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"x-api-key": "wrong"},
    ],
    ids=["none", "empty", "no key", "basic", "wrong", "longer", "shorter", "x-api-key"],
)
def test_no_key_or_a_wrong_one(scripted: ScriptedServer, headers: dict[str, str]) -> None:
    for path, method in ((CHAT, "POST"), (TEXT, "POST"), ("/v1/models", "GET"), ("/chat/completions", "POST")):
        answer = httpx.request(method, scripted.url + path, headers=headers)

        assert answer.status_code == 401
        error = error_of(answer)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_window(scripted: ScriptedServer, stream: bool) -> None:
    """Agents compact their history on exactly this code and phrase; it comes before the first header of a stream."""
    answer = scripted.chat("hello", prompt="word " * 1200, stream=stream)

    assert answer.status_code == 400
    error = error_of(answer)
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "This model's maximum context length is 1000 tokens. However, your messages resulted in 1200 tokens. "
        "Please reduce the length of the messages."
    )


def big_body() -> bytes:
    return b'{"model": "hello", "messages": [{"role": "user", "content": "' + b"x" * (20 << 20) + b'"}]}'


def in_parts(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]


def test_a_body_of_20_megabytes(scripted: ScriptedServer) -> None:
    """With its length said beforehand, and without; the client is never cut off before it has the answer."""
    whole = scripted.post(CHAT, big_body())
    chunked = scripted.post(CHAT, in_parts(big_body()))

    for answer in (whole, chunked):
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large"
    assert scripted.chat("hello").status_code == 200


def test_a_body_just_within_the_limit_is_read(scripted: ScriptedServer) -> None:
    body = b'{"model": "hello", "messages": [{"role": "user", "content": "' + b"x" * ((10 << 20) - 100) + b'"}]}'

    assert scripted.post(CHAT, in_parts(body)).status_code == 200


@pytest.mark.parametrize("value", ["soon", "0", "-5", "1e3", "999999999999", ""])
def test_a_deadline_that_is_none(scripted: ScriptedServer, value: str) -> None:
    answer = scripted.post(CHAT, chat_body("hello"), headers={"x-evenhand-deadline-ms": value})

    assert answer.status_code == 400
    assert error_of(answer)["param"] == "x-evenhand-deadline-ms"


@pytest.mark.parametrize("model", ["refuses", "dies-at-once"])
def test_an_engine_that_cannot_answer_is_503_with_retry_after(scripted: ScriptedServer, model: str) -> None:
    answer = scripted.chat(model)

    assert answer.status_code == 503
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "2000")


def test_a_stream_that_was_never_begun_has_a_status(scripted: ScriptedServer) -> None:
    answer = scripted.chat("refuses", stream=True)

    assert answer.status_code == 503
    assert error_of(answer)["code"] == "engine_unavailable"


@pytest.mark.parametrize(
    ("model", "code", "told"),
    [
        ("dies-in-the-middle", "engine_unavailable", "one two "),
        ("dies-at-once", "engine_unavailable", ""),
        ("rejects-late", None, ""),
        ("breaks", "internal_error", "one "),
    ],
)
def test_a_stream_never_just_stops(scripted: ScriptedServer, model: str, code: str | None, told: str) -> None:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}], stream=True)
        pieces: list[str | None] = []
        with pytest.raises(openai.APIError) as raised:
            pieces.extend(chunk.choices[0].delta.content for chunk in stream)

    assert "".join(piece or "" for piece in pieces) == told
    assert raised.value.code == code


def test_an_error_in_a_stream_is_an_event_of_the_usual_shape(scripted: ScriptedServer) -> None:
    lines = scripted.chat("dies-in-the-middle", stream=True).text.split("\n\n")

    assert lines[-1] == ""
    assert lines[-2] == (
        'data: {"error":{"message":"The engine is not available right now. Please try again shortly.",'
        '"type":"server_error","param":null,"code":"engine_unavailable"}}'
    )
    assert not any("[DONE]" in line for line in lines)


def test_a_bug_of_ours_tells_nothing(scripted: ScriptedServer) -> None:
    answer = scripted.chat("breaks")

    assert answer.status_code == 500
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert error["message"] == "The server had an error while processing your request."


def test_engine_down_and_up_again(free_port: Callable[[], int], tmp_path: Path) -> None:
    with running_server(free_port(), tmp_path) as server:
        server.set_engine(up=False)
        refused, ready = server.chat("hello"), httpx.get(f"{server.url}/ready")
        health = httpx.get(f"{server.url}/health")
        server.set_engine(up=True)

        assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_unavailable")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (ready.status_code, ready.json()["status"]) == (503, "unavailable")
        assert health.status_code == 200
        assert server.chat("hello").status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 200


def test_no_log_line_holds_text_or_a_key(free_port: Callable[[], int], tmp_path: Path) -> None:
    """Through answers, streams, refusals, bugs of ours and clients that leave."""
    secret = "PURPLE-ELEPHANT"
    with running_server(free_port(), tmp_path) as server:
        for model in ("hello", "dies-in-the-middle", "breaks", "refuses", "no-such-model"):
            for stream in (False, True):
                server.chat(model, prompt=f"{secret} {KEY}", stream=stream, stop=secret, user=secret)
                server.post(TEXT, {"model": model, "prompt": f"{secret} {KEY}", "stream": stream})
        server.post(CHAT, {**chat_body("hello", prompt=secret), "temperature": 9})
        server.post(CHAT, {**chat_body("hello"), "messages": [{"role": secret, "content": secret}]})
        server.post(CHAT, f'{{"model": "hello", "messages": [{secret}'.encode())
        server.post(f"/v1/{secret}", {"x": secret})
        httpx.post(f"{server.url}{CHAT}?q={secret}", headers={"authorization": f"Bearer {secret}"})
        with server.connect(CHAT, {**chat_body("one-then-never", prompt=secret), "stream": True}):
            server.wait("one-then-never", told=1)
        server.wait("one-then-never", aborted=1)
        log = server.log_file.read_text()

    assert secret not in log
    assert KEY not in log
    assert "Hello" not in log
    events = [line["event"] for line in server.log_lines()]
    assert {"request.finished", "request.refused", "stream.failed"} <= set(events)


def test_a_request_that_ran_and_failed_is_told_once(scripted: ScriptedServer) -> None:
    response = scripted.chat("dies-in-the-middle")
    request_id = response.headers["x-request-id"]
    scripted.settled(request_id)

    events = [line["event"] for line in scripted.log_lines() if line.get("request_id") == request_id]

    assert response.status_code == 503
    assert events == ["request.finished"]
