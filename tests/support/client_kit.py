"""The gateway's client of a pool of engines, as tests use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from engine_kit import MODEL, PATH

from engine.client import EngineClient
from engine.link import EngineLink, LinkTimes
from engine.messages import Output
from engine.router import FirstReady
from engine.sampling_params import SamplingParams
from engine.stream import OutputStream

FOREVER = 1 << 40
QUICK = LinkTimes(
    ping_interval_s=0.05, silence_limit_s=0.3, abort_timeout_s=0.2, backoff_min_s=0.01, backoff_max_s=0.05
)
PATIENT = LinkTimes(backoff_min_s=0.01, backoff_max_s=0.05)


def run(client: EngineClient, request_id: str, *, salt: str = "", model: str = MODEL, **other: object) -> OutputStream:
    fields: dict[str, object] = {"output_cap": 4, **other}
    return client.submit(
        model,
        request_id=request_id,
        token_ids=[5, 6, 7],
        sampling=SamplingParams(temperature=0.0),
        path=PATH,
        cache_salt=salt,
        **fields,  # type: ignore[arg-type]
    )


async def read(stream: OutputStream) -> list[Output]:
    return [output async for output in stream]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another thread or process brings about."""
    try:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 (no event of this loop tells of it)
                await asyncio.sleep(0.002)
    except TimeoutError:
        pytest.fail(f"never came true: {what}")


@asynccontextmanager
async def connected(*links: EngineLink, client_id: str | None = None) -> AsyncIterator[EngineClient]:
    client = EngineClient(links, FirstReady(), client_id=client_id)
    await client.start()
    try:
        yield client
    finally:
        await client.close()
