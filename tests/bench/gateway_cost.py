"""What one request costs the gateway, in CPU time: auth, metering, ledger and logging on, one worker, SQLite.

    python tests/bench/gateway_cost.py [--litellm PATH/TO/litellm] [--rounds 3]

``wrk`` (Debian's package) sends requests of about 20 prompt tokens: whole answers, streams of 8 chunks and streams of
72. The cost per request is the gateway process's CPU time over the requests answered; per chunk it is what the longer
streams cost more, over the chunks they have more. Two kinds of gateway, in alternation:

- ``scripted``: answers come from a script in the gateway's own process (`scripted_gateway.py`);
- ``engine``: answers come through the real protocol from an engine process without a model, one chunk per step, so
  tokenizing, detokenizing and a message for every step are in the figure.

With ``--litellm`` the same load goes to LiteLLM's proxy with a mocked answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
SCRIPTED_GATEWAY = Path(__file__).with_name("scripted_gateway.py")
ENGINE_PROGRAM = ROOT / "tests" / "support" / "scripted_engine_program.py"
MODEL = "smollm2-135m-instruct"
PROMPT = "Please say in one word what the capital of France is called"
CONNECTIONS = 16
SHORT, LONG = 8, 72
START_S = 60.0

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
        programs = [[*cli, "gateway"]] if kind == "engine" else [[sys.executable, str(SCRIPTED_GATEWAY)]]
        if kind == "engine":
            programs.append([sys.executable, str(ENGINE_PROGRAM), endpoint, "1"])
        with ExitStack() as stack:
            processes = []
            for i, program in enumerate(programs):
                # Log lines are written, and to a file, as in production.
                log = stack.enter_context((Path(folder) / f"{i}.log").open("wb"))
                processes.append(subprocess.Popen([*pinned(min(i, 1)), *program], env=environment, stderr=log))
                stack.callback(stop, processes[-1])
            wait_ready(f"http://127.0.0.1:{port}/ready")
            yield Server(kind, f"http://127.0.0.1:{port}/v1", key, processes[0].pid)


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
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{url} is not ready after {START_S:.0f} s")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--litellm", help="the program of LiteLLM's proxy, from an environment of its own")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=int, default=10)
    chosen = options.parse_args()
    figures: dict[tuple[str, str], list[Round]] = {}

    def measure(server: Server, what: str, max_tokens: int, *, stream: bool) -> None:
        done = load(server, max_tokens, stream=stream, seconds=chosen.seconds)
        figures.setdefault((server.name, what), []).append(done)
        print(f"{server.name:<9} {what:<18} {done.requests_s:8.0f} requests/s {done.cpu_us:8.0f} us CPU", flush=True)

    for _ in range(chosen.rounds):
        for kind in ("scripted", "engine"):
            with evenhand(kind) as server:
                load(server, SHORT, stream=True, seconds=2)  # warm
                measure(server, "whole", SHORT, stream=False)
                measure(server, f"stream of {SHORT}", SHORT, stream=True)
                measure(server, f"stream of {LONG}", LONG, stream=True)
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
    for kind in ("scripted", "engine"):
        short, long = figures[kind, f"stream of {SHORT}"], figures[kind, f"stream of {LONG}"]
        per_chunk = statistics.median((b.cpu_us - a.cpu_us) / (LONG - SHORT) for a, b in zip(short, long, strict=True))
        rest = statistics.median(each.cpu_us for each in short) - SHORT * per_chunk
        print(f"{kind:<9} {per_chunk:.1f} us CPU per chunk, {rest:.0f} us per request beside its chunks")


if __name__ == "__main__":
    main()
