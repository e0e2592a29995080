"""A complaint on a real engine with the real model: recorded, the process killed, replayed from the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from evenhand_process import EvenhandProcess, wait_until

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
SETTINGS = {
    "EVENHAND_ENGINE__POLICY": "fair",
    "EVENHAND_ENGINE__MAX_SEQUENCES": "3",
    "EVENHAND_ENGINE__MAX_STEP_TOKENS": "64",
    "EVENHAND_ENGINE__KV_CACHE_BYTES": "4MiB",  # some 180 tokens, so that blocks are short, too
}


def body(text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **more,
    }


def ask(server: EvenhandProcess, i: int) -> int:
    """The requests of two teams, sampled with seeds of the engine's own."""
    key = server.keys["alpha" if i % 3 else "beta"]
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=60) as client:
        if i % 4:
            return client.post("/chat/completions", json=body(f"Tell me about {i}.", 8 + i)).status_code
        with client.stream("POST", "/chat/completions", json=body("Count.", 60, stream=True)) as response:
            next(response.iter_lines())  # and is gone
            return response.status_code


def replay(recording: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", "sim", "--replay", str(recording)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_plans_of_a_killed_engine_and_of_the_next_one_come_out_again(
    new_home: Callable[[], Path], free_port: Callable[[], int], tmp_path: Path
) -> None:
    recording = tmp_path / "run.jsonl"
    settings = {**SETTINGS, "EVENHAND_ENGINE__RECORD": str(recording)}
    server = EvenhandProcess(new_home(), free_port(), free_port(), settings)
    try:
        server.wait_ready()
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda i: ask(server, i), range(16))) == {200}
        with (
            server.client() as client,
            client.stream("POST", "/chat/completions", json=body("Count.", 100, stream=True)) as response,
        ):
            events = response.iter_lines()
            next(events)
            server.child("engine").kill()
            assert "error" in "".join(events)
        wait_until(lambda: recording.with_name("run.jsonl.1").exists() and server.is_ready(), 60)
        assert ask(server, 1) == 200
        assert server.stop() == 0
    finally:
        server.close()

    for path, num_requests in ((recording.with_name("run.jsonl.1"), 17), (recording, 1)):
        done = replay(path)
        assert (done.returncode, done.stderr) == (0, "")
        assert " steps: identical\n" in done.stdout
        assert path.read_bytes().count(b'"type":"submit"') == num_requests
        assert b'"seed":' in path.read_bytes().split(b"\n", 2)[1]

    content = recording.read_bytes()
    recording.write_bytes(content.replace(b'"max_step_tokens":64', b'"max_step_tokens":16'))
    done = replay(recording)
    assert done.returncode == 1
    assert "different: after 0 equal steps, at line 3: the plans differ" in done.stdout
    assert replay(tmp_path / "none").returncode == 78
