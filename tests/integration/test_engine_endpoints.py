"""Where the engine listens, and to whom: Unix sockets closed to others, TCP with keys only."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_kit import ENGINE_ID, EngineProcess, EngineThread, RawClient, card, raw_client, submit
from scripted_core import ScriptedCore

from engine.carriers.curve import CurveKeys
from engine.carriers.zeromq_server import ZeroMQServer
from engine.errors import ConfigError
from engine.messages import Hello

# --- where it listens -------------------------------------------------------------------------------------------------


def test_a_socket_is_closed_to_other_users(engine: EngineThread[ScriptedCore], client: RawClient, folder: Path) -> None:
    assert stat.S_IMODE((folder / "e").stat().st_mode) == 0o600


def test_the_socket_folder_is_made_with_mode_0700(folder: Path) -> None:
    carrier = ZeroMQServer(f"ipc://{folder}/run/e")
    carrier.open()
    carrier.close(0)
    assert stat.S_IMODE((folder / "run").stat().st_mode) == 0o700


def test_a_socket_folder_open_to_others_is_refused(folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        ZeroMQServer(f"ipc://{folder}/e").open()


def test_the_socket_of_a_running_engine_is_not_taken_over(
    engine: EngineThread[ScriptedCore], client: RawClient, endpoint: str
) -> None:
    with pytest.raises(ConfigError, match="another engine listens"):
        ZeroMQServer(endpoint).open()
    client.ping()


def test_the_socket_of_a_killed_engine_is_taken_over(endpoint: str) -> None:
    with EngineProcess(endpoint) as killed, raw_client(endpoint) as client:
        client.hello()
        killed.kill()
        killed.wait()
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), card()), raw_client(endpoint) as client:
        client.hello()


def test_a_file_in_the_sockets_place_is_left_alone(folder: Path) -> None:
    (folder / "e").write_text("precious")
    with pytest.raises(ConfigError, match="is not one"):
        ZeroMQServer(f"ipc://{folder}/e").open()
    assert (folder / "e").read_text() == "precious"


def test_a_port_that_is_taken_is_a_config_error(free_port: Callable[[], int]) -> None:
    keys, _ = CurveKeys.pair()
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen"):
            ZeroMQServer(endpoint, curve=keys).open()


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("ipc:///" + "x" * 107, "has 108 bytes, the system allows 107"),
        ("ipc:///" + "é" * 54, "has 109 bytes"),
        ("ipc://relative/e", "absolute"),
        ("tcp://127.0.0.1:5000", "requires CURVE keys"),
        ("tcp://127.0.0.1", "must be"),
        ("tcp://127.0.0.1:99999", "must be"),
        ("inproc://e", "must be"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused_before_anything_listens(endpoint: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ZeroMQServer(endpoint)


def test_the_longest_path_that_fits_works(folder: Path) -> None:
    name = "x" * (107 - len(os.fsencode(f"{folder}/")))
    endpoint = f"ipc://{folder}/{name}"
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), card()), raw_client(endpoint) as client:
        client.hello()


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_client_with_a_known_key_is_served_over_tcp(free_port: Callable[[], int]) -> None:
    engine_keys, (client_keys,) = CurveKeys.pair()
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    carrier = ZeroMQServer(endpoint, curve=engine_keys)
    with EngineThread(ScriptedCore(), carrier, card()), raw_client(endpoint, curve=client_keys) as client:
        client.hello()
        client.send(submit("r"))
        assert client.until_finish("r")[-1].finish == "length"


@pytest.mark.parametrize("stranger", ["unknown key", "wrong engine key", "no key"])
def test_a_client_without_the_right_keys_gets_no_answer(free_port: Callable[[], int], stranger: str) -> None:
    engine_keys, (client_keys,) = CurveKeys.pair()
    _, (unknown,) = CurveKeys.pair()
    curve = {
        "unknown key": CurveKeys(
            public_key=unknown.public_key,
            secret_key=unknown.secret_key,
            peer_keys=frozenset((engine_keys.public_key,)),
        ),
        "wrong engine key": CurveKeys(
            public_key=client_keys.public_key, secret_key=client_keys.secret_key, peer_keys=unknown.peer_keys
        ),
        "no key": None,
    }[stranger]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint, curve=engine_keys), card()), ExitStack() as stack:
        good = stack.enter_context(raw_client(endpoint, curve=client_keys))
        bad = stack.enter_context(raw_client(endpoint, curve=curve))
        bad.send(Hello(ENGINE_ID, "stranger"))
        good.hello()
        assert not bad.socket.poll(300), "a stranger was answered"


@pytest.mark.parametrize("bad", [b"short", b"\x00" * 40, b'"' * 40])
def test_a_key_that_is_none_is_a_config_error(bad: bytes) -> None:
    keys, _ = CurveKeys.pair()
    with pytest.raises(ConfigError, match="Z85"):
        CurveKeys(public_key=keys.public_key, secret_key=bad, peer_keys=keys.peer_keys)


def test_the_secret_key_is_not_in_the_repr() -> None:
    keys, _ = CurveKeys.pair()
    assert keys.secret_key.decode() not in repr(keys)
