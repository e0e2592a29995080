"""Several workers on one port: they serve and drain together, and their metrics are one, whoever of them is killed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from databases import PostgresServer, RedisServer
from evenhand_process import EvenhandProcess, wait_until
from prometheus_client.parser import text_string_to_metric_families
from scripted_server import ScriptedServer, chat_body, running_server

from gateway.telemetry.shared_metrics import forget_gauges, shared_metrics_server, worker_environment

NAMES = ("gateway-1", "gateway-2")


class Scrape:
    """The samples of a metrics port."""

    def __init__(self, port: int) -> None:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The one sample of a name that has these labels."""
        [value] = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        return value

    def total(self, name: str) -> float:
        return sum(sample.value for sample in self._samples if sample.name == name)

    def names(self) -> set[str]:
        return {sample.name for sample in self._samples}

    def labels(self) -> set[str]:
        return {label for sample in self._samples for label in sample.labels}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "metrics"
    path.mkdir()
    return path


@pytest.fixture
def metrics(folder: Path) -> Iterator[Callable[[], Scrape]]:
    with shared_metrics_server(0, folder) as port:
        yield lambda: Scrape(port)


@contextlib.contextmanager
def worker(name: str, port: int, folder: Path) -> Iterator[ScriptedServer]:
    logs = folder.parent / name
    logs.mkdir(exist_ok=True)
    with running_server(port, logs, environment=worker_environment(folder, name)) as server:
        yield server


def serve_some(server: ScriptedServer, num: int) -> None:
    for _ in range(num):
        assert server.chat("eight").status_code == 200


def test_the_sums_are_over_both_workers_and_outlive_each(
    free_port: Callable[[], int], folder: Path, metrics: Callable[[], Scrape]
) -> None:
    first_port, second_port = free_port(), free_port()
    with worker(NAMES[0], first_port, folder) as first, worker(NAMES[1], second_port, folder) as second:
        serve_some(first, 2)
        serve_some(second, 3)
        assert metrics()("evenhand_requests_total", model="eight", outcome="finished") == 5
        assert metrics()("evenhand_team_tokens_total", kind="completion") == 5 * 8
        assert metrics()("evenhand_request_seconds_count", model="eight") == 5
        assert metrics()("evenhand_time_to_first_token_seconds_bucket", le="+Inf") == 5
        assert metrics()("evenhand_inter_token_seconds_count", model="eight") == 5 * 7
        assert metrics()("evenhand_engine_up") == 1

        with first.connect("/v1/chat/completions", chat_body("never", stream=True)) as _:
            first.wait("never", started=1)
            assert metrics()("evenhand_http_requests_in_flight") == 1
            second.set_engine(up=False)
            wait_until(lambda: metrics()("evenhand_engine_up") == 0)

            second.process.kill()
            second.process.wait()
            forget_gauges(folder, NAMES[1])
            assert metrics()("evenhand_requests_total", model="eight", outcome="finished") == 5
            assert metrics()("evenhand_engine_up") == 1

            first.process.kill()
            first.process.wait()
        assert metrics()("evenhand_http_requests_in_flight") == 1
        forget_gauges(folder, NAMES[0])
        assert "evenhand_http_requests_in_flight" not in metrics().names()
        files = sorted(path.name for path in folder.iterdir())

    with worker(NAMES[0], first_port, folder) as again:
        assert metrics()("evenhand_http_requests_in_flight") == 0
        serve_some(again, 1)
        assert metrics()("evenhand_requests_total", model="eight", outcome="finished") == 6
        assert "pid" not in metrics().labels()
    assert {path.name for path in folder.iterdir()} - set(files) == {
        "gauge_livemax_gateway-1.db",
        "gauge_livemin_gateway-1.db",
        "gauge_livesum_gateway-1.db",
    }, "a worker that is started again leaves nothing more behind"


def test_a_port_is_shared_by_workers_that_are_both_reached(
    free_port: Callable[[], int], folder: Path, metrics: Callable[[], Scrape]
) -> None:
    port = free_port()
    with worker(NAMES[0], port, folder) as server, worker(NAMES[1], port, folder) as other:
        wait_until(lambda: any(each.laddr.port == port for each in psutil.Process(other.process.pid).net_connections()))
        for _ in range(30):
            assert server.chat("hello").status_code == 200

        def count(name: str) -> int:
            log = (folder.parent / name / "server.log").read_text()
            return log.count('"request.finished"')

        wait_until(lambda: count(NAMES[0]) + count(NAMES[1]) == 30)
        assert min(count(NAMES[0]), count(NAMES[1])) > 0
        assert metrics()("evenhand_requests_total", model="hello", outcome="finished") == 30


