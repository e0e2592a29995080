"""SIGTERM under load: readiness first, then what runs, then the end; nobody behind a balancer notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from evenhand_process import wait_until
from scripted_server import ScriptedServer, chat_body, running_server

NOTICE_S = 1.0
POLL_S = 0.1
REQUESTS_PER_S = 50
LOAD_S = 5.0
WORDS = "".join(f"word{i} " for i in range(20))


class Balancer:
    """Sends requests in turn to the gateways whose ``/ready`` said yes when it last asked, on kept connections."""

    def __init__(self, servers: list[ScriptedServer]) -> None:
        self._clients = {server: httpx.AsyncClient(base_url=server.url, timeout=30) for server in servers}
        self._ready = list(servers)
        self._turn = itertools.count()
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.served: Counter[int] = Counter()

    async def poll(self) -> None:
        while True:
            ready = []
            for server, client in self._clients.items():
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/ready")).status_code == 200:
                        ready.append(server)
            self._ready = ready
            await asyncio.sleep(POLL_S)

    async def send(self, *, stream: bool) -> None:
        server = self._ready[next(self._turn) % len(self._ready)]
        body = chat_body("paced", stream=stream)
        try:
            answer = await self._clients[server].post("/v1/chat/completions", json=body, headers=server.headers)
            text = streamed(answer.text) if stream else answer.json()["choices"][0]["message"]["content"]
        except (httpx.TransportError, ValueError, KeyError) as e:
            self.failures.append(f"{server.port} {e!r}")
        else:
            if answer.status_code != 200 or text != WORDS:
                self.failures.append(f"{server.port} {answer.status_code} {answer.text}")
            self.outcomes["streams" if stream else "whole"] += 1
            self.served[server.port] += 1

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


def streamed(text: str) -> str:
    """The text of a stream that came to its end."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream ended with {events[-1:] or text}")
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])


@pytest.mark.slow
async def test_sigterm_under_load_fails_no_request_if_there_is_a_second_gateway(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    settings: dict[str, Any] = {"drain_notice_s": NOTICE_S, "drain_s": 10}
    with running_server(free_port(), folders[0], **settings) as a, running_server(free_port(), folders[1]) as b:
        balancer = Balancer([a, b])
        polling = asyncio.create_task(balancer.poll())
        requests: list[asyncio.Task[None]] = []
        started = time.monotonic()
        told_at = served_before = 0.0
        for number in range(round(LOAD_S * REQUESTS_PER_S)):
            await asyncio.sleep(max(0.0, started + number / REQUESTS_PER_S - time.monotonic()))
            if number == REQUESTS_PER_S:
                a.process.send_signal(signal.SIGTERM)
                told_at, served_before = time.monotonic(), balancer.served[a.port]
            requests.append(asyncio.create_task(balancer.send(stream=number % 2 == 0)))
        await asyncio.gather(*requests)
        polling.cancel()
        await balancer.close()

        assert a.process.wait(timeout=10) == 0
        assert time.monotonic() - told_at < LOAD_S + 2
    assert balancer.failures == []
    assert balancer.outcomes == {"streams": len(requests) / 2, "whole": len(requests) / 2}
    assert balancer.served[a.port] > served_before, "what ran on the one that was told to leave"


def test_a_drain_takes_requests_during_its_notice_and_refuses_them_after(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    with running_server(free_port(), tmp_path, drain_notice_s=NOTICE_S, drain_s=30) as server:
        with server.connect("/v1/chat/completions", chat_body("gated", stream=True)) as running:
            server.wait("gated", started=1)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            assert httpx.get(f"{server.url}/ready").json()["reason"] == "the server is shutting down"

            during = server.chat("hello")
            assert during.status_code == 200
            assert during.headers["connection"] == "close"

            wait_until(lambda: server.chat("hello").status_code == 503)
            after = server.chat("hello")
            assert after.json()["error"]["message"] == "The server is shutting down. Please try again shortly."
            assert int(after.headers["retry-after"]) >= 1
            assert after.headers["connection"] == "close"
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert server.process.poll() is None, "the stream still runs"

            # No control route is served now, so it is the grace that ends it.
            server.process.send_signal(signal.SIGTERM)
            assert b"shutting down" in read_all(running)
        assert server.process.wait(timeout=10) == 0


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


def test_a_kept_connection_is_closed_with_its_next_answer_once_the_server_drains(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    with (
        running_server(free_port(), tmp_path, drain_notice_s=NOTICE_S) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection,
    ):
        question = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n"
        connection.sendall(question)
        assert b"connection: close" not in connection.recv(65536).lower()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        connection.sendall(question)
        answer = read_all(connection)

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in answer.lower()
