"""Five hundred clients that stream, think and stream again, for two minutes: nothing fails and memory does not grow."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from cluster import MODEL, Cluster, running_alone
from evenhand_process import wait_until

CLIENTS = 500
SOAK_S = 120.0
WARM_S = 40.0
"""Until then every client has been served several times and whatever is cached is there."""
THINK_S = (0.5, 6.0)
MAX_GROWTH_BYTES = 4 << 20


@pytest.mark.slow
async def test_five_hundred_streaming_clients(tmp_path: Path, smollm2_path: Path, free_port: Callable[[], int]) -> None:
    with running_alone(tmp_path, smollm2_path.parents[1], free_port, step_ms=20) as cluster:
        cluster.command("org", "create", "acme")
        cluster.command("team", "create", "--org", "acme", "--weight", "1", "blue")
        key = cluster.new_key("acme", "blue")
        (gateway,) = cluster.gateways
        assert gateway.process is not None
        counts: list[int] = []
        begun = time.monotonic()
        watch = asyncio.create_task(rss_until(psutil.Process(gateway.process.pid), begun + SOAK_S))
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(gateway.url, connector=connector, headers=headers, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for i in range(CLIENTS):
                group.create_task(client(session, random.Random(i), begun + SOAK_S, counts))
        samples = await watch
        await asyncio.to_thread(wait_until, lambda: verified_rows(cluster) == len(counts))

    settled = [rss for at, rss in samples if at - begun > WARM_S]
    third = len(settled) // 3
    growth = statistics.median(settled[-third:]) - statistics.median(settled[:third])
    assert len(counts) > CLIENTS * 5
    assert growth < MAX_GROWTH_BYTES, f"{growth / 1e6:.1f} MB more in the last third than in the first"


async def client(session: aiohttp.ClientSession, rng: random.Random, until: float, counts: list[int]) -> None:
    """Raises at the first thing that goes wrong, and so does the test."""
    await asyncio.sleep(rng.uniform(0, THINK_S[1]))
    while time.monotonic() < until:
        num_tokens = rng.choice((5, 20, 60))
        counts.append(await stream(session, num_tokens))
        assert counts[-1] == num_tokens
        await asyncio.sleep(rng.uniform(*THINK_S))


async def stream(session: aiohttp.ClientSession, num_tokens: int) -> int:
    """One answer; the tokens it says it has. The stream must come to its end."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Go on, please."}],
        "max_tokens": num_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, int] = {}
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return usage["completion_tokens"]
            if line.startswith(b"data: "):
                event = json.loads(data)
                assert "error" not in event, event
                usage = event.get("usage") or usage
    raise AssertionError("the stream just stopped")


async def rss_until(process: psutil.Process, until: float) -> list[tuple[float, int]]:
    samples = []
    while time.monotonic() < until:
        samples.append((time.monotonic(), process.memory_info().rss))
        await asyncio.sleep(1)
    return samples


def verified_rows(cluster: Cluster) -> int:
    """Rows of the ledger, which must be clean at any moment."""
    report = cluster.command("ledger", "verify")
    assert "clean" in report
    return int(report.split()[0])
