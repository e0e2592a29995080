"""The gateway's way to an engine over TCP: keys from settings as `evenhand curve-keys` prints them, right and wrong."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from client_kit import read, run, until
from engine_kit import EngineThread, card, submit
from scripted_core import ScriptedCore

import gateway.backends.local_pool
from engine.carriers.zeromq_server import ZeroMQServer
from engine.errors import ConfigError
from engine.messages import Hello
from gateway.backends.curve import curve_keys
from gateway.backends.local_pool import LocalPool, open_local_pool
from gateway.settings import EngineSettings, Settings

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
Keys = dict[str, str]


@pytest.fixture(scope="module")
def pairs() -> list[Keys]:
    """Of the engine, of a gateway it knows, and of a stranger."""
    command = "from gateway.commands.curve import run; run()"
    made = [subprocess.run([sys.executable, "-c", command], capture_output=True, check=True) for _ in range(3)]
    return [tomllib.loads(each.stdout.decode()) for each in made]


@pytest.fixture
def endpoint(free_port: Callable[[], int]) -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def core(endpoint: str, pairs: list[Keys]) -> Any:
    core = ScriptedCore()
    settings = EngineSettings(endpoint=endpoint, **pairs[0], curve_peer_keys=(pairs[1]["curve_public_key"],))
    with EngineThread(core, ZeroMQServer(endpoint, curve=curve_keys(settings)), card(model=MODEL)):
        yield core


@asynccontextmanager
async def pool(new_home: Callable[[], Path], endpoint: str, own: Keys, engine_key: str) -> AsyncIterator[LocalPool]:
    settings = EngineSettings(endpoint=endpoint, **own, curve_peer_keys=(engine_key,))
    opened = open_local_pool(Settings(home=new_home(), engine=settings), "gateway-a")
    async with opened.connection():
        yield opened


async def test_an_engine_and_a_gateway_that_know_each_other_work_over_tcp(
    core: ScriptedCore, endpoint: str, pairs: list[Keys], new_home: Callable[[], Path]
) -> None:
    async with pool(new_home, endpoint, pairs[1], pairs[0]["curve_public_key"]) as opened:
        await opened.client.wait_up(MODEL, 20)
        assert opened.backend.readiness().is_ready
        assert (await read(run(opened.client, "r", model=MODEL)))[-1].finish == "length"
        load = await opened.load()

    assert load is not None
    assert (load.model, load.num_running) == (MODEL, 0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("our secret key", "handshake failed"),
        ("the engine's key", "handshake failed"),
        ("a key that the engine does not list", "does not accept our CURVE key"),
    ],
)
async def test_a_wrong_key_keeps_the_engine_away_says_why_and_does_no_harm(
    core: ScriptedCore,
    endpoint: str,
    pairs: list[Keys],
    new_home: Callable[[], Path],
    wrong: str,
    says: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway.backends.local_pool, "COMPLAIN_EVERY_S", 0.3)
    engine, known, stranger = pairs
    own, engine_key = known, engine["curve_public_key"]
    if wrong == "our secret key":
        own = known | {"curve_secret_key": stranger["curve_secret_key"]}
    elif wrong == "the engine's key":
        engine_key = stranger["curve_public_key"]
    else:
        own = stranger
    async with (
        pool(new_home, endpoint, known, engine["curve_public_key"]) as welcome,
        pool(new_home, endpoint, own, engine_key) as opened,
    ):
        await welcome.client.wait_up(MODEL, 20)
        with caplog.at_level(logging.WARNING, "gateway"):
            await until(lambda: says in caplog.text, f"a log line that says: {says}")
        assert not opened.backend.readiness().is_ready
        assert await opened.load() is None
        assert (await read(run(welcome.client, "r", model=MODEL)))[-1].finish == "length"

    assert list(core.submitted) == ["r"]
    for pair in pairs:
        assert pair["curve_secret_key"] not in caplog.text


async def test_a_client_without_keys_is_not_heard(
    core: ScriptedCore, endpoint: str, pairs: list[Keys], new_home: Callable[[], Path]
) -> None:
    context = zmq.Context()
    intruder = context.socket(zmq.DEALER)
    intruder.setsockopt(zmq.LINGER, 0)
    intruder.connect(endpoint)
    try:
        for message in (Hello(engine_id="engine-0", client_id="gateway-a"), submit("intruder")):
            intruder.send(msgspec.msgpack.encode(message))
        async with pool(new_home, endpoint, pairs[1], pairs[0]["curve_public_key"]) as welcome:
            await welcome.client.wait_up(MODEL, 20)
            assert (await read(run(welcome.client, "r", model=MODEL)))[-1].finish == "length"
        assert intruder.poll(100) == 0
    finally:
        intruder.close(0)
        context.term()
    assert list(core.submitted) == ["r"]


@pytest.mark.parametrize("key", ["", "short", "ü" * 40, "x" * 41, "~" * 40])
def test_what_is_no_key_is_refused_at_start(key: str, pairs: list[Keys]) -> None:
    settings = EngineSettings(**{**pairs[1], "curve_secret_key": key}, curve_peer_keys=(pairs[0]["curve_public_key"],))
    with pytest.raises(ConfigError, match="secret_key must be 40 characters") as refused:
        curve_keys(settings)
    assert not key or key not in str(refused.value)


def test_a_unix_socket_needs_no_keys() -> None:
    assert curve_keys(EngineSettings()) is None
