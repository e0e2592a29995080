"""A process to be killed while it meters.

`journal HOME` puts requests on record as fast as it can and says what it has done, a line each: ``+ID`` once a request
is opened, ``-ID`` once it is settled. `engine HOME ENDPOINT NUM` opens requests at a real engine and says ``+ID`` when
each of them has told its first tokens; then it reads on for ever. `recover HOME` recovers into the home's SQLite file
until nothing is left.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from pathlib import Path

from metering_kit import NOTHING_YET, Finals, opening, record

from engine.carriers.zeromq_client import ZeroMQClient
from engine.client import EngineClient
from engine.link import EngineLink
from engine.messages import PathNode
from engine.router import FirstReady
from engine.sampling_params import SamplingParams
from engine.stream import OutputStream
from gateway.journal.folder import JournalFolder, new_writer_id
from gateway.journal.writer import JournalWriter
from gateway.services.metering import MeteringRecorder
from gateway.services.recovery import Recovery
from gateway.storage.database import Database

SEGMENT_BYTES = 20_000
FOREVER = 1 << 40


class SystemClock:
    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def journal(home: Path) -> None:
    writer = JournalWriter(JournalFolder(home), new_writer_id(), segment_bytes=SEGMENT_BYTES)
    recorder = MeteringRecorder(writer, SystemClock())
    for i in itertools.count():
        opened = opening(f"req_{writer.writer_id}_{i}")
        recorder.opened(opened, NOTHING_YET)
        say(f"+{opened.request_id}")
        if i % 3:
            recorder.settled(record(opened))
            say(f"-{opened.request_id}")
        if i % 50 == 0:
            writer.sync()


async def engine(home: Path, endpoint: str, num: int) -> None:
    writer = JournalWriter(JournalFolder(home), new_writer_id())
    recorder = MeteringRecorder(writer, SystemClock())
    client = EngineClient([EngineLink("engine-0", ZeroMQClient(endpoint))], FirstReady(), client_id=writer.writer_id)
    await client.start()
    await client.wait_up("scripted", 20)

    async def read(name: str, stream: OutputStream) -> None:
        async for output in stream:
            if output.num_delivered_tokens >= 3 and name:
                say(f"+{name}")
                name = ""

    def submit(request_id: str, *, salt: str = "", cap: int = FOREVER) -> OutputStream:
        return client.submit(
            "scripted",
            request_id=request_id,
            token_ids=[5, 6, 7],
            sampling=SamplingParams(temperature=0.0),
            path=(PathNode("org"),),
            output_cap=cap,
            cache_salt=salt,
        )

    async with asyncio.TaskGroup() as group:
        for i in range(num):
            opened = opening(f"req_{i}", num_parts=1 + i % 2)
            parts = [opened.request_id] if i % 2 == 0 else [f"{opened.request_id}-0", f"{opened.request_id}-1"]
            streams = [submit(part) for part in parts]
            recorder.opened(opened, NOTHING_YET)
            for stream in streams:
                group.create_task(read(opened.request_id if stream is streams[-1] else "", stream))
        waiting = opening("req_waiting")
        stream = submit(waiting.request_id, salt="wait")
        recorder.opened(waiting, NOTHING_YET)
        say(f"+{waiting.request_id}")
        group.create_task(read("", stream))


async def recover(home: Path) -> None:
    database = Database.open(None, home)
    one = Recovery(
        JournalFolder(home), database, Finals(), SystemClock(), writer_id=new_writer_id(), is_open=lambda _: False
    )
    say("ready")
    sys.stdin.readline()
    while await one.look() or JournalFolder(home).writers():  # noqa: ASYNC110 - others, who tell nobody, have the rest
        await asyncio.sleep(0.01)
    await database.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["journal", where]:
            journal(Path(where))
        case ["engine", where, at, number]:
            asyncio.run(engine(Path(where), at, int(number)))
        case ["recover", where]:
            asyncio.run(recover(Path(where)))
