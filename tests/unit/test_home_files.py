"""The bootstrap key, the folder of the engine's socket, and the look at a port."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.bootstrap_key import KeyFileError, load_or_create_key
from gateway.ports import PortError, check_port
from gateway.socket_folder import MAX_SOCKET_PATH_BYTES, SOCKET_NAME, socket_folder


def test_the_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    key, is_new = load_or_create_key(tmp_path / "home")

    assert is_new
    assert re.fullmatch(r"eh_[A-Za-z0-9_-]{43,}", key)
    file = tmp_path / "home" / "bootstrap.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == f"{key}\n"
    assert load_or_create_key(tmp_path / "home") == (key, False)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["bootstrap.key"]


def test_of_many_processes_one_makes_the_key(tmp_path: Path) -> None:
    code = f"from gateway.bootstrap_key import *; print(*load_or_create_key(Path({str(tmp_path)!r})))"
    many = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    answers = [child.communicate(timeout=60)[0].split() for child in many]

    assert len({key for key, _ in answers}) == 1
    assert sorted(is_new for _, is_new in answers) == ["False"] * 5 + ["True"]


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    load_or_create_key(tmp_path)
    (tmp_path / "bootstrap.key").chmod(0o640)

    with pytest.raises(KeyFileError, match=r"others may read it \(mode 640\); run: chmod 600"):
        load_or_create_key(tmp_path)


@pytest.mark.parametrize("content", [b"", b"secret\n", b"\xff"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bootstrap.key").write_bytes(content)
    (tmp_path / "bootstrap.key").chmod(0o600)

    with pytest.raises(KeyFileError, match=r"bootstrap\.key"):
        load_or_create_key(tmp_path)


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(KeyFileError, match=r"file/home/bootstrap\.key: cannot be used"):
        load_or_create_key(tmp_path / "file" / "home")


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
