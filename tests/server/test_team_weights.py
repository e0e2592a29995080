"""`evenhand team set-weight` acts on requests that wait or run, within two seconds, whoever sent them; and it shows.

Gateways, databases and the scheduler are real; the engine computes nothing and takes its time over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cluster import FAIR_ENGINE, MODEL, Cluster, Gateway, running_alone, running_cluster
from evenhand_process import wait_until
from prometheus_client.parser import text_string_to_metric_families

from engine.carriers.zeromq_client import ZeroMQClient
from engine.client import EngineClient
from engine.link import EngineLink
from engine.messages import Stats
from engine.router import FirstReady

BOUND_S = 2.0
NUM_SLOTS = 8
NUM_REQUESTS = 12
"""Of each team: more than there are slots. None of them ends."""

pytestmark = pytest.mark.slow


class Engine:
    """A client of the engine beside the gateways, to see what it has without waiting for their metrics."""

    def __init__(self, endpoint: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._client = EngineClient([EngineLink("engine-0", ZeroMQClient(endpoint))], FirstReady())
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result(30)

    async def _begin(self) -> None:
        await self._client.start()
        await self._client.wait_up(MODEL, 20)

    def stats(self) -> Stats:
        return asyncio.run_coroutine_threadsafe(self._client.stats(MODEL), self._loop).result(30)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Hub:
    """A cluster with two teams of equal weight, whose requests have all been sent: no later one brings a weight."""

    def __init__(self, cluster: Cluster, stack: contextlib.ExitStack) -> None:
        self.cluster = cluster
        cluster.command("org", "create", "acme")
        keys = {}
        self.nodes: dict[str, str] = {}
        for team in ("red", "blue"):
            self.nodes[team] = f"team:{cluster.command('team', 'create', '--org', 'acme', '--weight', '1', team)}"
            keys[team] = cluster.new_key("acme", team)
        self._client = stack.enter_context(httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None)))
        self.engine = Engine(cluster.endpoint)
        stack.callback(self.engine.close)
        for i in range(NUM_REQUESTS):
            for key in keys.values():
                self._send(cluster.gateways[i % len(cluster.gateways)], key, stack)

    def _send(self, gateway: Gateway, key: str, stack: contextlib.ExitStack) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Count to a million."}],
            "max_tokens": 8000,
            "ignore_eos": True,
            "stream": True,
        }
        stream = self._client.stream(
            "POST", f"{gateway.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )
        assert stack.enter_context(stream).status_code == 200

    def of(self, team: str, field: str) -> int:
        found: int = next(getattr(t, field) for t in self.engine.stats().teams if t.team_id == self.nodes[team])
        return found

    def weigh(self, team: str, weight: int) -> float:
        """When it was done, on the monotonic clock."""
        self.cluster.command("team", "set-weight", "--org", "acme", team, str(weight))
        return time.monotonic()


@pytest.fixture(params=["sqlite", "postgresql and redis"])
def hub(
    request: pytest.FixtureRequest, tmp_path: Path, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[Hub]:
    """One gateway on SQLite, or two on PostgreSQL and Redis."""
    running = running_alone if request.param == "sqlite" else running_cluster
    engine = (FAIR_ENGINE, str(NUM_SLOTS))
    with running(tmp_path, smollm2_path.parents[1], free_port, engine=engine) as cluster, contextlib.ExitStack() as s:
        yield Hub(cluster, s)


def team_metrics(gateway: Gateway) -> dict[str, dict[str, float]]:
    """Team → name of the metric → value; one sample for each."""
    text = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics").text
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("organization") == "acme" and "outcome" not in sample.labels:
                name = sample.name.removeprefix("evenhand_team_")
                assert name not in found.setdefault(sample.labels["team"], {})
                found[sample.labels["team"]][name] = sample.value
    return found


def test_a_weight_acts_on_requests_that_were_sent_before(hub: Hub) -> None:
    wait_until(lambda: hub.of("red", "num_slots") == hub.of("blue", "num_slots") == NUM_SLOTS // 2)
    assert hub.of("red", "entitled_ppm") == 500_000
    assert hub.of("red", "num_waiting") == NUM_REQUESTS - NUM_SLOTS // 2

    done = hub.weigh("red", 3)
    wait_until(lambda: hub.of("red", "entitled_ppm") == 750_000)
    assert time.monotonic() - done < BOUND_S
    wait_until(lambda: hub.of("red", "num_slots") == 6, 5)
    assert (hub.of("blue", "num_slots"), hub.of("blue", "num_parked")) == (2, 2)

    before = {team: hub.of(team, "served_us") for team in hub.nodes}
    served: dict[str, int] = {}

    def served_long_enough() -> bool:
        served.update((team, hub.of(team, "served_us") - before[team]) for team in hub.nodes)
        return sum(served.values()) > 1_000_000

    wait_until(served_long_enough)
    assert served["red"] / sum(served.values()) == pytest.approx(0.75, rel=0.05)

    def shows_it(gateway: Gateway) -> bool:
        metrics = team_metrics(gateway)
        return [metrics[team].get("slots") for team in ("red", "blue")] == [6, 2]

    for gateway in hub.cluster.gateways:
        wait_until(lambda gateway=gateway: shows_it(gateway), 10)
        metrics = team_metrics(gateway)
        assert metrics["red"]["entitled_ratio"] == 0.75
        assert metrics["red"]["waiting_requests"] == NUM_REQUESTS - 6
        assert metrics["blue"]["parked_requests"] == 2
        assert metrics["blue"]["borrowed_slots"] == metrics["red"]["lent_slots"] == 0
        assert metrics["red"]["engine_seconds_total"] > metrics["blue"]["engine_seconds_total"] > 0
        assert abs(metrics["red"]["lag_seconds"]) < 2

    done = hub.weigh("red", 1)
    wait_until(lambda: hub.of("red", "entitled_ppm") == 500_000)
    assert time.monotonic() - done < BOUND_S
    for gateway in hub.cluster.gateways:
        assert "not told" not in gateway.log
