"""The gateway's client when an engine goes, comes back, says nothing, or is not the one that was meant."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec
import pytest
import uvloop
from client_kit import FOREVER, PATIENT, QUICK, connected, read, run, until
from engine_kit import MODEL, EngineProcess, EngineThread, card
from scripted_core import ScriptedCore

from engine.carriers.curve import CurveKeys
from engine.carriers.port import ClientCarrier, ServerCarrier
from engine.carriers.zeromq_client import ZeroMQClient
from engine.carriers.zeromq_server import ZeroMQServer
from engine.errors import ConfigError, EngineUnavailable
from engine.link import EngineLink, LinkTimes
from engine.messages import Ready

# --- the engine goes and comes ----------------------------------------------------------------------------------------


async def test_an_engine_that_was_never_there(endpoint: str) -> None:
    async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=QUICK)) as client:
        assert client.card(MODEL) is None
        assert not client.is_up(MODEL)
        with pytest.raises(EngineUnavailable):
            run(client, "r")
        with pytest.raises(EngineUnavailable):
            await client.stats(MODEL)
        assert await client.collect_finals() == ([], False)
        client.set_weight("team", 2)
        with pytest.raises(EngineUnavailable, match="nothing listens there"):
            await client.wait_up(MODEL, 0.2)


async def test_a_client_may_start_before_its_engine(endpoint: str) -> None:
    async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=PATIENT)) as client:
        waiting = asyncio.create_task(client.wait_up(MODEL, 20))
        await asyncio.sleep(0)
        with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), card()):
            await waiting
            assert (await read(run(client, "r")))[-1].finish == "length"


async def test_a_killed_engine_fails_streams_within_a_second_and_the_client_recovers(endpoint: str) -> None:
    async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=PATIENT)) as client:
        with EngineProcess(endpoint) as engine:
            await client.wait_up(MODEL, 20)
            first = client.card(MODEL)
            running, waiting = run(client, "running", output_cap=FOREVER), run(client, "waiting", salt="wait")
            await anext(running)
            assert (await client.stats(MODEL)).num_running == 2
            readers = [asyncio.create_task(read(stream)) for stream in (running, waiting)]
            killed_at = time.monotonic()
            engine.kill()
            for reader in readers:
                with pytest.raises(EngineUnavailable, match="closed the connection"):
                    await reader
            assert time.monotonic() - killed_at < 1.0
            assert not client.is_up(MODEL)
            assert client.card(MODEL) == first
            with pytest.raises(EngineUnavailable):
                run(client, "r")
        with EngineProcess(endpoint):
            await client.wait_up(MODEL, 20)
            second = client.card(MODEL)
            assert isinstance(first, Ready)
            assert isinstance(second, Ready)
            assert first.incarnation != second.incarnation
            assert (await read(run(client, "running")))[-1].finish == "length"


async def test_an_abort_on_a_dead_engine_is_harmless(endpoint: str) -> None:
    async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=PATIENT)) as client:
        with EngineProcess(endpoint) as engine:
            await client.wait_up(MODEL, 20)
            stream = run(client, "r", output_cap=FOREVER)
            await anext(stream)
            engine.kill()
            engine.wait()
            stream.abort()
            with pytest.raises(EngineUnavailable):
                await read(stream)
            stream.abort()


async def test_a_failed_engines_last_words_are_read_before_the_loss(endpoint: str) -> None:
    async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=PATIENT)) as client:
        with EngineProcess(endpoint) as engine:
            await client.wait_up(MODEL, 20)
            streams = [run(client, f"r{i}", salt="wait", num_choices=2) for i in range(50)]
            await client.stats(MODEL)
            streams.append(run(client, "crash", salt="crash"))
            # Waiting for the process blocks the event loop: words and loss are both there before it turns again.
            assert engine.wait() == 70
            ends = [output for stream in streams for output in await read(stream)]
    assert len(ends) == 101
    assert {end.finish for end in ends} == {"error"}


async def test_frames_that_came_before_the_loss_are_received_before_it(endpoint: str) -> None:
    server, carrier = ZeroMQServer(endpoint), ZeroMQClient(endpoint)
    server.open()
    channel = await carrier.connect(20)
    channel.send(b"hello")
    ((peer, _),) = server.receive(20, 1)
    for i in range(500):
        server.send(peer, str(i).encode())
    server.close(20)
    await until(lambda: channel._lost is not None, "the loss is known")
    received: list[bytes] = []

    async def receive_all() -> None:
        while True:
            received.extend(await channel.receive())

    with pytest.raises(EngineUnavailable, match="closed the connection"):
        await receive_all()
    assert [int(frame) for frame in received] == list(range(500))
    channel.close()
    carrier.close()


async def test_a_silent_engine_is_given_up_and_taken_again_when_it_speaks(
    carriers: tuple[ServerCarrier, ClientCarrier],
) -> None:
    core = ScriptedCore()
    with EngineThread(core, carriers[0], card()):
        async with connected(EngineLink("engine-0", carriers[1], times=QUICK)) as client:
            await client.wait_up(MODEL, 20)
            with pytest.raises(EngineUnavailable, match=r"said nothing for 0\.3 s"):
                await read(run(client, "r", salt="block", output_cap=FOREVER))
            assert not client.is_up(MODEL)
            core.unblock.set()
            await client.wait_up(MODEL, 20)
            assert (await read(run(client, "r2")))[-1].finish == "length"
            await until(lambda: core.aborted == ["r"], "the lost request was aborted")


async def test_an_engine_that_speaks_is_kept_for_longer_than_the_silence_limit(
    carriers: tuple[ServerCarrier, ClientCarrier],
) -> None:
    with EngineThread(ScriptedCore(), carriers[0], card()):
        async with connected(EngineLink("engine-0", carriers[1], times=QUICK)) as client:
            await client.wait_up(MODEL, 20)
            stream = run(client, "r", salt="wait")
            began = time.monotonic()
            while time.monotonic() - began < 3 * QUICK.silence_limit_s:
                await read(run(client, "other", output_cap=50))
            stream.abort()
            assert (await read(stream))[-1].finish == "abort"


async def test_a_client_that_the_engine_has_given_up_comes_back(endpoint: str) -> None:
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), card(), client_timeout_s=0.2):
        lazy = LinkTimes(ping_interval_s=0.6, backoff_min_s=0.01)
        async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=lazy)) as client:
            await client.wait_up(MODEL, 20)
            with pytest.raises(EngineUnavailable, match="say hello first"):
                await read(run(client, "r", salt="wait"))
            await client.wait_up(MODEL, 20)


async def test_close_fails_open_streams_and_the_engine_aborts_them(
    carriers: tuple[ServerCarrier, ClientCarrier],
) -> None:
    core = ScriptedCore()
    with EngineThread(core, carriers[0], card()):
        async with connected(EngineLink("engine-0", carriers[1])) as client:
            await client.wait_up(MODEL, 20)
            stream = run(client, "r", output_cap=FOREVER)
            await anext(stream)
        with pytest.raises(EngineUnavailable, match="the gateway is closing"):
            await read(stream)
        await until(lambda: core.aborted == ["r"], "the request is aborted")


async def test_a_client_closes_cleanly_while_its_engine_is_away(endpoint: str) -> None:
    async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=QUICK)):
        pass


# --- misfits ----------------------------------------------------------------------------------------------------------


async def test_an_engine_of_another_protocol_version_does_not_come_up(endpoint: str) -> None:
    newer = msgspec.structs.replace(card(), version=2)
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), newer):
        async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=QUICK)) as client:
            with pytest.raises(EngineUnavailable, match="protocol version 2, this gateway 1"):
                await client.wait_up(MODEL, 0.3)


async def test_an_engine_with_another_id_does_not_come_up(endpoint: str) -> None:
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), card("engine-7")):
        async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=QUICK)) as client:
            with pytest.raises(EngineUnavailable, match="this is engine 'engine-7'"):
                await client.wait_up(MODEL, 0.3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [("our key", "does not accept our CURVE key"), ("its key", "the handshake failed")],
    ids=["our key", "its key"],
)
async def test_wrong_keys_keep_the_engine_down_and_say_so(free_port: Callable[[], int], wrong: str, says: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    engine_keys, (good,) = CurveKeys.pair()
    _, (stranger,) = CurveKeys.pair()
    known = frozenset((engine_keys.public_key,)) if wrong == "our key" else stranger.peer_keys
    ours = stranger if wrong == "our key" else good
    bad = CurveKeys(public_key=ours.public_key, secret_key=ours.secret_key, peer_keys=known)
    core = ScriptedCore()
    with EngineThread(core, ZeroMQServer(address, curve=engine_keys), card()):
        times = LinkTimes(connect_timeout_s=0.3, backoff_min_s=0.01, backoff_max_s=0.05)
        async with (
            connected(EngineLink("engine-0", ZeroMQClient(address, curve=good))) as welcome,
            connected(EngineLink("engine-0", ZeroMQClient(address, curve=bad), times=times)) as client,
        ):
            await welcome.wait_up(MODEL, 20)
            with pytest.raises(EngineUnavailable, match=says):
                await client.wait_up(MODEL, 0.5)
            assert (await read(run(welcome, "r")))[-1].finish == "length"


def test_tcp_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires CURVE keys"):
        ZeroMQClient("tcp://127.0.0.1:5000")


def test_a_client_has_one_engine_key() -> None:
    engine_keys, _ = CurveKeys.pair(num_clients=2)
    with pytest.raises(ConfigError, match="one public key"):
        ZeroMQClient("tcp://127.0.0.1:5000", curve=engine_keys)


# --- event loops, imports ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_it_works_on_every_event_loop(endpoint: str, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def use() -> None:
        async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=PATIENT)) as client:
            await client.wait_up(MODEL, 20)
            streams = [run(client, f"r{i}", output_cap=50) for i in range(8)]
            dropped = run(client, "dropped", output_cap=FOREVER)
            await anext(dropped)
            dropped.abort()
            for outputs in await asyncio.gather(*map(read, (*streams, dropped))):
                assert outputs[-1].finish in ("length", "abort")

    def runs(main: Coroutine[object, object, None]) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main)

    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), card()):
        runs(use())


def test_the_gateways_side_does_not_import_torch() -> None:
    modules = "engine.client, engine.link, engine.router, engine.carriers.zeromq_client, engine.carriers.inprocess"
    code = f"import sys, {modules}, engine.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
