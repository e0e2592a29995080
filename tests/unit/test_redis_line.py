"""A connection to Redis that does not come about."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

from gateway.limits.redis_line import Line


async def test_a_failure_that_nobody_waits_for_any_more_is_no_complaint_of_asyncio() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        line = Line(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect_s=0.1, answer_s=0.1)
        waiting = asyncio.create_task(line.connect())
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0.2)
        await line.close()
        del waiting
        gc.collect()

    assert not line.is_up
    assert complaints == []
