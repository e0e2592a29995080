"""The command as a script sees it: exit codes, and what is on stdout."""

from __future__ import annotations

import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway import __version__
from gateway.commands.doctor import busy_neighbors
from gateway.domain.credential import SCANNER_PATTERN

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def evenhand(tmp_path: Path) -> Run:
    """Runs a command in an empty folder, with a home of its own and further settings."""

    def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")}
        return subprocess.run(
            [sys.executable, "-m", "gateway.cli", *arguments],
            cwd=tmp_path,
            env=base | {"EVENHAND_HOME": str(tmp_path / "home"), **settings},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_the_version_is_all_there_is_on_stdout(evenhand: Run) -> None:
    done = evenhand("version")

    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


def test_the_version_and_the_help_are_options_too(evenhand: Run) -> None:
    assert evenhand("--version").stdout == f"{__version__}\n"
    for arguments in ((), ("key",), ("key", "create")):
        done = evenhand(*arguments, "-h")
        assert done.returncode == 0
        assert "Usage: " in done.stdout


def test_a_gateway_whose_metrics_port_is_taken_ends_with_one_line(evenhand: Run, free_port: Callable[[], int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = evenhand("gateway", EVENHAND_SERVER__PORT=str(free_port()), EVENHAND_SERVER__METRICS_PORT=str(port))

    assert done.returncode == 1
    assert done.stderr == (
        f"evenhand: 127.0.0.1 port {port} is in use by another program; choose another with server.metrics_port\n"
    )


class _Answering(http.server.BaseHTTPRequestHandler):
    """Says on any path what the path of the server that it stands in for would have."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write({"/health": b'{"status":"ok"}', "/metrics": b"evenhand_x 1"}[self.path])

    def log_message(self, *_: object) -> None:
        """It would go to stderr."""


@contextmanager
def _answering() -> Iterator[str]:
    """The port of something that answers like an Evenhand."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answering) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield str(server.server_port)
        finally:
            server.shutdown()
            serving.join()


def test_health_is_a_line_and_an_exit_code(evenhand: Run, free_port: Callable[[], int]) -> None:
    with _answering() as port:
        done = evenhand("health", EVENHAND_SERVER__PORT=port, EVENHAND_SERVER__HOST="0.0.0.0")  # noqa: S104
        assert (done.returncode, done.stdout, done.stderr) == (0, f"http://127.0.0.1:{port} answers\n", "")
    nobody = str(free_port())
    done = evenhand("health", EVENHAND_SERVER__PORT=nobody)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"evenhand: http://127.0.0.1:{nobody} does not answer: Connection refused\n"


def test_health_does_not_wait_for_torch_nor_for_the_library_that_reads_rates() -> None:
    slow = "{'torch', 'limits'} & sys.modules.keys()"
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys, gateway.cli, gateway.commands.health; print({slow})"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout == "set()\n"


def test_the_doctor_warns_of_metrics_of_an_evenhand_that_is_not_this_one(
    evenhand: Run, free_port: Callable[[], int]
) -> None:
    with _answering() as port:
        done = evenhand("doctor", EVENHAND_SERVER__PORT=str(free_port()), EVENHAND_SERVER__METRICS_PORT=port)
        assert f"warning  port        127.0.0.1 port {port} is in use by another Evenhand" in done.stdout
        with _answering() as api:
            done = evenhand("doctor", EVENHAND_SERVER__PORT=api, EVENHAND_SERVER__METRICS_PORT=port)
    assert f"ok       port        127.0.0.1 port {port} is served by an Evenhand that runs" in done.stdout


def test_a_wrong_setting_is_one_line_on_stderr_and_exit_code_78(evenhand: Run) -> None:
    done = evenhand("config", "show", EVENHAND_SERVER__PORT="http")

    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("evenhand: server.port (from EVENHAND_SERVER__PORT): ")
    assert done.stderr.count("\n") == 1


def test_the_settings_in_force_are_toml_on_stdout(evenhand: Run) -> None:
    done = evenhand("config", "show", EVENHAND_SERVER__PORT="81")

    assert done.returncode == 0
    assert tomllib.loads(done.stdout)["server"]["port"] == 81
    assert "# EVENHAND_SERVER__PORT" in done.stdout


def test_a_new_key_is_all_there_is_on_stdout(evenhand: Run) -> None:
    for arguments in (("org", "create", "acme"), ("team", "create", "--org", "acme", "red")):
        assert evenhand(*arguments).returncode == 0
    done = evenhand("key", "create", "--org", "acme", "--team", "red", "--name", "first")

    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(SCANNER_PATTERN + "\n", done.stdout)


def test_an_administering_mistake_is_one_line_on_stderr(evenhand: Run) -> None:
    done = evenhand("org", "disable", "nobody")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "evenhand: There is no organization 'nobody'.\n"


def test_an_unknown_command_is_a_usage_error(evenhand: Run) -> None:
    assert evenhand("sevre").returncode == 2


def test_a_model_that_cannot_be_fetched_leaves_stdout_empty(evenhand: Run) -> None:
    done = evenhand("model", "fetch", "gpt-9")

    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("evenhand: gpt-9: no such file")


def test_the_doctor_looks_and_leaves_nothing(evenhand: Run, tmp_path: Path, free_port: Callable[[], int]) -> None:
    ports = {"EVENHAND_SERVER__PORT": str(free_port()), "EVENHAND_SERVER__METRICS_PORT": str(free_port())}
    done = evenhand("doctor", **ports)

    assert done.returncode == 0, done.stdout
    for subject in ("python", "torch", "packages", "cpu", "threads", "home", "model", "port"):
        assert f"  {subject} " in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_s_exit_code_tells_of_a_problem(evenhand: Run, free_port: Callable[[], int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = evenhand("doctor", EVENHAND_SERVER__PORT=str(port), EVENHAND_SERVER__METRICS_PORT=str(free_port()))

    assert done.returncode == 1
    assert f"127.0.0.1 port {port} is in use by another program" in done.stdout


def test_a_busy_process_of_another_session_is_found_and_one_of_ours_is_not(tmp_path: Path) -> None:
    for name in ("stranger", "relative"):
        (tmp_path / name).symlink_to(Path(sys.executable).resolve())
    burn = ("-c", "print(flush=True)\nwhile True: pass")
    with (
        subprocess.Popen([tmp_path / "stranger", *burn], stdout=subprocess.PIPE, start_new_session=True) as stranger,
        subprocess.Popen([tmp_path / "relative", *burn], stdout=subprocess.PIPE) as relative,
    ):
        try:
            for process in (stranger, relative):
                assert process.stdout is not None
                process.stdout.readline()
            names = [name for name, _ in busy_neighbors(0.5)]
        finally:
            stranger.kill()
            relative.kill()

    assert "stranger" in names
    assert "relative" not in names
