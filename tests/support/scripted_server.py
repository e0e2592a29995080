"""A really running gateway with a scripted backend, in a process of its own, and the ways a test talks to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from identity_kit import KEY

PROGRAM = Path(__file__).with_name("scripted_program.py")


@dataclass(frozen=True)
class ScriptedServer:
    """A running server and the way to its controls."""

    port: int
    process: subprocess.Popen[bytes]
    log_file: Path
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {KEY}"}

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A plain POST with the key; a body of bytes or an iterator is sent as it is."""
        headers = self.headers | options.pop("headers", {})
        if isinstance(body, (dict, list)):
            return httpx.post(self.url + path, json=body, headers=headers, timeout=30, **options)
        return httpx.post(self.url + path, content=body, headers=headers, timeout=30, **options)

    def chat(self, model: str, *, prompt: str = "hi there", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(model, prompt=prompt, **fields))

    def connect(self, path: str, body: Any) -> socket.socket:
        """A raw connection on which the request has been sent; what the client does next is up to the test."""
        content = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        head = [
            f"POST {path} HTTP/1.1",
            "host: test",
            f"authorization: Bearer {KEY}",
            f"content-length: {len(content)}",
        ]
        connection.sendall("\r\n".join([*head, "", ""]).encode() + content)
        return connection

    def generations(self, model: str) -> list[dict[str, Any]]:
        return httpx.get(f"{self.url}/control/generations/{model}").json()

    def wait(self, model: str, **reached: int) -> list[dict[str, Any]]:
        """Until so many requests of a model are `started` or `aborted`, or so many events `told`, in all."""
        answer = httpx.post(f"{self.url}/control/wait/{model}", params=reached, timeout=30)
        assert answer.status_code == 200, f"{model} did not reach {reached} in time"
        return answer.json()

    def reset(self) -> None:
        """Forget the requests of earlier tests, and close all gates."""
        httpx.post(f"{self.url}/control/reset").raise_for_status()

    def open_gate(self, name: str) -> None:
        httpx.post(f"{self.url}/control/gates/{name}").raise_for_status()

    def set_engine(self, *, up: bool) -> None:
        httpx.post(f"{self.url}/control/engine/{int(up)}").raise_for_status()

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def settled(self, request_id: str) -> dict[str, Any]:
        """The log line of a settled request; waits for it, since it may follow the last byte of the answer."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for line in self.log_lines():
                if line["event"] == "request.finished" and line["request_id"] == request_id:
                    return line
            time.sleep(0.01)
        raise AssertionError(f"{request_id} was never settled")

    def rss_bytes(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")


def chat_body(model: str, *, prompt: str = "hi there", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": prompt}], **fields}


@contextmanager
def running_server(
    port: int, folder: Path, *, heartbeat_s: float = 10.0, environment: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[ScriptedServer]:
    """Start, wait for ``/ready``, stop. `settings` are further ones of the server."""
    log_file = folder / "server.log"
    with log_file.open("wb") as log:
        command = [sys.executable, "-W", "error", str(PROGRAM), str(port), str(heartbeat_s), json.dumps(settings)]
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | dict(environment or {})
        )
    server = ScriptedServer(port, process, log_file, "https" if "tls_cert" in settings else "http")
    try:
        _wait_ready(server)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_ready(server: ScriptedServer) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log_file.read_text()
        try:
            if httpx.get(f"{server.url}/ready", verify=server.scheme == "http").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"not ready: {server.log_file.read_text()}")
