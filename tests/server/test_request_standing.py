"""GET /v1/requests/{id} of a running hub: the shipped engine that is full, and gateways that do not know each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cluster import MODEL, Cluster, Gateway, SharedCluster, running_alone, running_cluster
from evenhand_process import EvenhandProcess, wait_until

from gateway.domain.ids import new_request_id

pytestmark = pytest.mark.slow

PARTS = ("queue_us", "prefill_us", "decode_us", "preempted_us", "parked_us")


class Stream:
    """A streamed answer that is read when the test wants it."""

    def __init__(
        self, url: str, key: str, max_tokens: int, stack: contextlib.ExitStack, prompt: str = "Tell me"
    ) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        client = stack.enter_context(httpx.Client(timeout=120))
        self.key = key
        self._begun = time.monotonic()
        self._response = stack.enter_context(
            client.stream("POST", f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        )
        assert self._response.status_code == 200
        self.id = self._response.headers["x-request-id"]

    def finish(self) -> float:
        """Read to the end; seconds since it was sent."""
        assert self._response.read().endswith(b"data: [DONE]\n\n")
        return time.monotonic() - self._begun


def get(url: str, key: str, request_id: str) -> httpx.Response:
    return httpx.get(f"{url}/v1/requests/{request_id}", headers={"authorization": f"Bearer {key}"}, timeout=30)


# --- the shipped engine, with four slots ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(new_home: Callable[[], Path], free_port: Callable[[], int]) -> Iterator[EvenhandProcess]:
    settings = {"EVENHAND_ENGINE__MAX_SEQUENCES": "4", "EVENHAND_ENGINE__POLICY": "fair"}
    server = EvenhandProcess(new_home(), free_port(), free_port(), settings)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.mark.model
def test_a_full_engine_says_who_is_ahead_and_afterwards_where_the_time_went(narrow: EvenhandProcess) -> None:
    alpha, beta = narrow.keys["alpha"], narrow.keys["beta"]
    with contextlib.ExitStack() as stack:
        flood = [Stream(narrow.url, alpha, 150, stack) for _ in range(7)]
        wait_until(lambda: get(narrow.url, alpha, flood[3].id).json()["status"] == "running")

        waiting = get(narrow.url, alpha, flood[6].id).json()
        assert (waiting["object"], waiting["status"], waiting["class"]) == ("request", "queued", "interactive")
        assert waiting["waiting_for"] == "slot"
        assert waiting["ahead"] == {"interactive": 2}
        assert waiting["ahead_of_team"] == [flood[4].id, flood[5].id]
        assert waiting["timings"]["queue_us"] == waiting["timings"]["total_us"] > 0

        quiet = Stream(narrow.url, beta, 40, stack)
        parked = [s for s in flood[:4] if get(narrow.url, alpha, s.id).json()["status"] == "parked"]
        quiet_s = quiet.finish()
        hidden, nothing = get(narrow.url, beta, flood[6].id), get(narrow.url, beta, new_request_id(1))
        assert hidden.status_code == nothing.status_code == 404
        assert hidden.json()["error"]["code"] == nothing.json()["error"]["code"] == "request_not_found"
        ended = get(narrow.url, beta, quiet.id).json()
        _check_ended(ended, quiet_s, num_tokens=40)
        whole = [stream.finish() for stream in flood]
        rows = [get(narrow.url, alpha, stream.id).json() for stream in flood]
    assert [row["id"] for row in rows] == [stream.id for stream in flood]
    for row, seconds in zip(rows, whole, strict=True):
        _check_ended(row, max(seconds, row["timings"]["total_us"] / 1e6), num_tokens=150)
    held = {row["id"] for row in rows if row["timings"]["parked_us"]}
    assert held, "the quiet team took a slot from the flood"
    assert {stream.id for stream in parked} <= held


def _check_ended(row: dict[str, object], seconds: float, *, num_tokens: int) -> None:
    assert (row["status"], row["outcome"], row["finish_reason"]) == ("ended", "finished", "length")
    usage, timings = row["usage"], row["timings"]
    assert isinstance(usage, dict)
    assert isinstance(timings, dict)
    assert usage["completion_tokens"] == num_tokens
    total_us = timings["total_us"]
    assert abs(sum(timings[name] for name in (*PARTS, "gateway_us")) - total_us) <= total_us / 100
    # What lies outside the engine is small, so the engine's own parts are the whole, too.
    assert timings["gateway_us"] <= max(total_us / 20, 50_000)
    assert total_us / 1e6 <= seconds + 0.001


# --- a scripted engine behind gateways that do not know each other ----------------------------------------------------


@pytest.fixture(scope="module", params=["postgresql and redis", "sqlite"])
def hub(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    smollm2_path: Path,
    free_port: Callable[[], int],
) -> Iterator[Cluster | SharedCluster]:
    """Its tests kill its engine, so it is shared with no other module."""
    running = running_cluster if request.param != "sqlite" else running_alone
    with running(tmp_path_factory.mktemp("hub"), smollm2_path.parents[1], free_port, step_ms=10) as cluster:
        cluster.command("org", "create", "acme")
        for team in ("red", "blue"):
            cluster.command("team", "create", "--org", "acme", "--weight", "1", team)
        yield cluster


def test_any_gateway_tells_its_team_of_any_request_while_it_runs_and_once_it_has_ended(hub: Cluster) -> None:
    red, blue = hub.new_key("acme", "red"), hub.new_key("acme", "blue")
    asker: Gateway = hub.gateways[-1]
    with contextlib.ExitStack() as stack:
        stream = Stream(hub.gateways[0].url, red, 100, stack)
        live = get(asker.url, red, stream.id).json()
        assert (live["id"], live["status"], live["waiting_for"], live["expected_wait_ms"]) == (
            stream.id,
            "running",
            None,
            0,
        )
        assert get(asker.url, blue, stream.id).status_code == 404
        stream.finish()
    for gateway in hub.gateways:
        ended = get(gateway.url, red, stream.id)  # at once: it cannot be in the ledger yet
        assert ended.status_code == 200, ended.text
        assert (ended.json()["status"], ended.json()["usage"]["completion_tokens"]) == ("ended", 100)
        assert get(gateway.url, blue, stream.id).json()["error"]["code"] == "request_not_found"


def test_a_request_of_several_prompts_is_one(hub: Cluster) -> None:
    key = hub.new_key("acme", "red")
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 60, "stream": True, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream(
        "POST", f"{hub.gateways[0].url}/v1/completions", json=body, headers=headers, timeout=60
    ) as answer:
        request_id = answer.headers["x-request-id"]
        live = get(hub.gateways[-1].url, key, request_id).json()
        assert (live["id"], live["status"]) == (request_id, "running")
        answer.read()
    assert get(hub.gateways[-1].url, key, request_id).json()["usage"]["completion_tokens"] == 180


def test_with_the_engine_gone_what_has_ended_is_told_and_the_rest_is_503(hub: Cluster) -> None:
    key = hub.new_key("acme", "red")
    with contextlib.ExitStack() as stack:
        stream = Stream(hub.gateways[0].url, key, 2, stack)
        stream.finish()
    assert get(hub.gateways[-1].url, key, stream.id).json()["status"] == "ended"
    hub.engine.kill()
    try:
        for gateway in hub.gateways:
            wait_until(lambda gateway=gateway: not gateway.is_ready(), 20)
            assert get(gateway.url, key, stream.id).json()["status"] == "ended"
            refused = get(gateway.url, key, new_request_id(1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert refused.headers["retry-after"]
    finally:
        hub.engine.start()
        for gateway in hub.gateways:
            gateway.wait_ready()
