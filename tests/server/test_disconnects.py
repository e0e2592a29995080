"""Clients that leave, read slowly, or not at all: the engine's work stops at once and the request is settled."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from scripted_server import ScriptedServer, chat_body, running_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture
def server(scripted: ScriptedServer) -> ScriptedServer:
    """With counts of requests that begin at this test."""
    scripted.reset()
    return scripted


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        part = connection.recv(65536)
        assert part, f"closed before {mark!r}: {received!r}"
        received += part
    return received


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_client_that_leaves_before_the_first_token(server: ScriptedServer, path: str, stream: bool) -> None:
    body = {**chat_body("never"), "prompt": "x", "stream": stream}
    with server.connect(path, body):
        [generation] = server.wait("never", started=1)
    left = time.monotonic()
    [generation] = server.wait("never", aborted=1)

    assert time.monotonic() - left < 1
    assert generation["num_told"] == 0
    settled = server.settled(generation["request_id"])
    assert (settled["outcome"], settled["completion_tokens"]) == ("client_gone", 0)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_client_that_leaves_in_mid_stream(server: ScriptedServer, path: str) -> None:
    with server.connect(path, {**chat_body("one-then-never"), "prompt": "x", "stream": True}) as connection:
        read_until(connection, b"one ")
    left = time.monotonic()
    [generation] = server.wait("one-then-never", aborted=1)

    assert time.monotonic() - left < 1
    settled = server.settled(generation["request_id"])
    assert (settled["outcome"], settled["completion_tokens"]) == ("client_gone", 1)
    assert settled["ttft_ms"] is not None


def test_client_that_leaves_during_a_whole_answer(server: ScriptedServer) -> None:
    with server.connect(CHAT, chat_body("one-then-never")):
        server.wait("one-then-never", told=1)
    [generation] = server.wait("one-then-never", aborted=1)

    assert server.settled(generation["request_id"])["completion_tokens"] == 1


def test_client_that_resets_the_connection(server: ScriptedServer) -> None:
    connection = server.connect(CHAT, {**chat_body("one-then-never"), "stream": True})
    read_until(connection, b"one ")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()

    server.wait("one-then-never", aborted=1)


def test_client_that_leaves_an_endless_stream(server: ScriptedServer) -> None:
    """Chunks come without a pause, so that nothing but the watch itself can notice."""
    with server.connect(CHAT, {**chat_body("endless"), "stream": True}) as connection:
        read_until(connection, b"many words")
    server.wait("endless", aborted=1)

    assert server.chat("hello").status_code == 200


def test_many_clients_that_leave_at_once(server: ScriptedServer) -> None:
    connections = [server.connect(CHAT, {**chat_body("never"), "stream": i % 2 == 0}) for i in range(100)]
    server.wait("never", started=100)
    for connection in connections:
        connection.close()
    generations = server.wait("never", aborted=100)

    outcomes = {server.settled(generation["request_id"])["outcome"] for generation in generations}
    assert outcomes == {"client_gone"}
    assert server.chat("hello").status_code == 200


def test_a_client_that_stays_gets_all_of_it(server: ScriptedServer) -> None:
    with server.connect(CHAT, {**chat_body("gated"), "stream": True}) as connection:
        read_until(connection, b"one ")
        server.open_gate("go")
        received = read_until(connection, b"[DONE]")

    assert b"two" in received
    [generation] = server.generations("gated")
    assert not generation["aborted"]
    assert server.settled(generation["request_id"])["outcome"] == "finished"


def test_a_connection_serves_request_after_request(server: ScriptedServer) -> None:
    """The watch of one request must not swallow the beginning of the next."""
    with httpx.Client(base_url=server.url, headers=server.headers) as client:
        for i in range(20):
            answer = client.post(CHAT, json=chat_body("hello", stream=i % 2 == 0))
            assert answer.status_code == 200

    assert [generation["aborted"] for generation in server.generations("hello")] == [False] * 20


def test_a_reader_that_does_not_read_holds_up_its_own_stream_only(server: ScriptedServer) -> None:
    """Nothing piles up for it: the stream waits, memory does not grow, others are served."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({**chat_body("endless"), "stream": True}).encode()
    head = [f"POST {CHAT} HTTP/1.1", "host: test", f"authorization: {server.headers['authorization']}"]
    connection.sendall("\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body)
    with connection:
        server.wait("endless", told=10)
        told = stalled_at(server)
        before = server.rss_bytes()
        for _ in range(50):
            assert server.chat("hello").status_code == 200

        assert server.generations("endless")[0]["num_told"] == told
        assert told < 5000
        assert server.rss_bytes() - before < 20 << 20
    server.wait("endless", aborted=1)


def stalled_at(server: ScriptedServer) -> int:
    """Events told when the stream no longer moves, though others are served, so that it has had its turns."""
    told = -1
    while (now := server.generations("endless")[0]["num_told"]) != told:
        told = now
        for _ in range(20):
            assert server.chat("hello").status_code == 200
    return told


def test_a_slow_reader_gets_every_byte(server: ScriptedServer) -> None:
    with server.connect(CHAT, {**chat_body("endless"), "stream": True, "max_tokens": 500}) as connection:
        received = b""
        while b"[DONE]" not in received[-100:]:
            part = connection.recv(2048)
            assert part
            received += part

    assert received.count(b'"content":"many words') == 500


def test_heartbeats_while_nothing_is_told(free_port: Callable[[], int], tmp_path: Path) -> None:
    with (
        running_server(free_port(), tmp_path, heartbeat_s=0.05) as server,
        server.connect(CHAT, {**chat_body("gated"), "stream": True}) as connection,
    ):
        received = b""
        while received.count(b": keep-alive\n\n") < 4:
            received += connection.recv(65536)
        server.open_gate("go")
        received += read_until(connection, b"[DONE]")

    assert b"one " in received
    assert b"two" in received


def test_shutdown_tells_a_running_stream_why(free_port: Callable[[], int], tmp_path: Path) -> None:
    with running_server(free_port(), tmp_path) as server:
        with server.connect(CHAT, {**chat_body("one-then-never"), "stream": True}) as connection:
            read_until(connection, b"one ")
            server.process.send_signal(signal.SIGTERM)
            received = read_until(connection, b"shutting down")
        server.process.wait(timeout=20)
        [settled] = [line for line in server.log_lines() if line["event"] == "request.finished"]

    assert b'data: {"error":' in received
    assert settled["outcome"] == "cancelled"


def test_shutdown_answers_a_waiting_request_in_the_protocols_shape(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    with running_server(free_port(), tmp_path) as server:
        with server.connect(CHAT, {**chat_body("never"), "stream": False}) as connection:
            server.wait("never", started=1)
            server.process.send_signal(signal.SIGTERM)
            received = read_until(connection, b"shutting down")
        server.process.wait(timeout=20)

    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in head.lower()
    assert b"x-request-id: req_" in head.lower()
    assert b'{"error":{"message":' in body


def test_a_burst_of_streams_is_settled_once_each(server: ScriptedServer) -> None:
    answers: list[httpx.Response] = []

    def run() -> None:
        answers.extend(server.chat("eight", stream=True) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [answer.headers["x-request-id"] for answer in answers]
    for request_id in ids:
        server.settled(request_id)

    finished = [line["request_id"] for line in server.log_lines() if line["event"] == "request.finished"]
    assert sorted(request_id for request_id in finished if request_id in ids) == sorted(ids)
    assert len(ids) == 80
