"""What the door does with requests that are too large, too slow, or never come: on the wire, as an attacker sees it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from evenhand_process import wait_until
from scripted_server import KEY, ScriptedServer, running_server

MAX_HEADER_BYTES = 4096
MAX_BODY_BYTES = 100_000
HEADER_TIMEOUT_S = 1.5
BODY_TIMEOUT_S = 0.5
CHAT = {"model": "hello", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def strict(free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server with limits that a test can reach."""
    limits = {
        "max_header_bytes": MAX_HEADER_BYTES,
        "max_body_bytes": MAX_BODY_BYTES,
        "header_timeout_s": HEADER_TIMEOUT_S,
        "body_timeout_s": BODY_TIMEOUT_S,
        "trusted_proxies": ["127.0.0.0/8"],
    }
    with running_server(free_port(), tmp_path_factory.mktemp("strict"), **limits) as server:
        yield server


def head(*lines: str, method: str = "POST", path: str = "/v1/chat/completions") -> bytes:
    fixed = (f"{method} {path} HTTP/1.1", "host: test", f"authorization: Bearer {KEY}")
    return "\r\n".join([*fixed, *lines, "", ""]).encode()


@contextlib.contextmanager
def connected(server: ScriptedServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        yield connection


def until_closed(connection: socket.socket) -> bytes:
    """Everything that comes before the server closes the connection; TimeoutError if it does not."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    start, _, body = answer.partition(b"\r\n\r\n")
    return int(start.split()[1]), json.loads(body)["error"]


def test_a_body_that_is_declared_too_large_is_refused_unread(strict: ScriptedServer) -> None:
    with connected(strict) as connection:
        connection.sendall(head(f"content-length: {MAX_BODY_BYTES + 1}", "expect: 100-continue"))
        answer = until_closed(connection)

    status, error = error_of(answer)
    assert (status, error["code"]) == (413, "request_too_large")
    assert b"100 Continue" not in answer


def test_a_client_that_asks_first_is_told_to_go_on_if_its_body_may_come(strict: ScriptedServer) -> None:
    body = json.dumps(CHAT).encode()
    with connected(strict) as connection:
        connection.sendall(head(f"content-length: {len(body)}", "expect: 100-continue"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_writes_on_sees_the_refusal(strict: ScriptedServer) -> None:
    num_bytes = 8 << 20
    with connected(strict) as connection:
        connection.sendall(head(f"content-length: {num_bytes}"))
        connection.sendall(b"x" * num_bytes)
        status, error = error_of(until_closed(connection))

    assert (status, error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("framing", ["content-length: 1000", "transfer-encoding: chunked"])
@pytest.mark.parametrize("sent", [b"", b"1\r\n{\r\n"])
def test_a_slow_body_is_given_up(strict: ScriptedServer, framing: str, sent: bytes) -> None:
    started = time.monotonic()
    with connected(strict) as connection:
        connection.sendall(head(framing) + sent)
        status, error = error_of(until_closed(connection))

    assert (status, error["code"], error["type"]) == (408, "request_timeout", "timeout_error")
    assert BODY_TIMEOUT_S <= time.monotonic() - started < BODY_TIMEOUT_S + 3


def test_a_body_that_trickles_is_given_up_too(strict: ScriptedServer) -> None:
    started = time.monotonic()
    with connected(strict) as connection:
        connection.sendall(head("content-length: 1000"))
        connection.settimeout(0.1)
        answer = b""
        while b"\r\n\r\n" not in answer and time.monotonic() - started < 10:
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.sendall(b" ")
                answer += connection.recv(65536)

    assert answer.startswith(b"HTTP/1.1 408")


def test_headers_over_the_limit_are_refused_in_our_shape(strict: ScriptedServer) -> None:
    fits, too_long = "x" * (MAX_HEADER_BYTES - 500), "x" * MAX_HEADER_BYTES
    assert httpx.get(f"{strict.url}/health", headers={"x-long": fits}).status_code == 200
    for answer in (
        httpx.get(f"{strict.url}/health", headers={"x-long": too_long}),
        httpx.get(f"{strict.url}/health", headers={f"x-{i}": "y" * 90 for i in range(60)}),
        httpx.get(f"{strict.url}/nowhere?{too_long}"),
    ):
        assert answer.status_code == 431
        assert answer.json()["error"]["code"] == "headers_too_large"
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "lines", [[f"x-{i}: y" for i in range(101)], ["x-long: " + "y" * 500_000]], ids=["too many", "over the buffer"]
)
def test_headers_that_the_server_itself_refuses_close_the_connection(strict: ScriptedServer, lines: list[str]) -> None:
    with connected(strict) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head(*lines, method="GET", path="/health"))
        assert until_closed(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("said", [b"", b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: te"])
def test_a_connection_whose_request_does_not_come_is_closed(strict: ScriptedServer, said: bytes) -> None:
    started = time.monotonic()
    with connected(strict) as connection:
        connection.sendall(said)
        until_closed(connection)

    assert time.monotonic() - started < HEADER_TIMEOUT_S + 3


def test_two_hundred_clients_that_send_a_byte_a_second_are_cut_and_hold_nobody_up(strict: ScriptedServer) -> None:
    opened = [socket.create_connection(("127.0.0.1", strict.port), timeout=20) for _ in range(200)]
    stop = threading.Event()

    def trickle() -> None:
        text = head("x-slow: " + "y" * 100, method="GET", path="/health")
        for i in range(len(text)):
            for connection in opened:
                with contextlib.suppress(OSError):
                    connection.send(text[i : i + 1])
            if stop.wait(1.0):
                return

    trickling = threading.Thread(target=trickle)
    started = time.monotonic()
    trickling.start()
    try:
        with httpx.Client(headers=strict.headers) as client:
            slowest = 0.0
            while time.monotonic() - started < HEADER_TIMEOUT_S - 0.5:
                asked = time.monotonic()
                assert client.post(f"{strict.url}/v1/chat/completions", json=CHAT).status_code == 200
                slowest = max(slowest, time.monotonic() - asked)
        for connection in opened:
            until_closed(connection)
        assert time.monotonic() - started < HEADER_TIMEOUT_S + 3
        assert slowest < 1
    finally:
        stop.set()
        trickling.join()
        for connection in opened:
            connection.close()


def test_every_log_line_of_a_request_names_the_client_that_a_trusted_proxy_names(strict: ScriptedServer) -> None:
    served = strict.chat("hello")
    forwarded = {"x-forwarded-for": "198.51.100.1, 203.0.113.9:4711, 127.0.0.9"}
    passed_on = strict.post("/v1/chat/completions", CHAT, headers=forwarded)
    refused = strict.post("/v1/chat/completions", {**CHAT, "model": "nothing"}, headers=forwarded)

    def line_of(answer: httpx.Response) -> dict[str, Any]:
        request_id = answer.headers["x-request-id"]
        wait_until(lambda: any(line["request_id"] == request_id for line in strict.log_lines()))
        return next(line for line in strict.log_lines() if line["request_id"] == request_id)

    assert line_of(served)["client"] == "127.0.0.1"
    assert line_of(passed_on)["client"] == "203.0.113.9"
    assert line_of(refused)["client"] == "203.0.113.9"


@pytest.mark.parametrize(
    "lines",
    [
        ["x-client-request-id: a\r\nset-cookie: admin=1"],
        ["x-client-request-id: a\x0bb"],
        ["x-client-request-id: " + "a" * 129],
        ["x-client-request-id: \xe9"],
    ],
    ids=["line break", "control character", "too long", "not ASCII"],
)
def test_a_header_cannot_be_brought_into_the_answer(strict: ScriptedServer, lines: list[str]) -> None:
    with connected(strict) as connection:
        connection.sendall(head(*lines, "connection: close", method="GET", path="/health"))
        answer, _, _ = until_closed(connection).lower().partition(b"\r\n\r\n")

    assert b"set-cookie" not in answer
    assert b"x-client-request-id: a\x0b" not in answer
    assert b"\xe9" not in answer
    assert b"a" * 129 not in answer
