"""Processes that meter and are killed: others settle what they have left, exactly once, with the engine's counts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_kit import EngineProcess
from evenhand_process import wait_until
from metering_kit import Finals, MemoryStorage, opening
from metering_program import SystemClock

from engine.carriers.zeromq_client import ZeroMQClient
from engine.client import EngineClient
from engine.link import EngineLink
from engine.router import FirstReady
from gateway.backends.local_finals import LocalFinals
from gateway.journal.folder import JournalFolder, new_writer_id
from gateway.journal.records import Opened
from gateway.journal.writer import JournalWriter
from gateway.services.recovery import FinalsSource, Recovery
from gateway.storage.database import Database
from gateway.storage.schema import migrate

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "metering_program.py"


@contextlib.contextmanager
def program(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def said_until(process: subprocess.Popen[bytes], num: int) -> list[str]:
    """The first `num` lines."""
    assert process.stdout is not None
    return [process.stdout.readline().decode().strip() for _ in range(num)]


def recovery(home: Path, storage: MemoryStorage, finals: FinalsSource) -> Recovery:
    return Recovery(
        JournalFolder(home), storage, finals, SystemClock(), writer_id=new_writer_id(), is_open=lambda _: False
    )


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_one_row_for_each_request(tmp_path: Path) -> None:
    chance = random.Random(7)
    for round_ in range(20):
        home = tmp_path / str(round_)
        with program("journal", home) as process:
            lines = said_until(process, chance.randrange(1, 400))
            process.kill()
            assert process.stdout is not None
            lines += process.stdout.read().decode().split("\n")[:-1]
        storage = MemoryStorage()
        assert asyncio.run(recovery(home, storage, Finals()).look()) == 0
        opened = {line[1:] for line in lines if line.startswith("+")}
        closed = {line[1:] for line in lines if line.startswith("-")}
        assert opened <= storage.rows.keys()
        assert len(storage.rows) <= len(opened) + 1  # one may have been written and not told
        for name, row in storage.rows.items():
            if name in closed:
                assert row.outcome == "finished"
        num_lost = sum(row.outcome == "lost" for row in storage.rows.values())
        assert len(opened - closed) - 1 <= num_lost <= len(opened - closed) + 1
        assert JournalFolder(home).writers() == []


async def test_requests_of_a_killed_gateway_are_charged_what_the_engine_says(tmp_path: Path, folder: Path) -> None:
    endpoint = f"ipc://{folder}/e"
    with EngineProcess(endpoint):
        with program("engine", tmp_path, endpoint, 6) as process:
            names = {line[1:] for line in await asyncio.to_thread(said_until, process, 7)}
            process.kill()
        (dead,) = JournalFolder(tmp_path).writers()
        client = EngineClient([EngineLink("engine-0", ZeroMQClient(endpoint))], FirstReady())
        await client.start()
        try:
            await client.wait_up("scripted", 20)
            async with asyncio.timeout(30):
                said = await client.collect_finals(client_id=dead)
                while not said.is_complete:
                    said = await client.collect_finals(client_id=dead)
            counts = {each.request_id: each for each in said.counts}
            assert len(counts) == 6 + 3 + 1

            storage = MemoryStorage()
            assert await recovery(tmp_path, storage, LocalFinals(client)).look() == 0
            assert storage.rows.keys() == names
            for name, row in storage.rows.items():
                parts = [each for part, each in counts.items() if part == name or part.startswith(f"{name}-")]
                assert len(parts) == 1 + (name in ("req_1", "req_3", "req_5"))
                assert row.outcome == "lost"
                assert row.completion_tokens == sum(part.num_output_tokens for part in parts)
                assert row.engine_us == sum(part.timings.engine_us for part in parts)
                assert (row.completion_tokens >= 3) == (name != "req_waiting")
            assert await client.collect_finals(client_id=dead) == ([], True)
        finally:
            await client.close()


async def test_an_engine_that_was_killed_too_is_not_waited_for_once_a_new_one_is_up(
    tmp_path: Path, folder: Path
) -> None:
    endpoint = f"ipc://{folder}/e"
    with EngineProcess(endpoint) as first, program("engine", tmp_path, endpoint, 2) as process:
        await asyncio.to_thread(said_until, process, 3)
        process.kill()
        first.kill()
    client = EngineClient([EngineLink("engine-0", ZeroMQClient(endpoint))], FirstReady())
    await client.start()
    storage = MemoryStorage()
    one = recovery(tmp_path, storage, LocalFinals(client))
    try:
        assert await one.look() == 1
        assert storage.rows == {}
        with EngineProcess(endpoint):
            await client.wait_up("scripted", 20)
            assert await one.look() == 0
            assert {name: row.completion_tokens for name, row in storage.rows.items()} == {
                "req_0": 0,
                "req_1": 0,
                "req_waiting": 0,
            }
    finally:
        await client.close()


async def test_two_processes_that_recover_at_once_and_one_that_is_killed_leave_one_row_each(tmp_path: Path) -> None:
    database = Database.open(None, tmp_path)
    await migrate(database)
    folder = JournalFolder(tmp_path)
    for _ in range(40):
        writer = JournalWriter(folder, new_writer_id())
        for i in range(100):
            writer.append(Opened(opening(f"req_{writer.writer_id}_{i}")))
        writer.close(remove=False)
    with program("recover", tmp_path) as a, program("recover", tmp_path) as b, program("recover", tmp_path) as c:
        for process in (a, b, c):
            assert await asyncio.to_thread(said_until, process, 1) == ["ready"]
        for process in (a, b, c):
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        await asyncio.to_thread(wait_until, lambda: len(folder.writers()) < 35, 30)
        c.kill()
        assert await asyncio.to_thread(a.wait, 60) == 0
        assert await asyncio.to_thread(b.wait, 60) == 0
    async with database.reading() as work:
        assert (await work.ledger.totals()).num_requests == 40 * 100
    assert list(folder.path.iterdir()) == []
    await database.close()
