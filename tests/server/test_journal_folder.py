"""Somebody removes the journals of a running gateway, or locks its database while it is told to leave."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cluster import MODEL, Cluster, running_alone
from evenhand_process import wait_until

from gateway.services.bookkeeping import DRAIN_S
from gateway.storage.engines import BUSY_S


@pytest.fixture
def alone(tmp_path: Path, smollm2_path: Path, free_port: Callable[[], int]) -> Iterator[Cluster]:
    with running_alone(tmp_path, smollm2_path.parents[1], free_port) as cluster:
        cluster.command("org", "create", "acme")
        cluster.command("team", "create", "--org", "acme", "--weight", "1", "blue")
        yield cluster


def answered(cluster: Cluster, key: str, num: int) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 3}
    for _ in range(num):
        url = f"{cluster.gateways[0].url}/v1/chat/completions"
        response = httpx.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=30)
        assert response.status_code == 200


def num_rows(cluster: Cluster) -> int:
    connection = sqlite3.connect(cluster.home / "evenhand.db")
    try:
        return int(connection.execute("SELECT count(*) FROM ledger").fetchone()[0])
    finally:
        connection.close()


def test_requests_are_charged_although_the_folder_of_the_journals_is_removed(alone: Cluster) -> None:
    key = alone.new_key("acme", "blue")
    answered(alone, key, 5)
    shutil.rmtree(alone.home / "journal")
    answered(alone, key, 5)
    wait_until(lambda: num_rows(alone) == 10, 10)
    (gateway,) = alone.gateways
    assert "files of the journal were removed" in gateway.log
    gateway.send(signal.SIGKILL)
    gateway.wait()
    assert "clean" in alone.command("ledger", "verify")
    assert num_rows(alone) == 10


def test_a_gateway_leaves_in_time_though_its_database_is_locked(alone: Cluster) -> None:
    key = alone.new_key("acme", "blue")
    answered(alone, key, 1)
    wait_until(lambda: num_rows(alone) == 1, 10)
    other = sqlite3.connect(alone.home / "evenhand.db", isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        answered(alone, key, 1)
        began_s = time.monotonic()
        alone.gateways[0].send(signal.SIGTERM)
        alone.gateways[0].wait()
        assert time.monotonic() - began_s < DRAIN_S + 2 * BUSY_S + 1.5
    finally:
        other.close()
    assert len(list((alone.home / "journal").glob("*.journal"))) == 1
