"""A client that leaves is charged for its prompt and for what was computed until the engine stopped, at once."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import MODEL, Cluster, running_alone
from evenhand_process import wait_until

READ = 37
FEW = 8


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[Cluster]:
    """An engine that makes 50 tokens a second."""
    with running_alone(tmp_path_factory.mktemp("alone"), smollm2_path.parents[1], free_port, step_ms=20) as cluster:
        cluster.command("org", "create", "acme")
        cluster.command("team", "create", "--org", "acme", "--weight", "1", "blue")
        yield cluster


def row_of(cluster: Cluster, request_id: str) -> dict[str, Any] | None:
    connection = sqlite3.connect(cluster.home / "evenhand.db")
    try:
        connection.row_factory = sqlite3.Row
        found = connection.execute("SELECT * FROM ledger WHERE request_id = ?", (request_id,)).fetchone()
        return None if found is None else dict(found)
    finally:
        connection.close()


def test_a_client_that_leaves_after_37_tokens(alone: Cluster) -> None:
    key = alone.new_key("acme", "blue")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 4000, "stream": True}
    url = f"{alone.gateways[0].url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=30) as response:
        request_id = response.headers["x-request-id"]
        num_read = 0
        for line in response.iter_lines():
            num_read += line.startswith("data: ") and '"content":"' in line and '"content":""' not in line
            if num_read == READ:
                break
    left_at_ms = time.time() * 1000
    wait_until(lambda: row_of(alone, request_id) is not None, 10)
    row = row_of(alone, request_id)
    assert row is not None
    whole = httpx.post(
        url, json={**body, "stream": False, "max_tokens": 1}, headers={"authorization": f"Bearer {key}"}, timeout=30
    ).json()

    assert row["outcome"] == "client_gone"
    assert row["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert READ <= row["completion_tokens"] <= READ + FEW
    assert row["closed_at_ms"] - left_at_ms < 1000, "settled once the engine has stopped"
    assert row["decode_us"] > 0, "the engine has confirmed it, with its counts"
    assert "clean" in alone.command("ledger", "verify")
