"""The folder of the engine's socket, and the look at a port."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.ports import PortError, check_port
from gateway.socket_folder import MAX_SOCKET_PATH_BYTES, SOCKET_NAME, socket_folder


def test_the_socket_s_folder_is_private_and_goes_away(tmp_path: Path) -> None:
    with socket_folder(tmp_path) as folder, socket_folder(tmp_path) as other:
        assert folder.parent == tmp_path / "run"
        assert folder != other
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert other.exists()
    assert not folder.exists()


def test_a_long_home_gets_a_folder_that_a_socket_fits_in(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 25)
    with socket_folder(home) as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET_NAME))
        assert len(os.fsencode(folder / SOCKET_NAME)) <= MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_what_a_killed_server_left_is_removed_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from gateway.socket_folder import socket_folder
with socket_folder(Path({str(tmp_path)!r})):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    (abandoned,) = (tmp_path / "run").glob("serve-*")

    with socket_folder(tmp_path) as first, socket_folder(tmp_path):
        assert not abandoned.exists()
        assert first.exists()


def test_a_free_port_is_left_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    assert check_port("127.0.0.1", port, "server.port") == "127.0.0.1"
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_name_is_resolved() -> None:
    assert check_port("localhost", 0, "server.port") in {"127.0.0.1", "::1"}


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_port_in_use_is_told_with_the_setting(reuse_port: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=reuse_port) as server:
        port = server.getsockname()[1]

        with pytest.raises(PortError, match=f"^127.0.0.1 port {port} is in use by another program; .* server.port$"):
            check_port("127.0.0.1", port, "server.port")


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(PortError, match=r"192\.0\.2\.1 port 1 cannot be used: "):
        check_port("192.0.2.1", 1, "server.host")
