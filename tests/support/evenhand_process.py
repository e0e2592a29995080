"""A real ``evenhand serve`` in a home of its own, for tests that need the whole."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import psutil

START_S = 60.0


def wait_until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Return as soon as the condition holds; TimeoutError if it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s} s")
        time.sleep(0.02)


class EvenhandProcess:
    """The supervisor's process and what a client needs to know of it.

    It leads a process group of its own, as in a shell with job control, and stays in the session of the tests.
    """

    def __init__(self, home: Path, port: int, metrics_port: int, settings: Mapping[str, str] | None = None) -> None:
        """`settings` are further variables; a value of the base environment is overwritten."""
        self.home = home
        self.port = port
        self.metrics_port = metrics_port
        self.stderr_path = home.with_name(f"{home.name}.stderr")
        self._before = self.stderr_path.stat().st_size if self.stderr_path.exists() else 0
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")} | {
            "EVENHAND_HOME": str(home),
            "EVENHAND_SERVER__PORT": str(port),
            "EVENHAND_SERVER__METRICS_PORT": str(metrics_port),
            "EVENHAND_ENGINE__KV_CACHE_BYTES": "256MiB",
            "EVENHAND_ENGINE__THREADS": "1",  # two threads crawl beside whatever else runs on two cores
            **(settings or {}),
        }
        with self.stderr_path.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway.cli", "serve"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                process_group=0,
            )
        self._family: set[psutil.Process] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client is given."""
        return f"{self.url}/v1"

    @property
    def key(self) -> str:
        """Of team alpha, as the first start in this home has shown it."""
        return self.keys["alpha"]

    @property
    def keys(self) -> dict[str, str]:
        """Team → key, as the first start in this home has shown them."""
        return dict(re.findall(r"^  key      (\S+)  (eh_\S+) \(new", self.stderr_path.read_text(), re.MULTILINE))

    @property
    def stderr(self) -> str:
        """What this process and its children have said so far."""
        return self.stderr_path.read_bytes()[self._before :].decode()

    def client(self, timeout_s: float = 60.0) -> httpx.Client:
        """An HTTP client with the key, for paths under `base_url`."""
        return httpx.Client(base_url=self.base_url, headers={"authorization": f"Bearer {self.key}"}, timeout=timeout_s)

    def wait_ready(self) -> float:
        """Wait for the line that says so; returns the seconds it names."""
        found: list[str] = []

        def said_so() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"evenhand serve ended with {self.process.returncode}:\n{self.stderr}")
            found[:] = re.findall(r"is ready in ([\d.]+) s", self.stderr)
            return bool(found)

        wait_until(said_so, START_S)
        self.child("engine")
        self.child("gateway")
        return float(found[0])

    def child(self, name: str) -> psutil.Process:
        """The engine or gateway process that runs now."""
        return self.children(name, 1)[0]

    def children(self, name: str, num: int) -> list[psutil.Process]:
        """All engine or gateway processes, once there are so many."""
        found: list[psutil.Process] = []

        def are_there() -> bool:
            found.clear()
            for process in psutil.Process(self.process.pid).children():
                try:
                    if name in process.cmdline():
                        found.append(process)
                except psutil.NoSuchProcess:
                    continue
            return len(found) >= num

        wait_until(are_there)
        self._family.update(found)
        return found

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait_exit(self, within_s: float = 30.0) -> int:
        return self.process.wait(within_s)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait_exit()

    def wait_gone(self, within_s: float = 30.0) -> None:
        """Wait until no process of the family lives and nobody listens on its ports."""
        wait_until(lambda: not any(_lives(process) for process in self._family), within_s)
        for port in (self.port, self.metrics_port):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))

    def close(self) -> None:
        """End whatever of it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        for process in self._family:
            if _lives(process):
                process.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