# --- evenhand serve ---------------------------------------------------------------------------------------------------


@pytest.fixture
def house(
    new_home: Callable[[], Path], free_port: Callable[[], int], postgres: PostgresServer, redis_server: RedisServer
) -> Iterator[EvenhandProcess]:
    """`evenhand serve` with two workers."""
    settings = {
        "EVENHAND_SERVER__WORKERS": "2",
        "EVENHAND_DATABASE__URL": postgres.new_database(),
        "EVENHAND_REDIS__URL": redis_server.url,
        "EVENHAND_ENGINE__POLICY": "fair",
    }
    house = EvenhandProcess(new_home(), free_port(), free_port(), settings)
    try:
        house.wait_ready()
        yield house
    finally:
        house.close()


def ask(house: EvenhandProcess, num: int) -> None:
    """Each request on a connection of its own, so that both workers get some."""
    for _ in range(num):
        with house.client() as client:
            assert client.post("/chat/completions", json=HELLO).status_code == 200


HELLO = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 2,
    "ignore_eos": True,
}


@pytest.mark.slow
@pytest.mark.model
def test_two_workers_serve_and_one_that_is_killed_comes_back_while_the_other_goes_on(house: EvenhandProcess) -> None:
    workers = house.children("gateway", 2)
    for worker in workers:
        assert any(each.laddr.port == house.port for each in worker.net_connections()), "both are ready, not one"
    ask(house, 12)
    counted = Scrape(house.metrics_port)
    assert counted.total("evenhand_requests_total") == 12
    assert counted("evenhand_team_tokens_total", team="alpha", kind="completion") == 24
    wait_until(lambda: "evenhand_team_engine_seconds_total" in Scrape(house.metrics_port).names())
    charged_s = Scrape(house.metrics_port)("evenhand_team_engine_seconds_total", organization="demo", team="alpha")
    assert 0 < charged_s < 60, "the engine's figure, which both workers know"

    workers[0].kill()
    workers[0].wait(10)
    ask(house, 3)
    assert workers[1] in house.children("gateway", 2)
    wait_until(lambda: "was ended by SIGKILL; starting it again" in house.stderr)
    newcomer = next(each for each in house.children("gateway", 2) if each not in workers)
    wait_until(lambda: any(each.laddr.port == house.port for each in newcomer.net_connections()))
    wait_until(house.is_ready)
    ask(house, 6)
    assert Scrape(house.metrics_port).total("evenhand_requests_total") == 21
    wait_until(lambda: Scrape(house.metrics_port)("evenhand_engine_up") == 1)

    assert house.stop() == 0
    house.wait_gone()
    assert list((house.home / "run").glob("serve-*")) == []


@pytest.mark.slow
@pytest.mark.model
def test_both_workers_let_their_streams_finish_before_the_engine_leaves(house: EvenhandProcess) -> None:
    house.children("gateway", 2)
    body = {**HELLO, "max_tokens": 100, "stream": True}
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(8):
            client = stack.enter_context(house.client())
            streams.append(stack.enter_context(client.stream("POST", "/chat/completions", json=body)).iter_lines())
        for stream in streams:
            next(stream)
        house.process.send_signal(signal.SIGTERM)
        endings = [[line for line in stream if line.startswith("data: ")][-1] for stream in streams]

    assert endings == ["data: [DONE]"] * 8
    assert house.wait_exit() == 0
    house.wait_gone()


@pytest.mark.parametrize("missing", ["EVENHAND_DATABASE__URL", "EVENHAND_REDIS__URL"])
def test_several_workers_are_refused_without_postgresql_and_redis(
    tmp_path: Path, free_port: Callable[[], int], missing: str
) -> None:
    settings = {
        "EVENHAND_SERVER__WORKERS": "2",
        "EVENHAND_DATABASE__URL": "postgresql://postgres@127.0.0.1:1/none",
        "EVENHAND_REDIS__URL": "redis://127.0.0.1:1/0",
    }
    del settings[missing]
    house = EvenhandProcess(tmp_path / "home", free_port(), free_port(), settings)
    try:
        assert house.wait_exit() == 78
    finally:
        house.close()
    assert "more than one worker needs database.url (PostgreSQL) and redis.url" in house.stderr
    assert "Traceback" not in house.stderr
