"""Fair share as a client sees it: a quiet team beside another one's flood, over HTTP, with the real model.

A short run of what ``evenhand bench isolation`` measures. Bounds are ratios of the same run, and wider than the goals
there: a machine that tests share is not still, and of a dozen samples the largest one says nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from gateway.bench.caller import Answer
from gateway.bench.figures import Isolation, percentile
from gateway.bench.isolation import Bench, Load, Target, prepared
from gateway.commands.own_server import own_server
from gateway.settings import EngineSettings, Settings

T = TypeVar("T")

ATTEMPTS = 2
"""Something else that runs during one half of a comparison says nothing about the other: a bound must be kept once."""
NUM_SLOTS = 16
LOAD = Load(
    num_flooding=48,
    num_samples=12,
    quiet_output=8,
    pause_s=0.2,
    long_prompt=2000,
    long_repeats=1,
    stream_output=120,
    window_s=1.0,
    limit_s=60.0,
)

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def settings(smollm2_path: Path) -> Settings:
    """One thread: two crawl beside whatever else runs on two cores."""
    return Settings(home=smollm2_path.parents[2], engine=EngineSettings(threads=1, kv_cache_bytes=512 << 20))


@contextmanager
def running(settings: Settings, policy: str) -> Iterator[Callable[[Callable[[Bench], Awaitable[T]]], T]]:
    """Runs something with a bench on a server with two teams of equal weight."""
    with own_server(settings, policy=policy, num_slots=NUM_SLOTS, teams={"quiet": (1, 1), "flood": (1, 1)}) as server:
        target = Target(url=server.url, quiet_keys=server.keys["quiet"], flood_keys=server.keys["flood"])

        async def measure(work: Callable[[Bench], Awaitable[T]]) -> T:
            async with prepared(target, LOAD, print) as bench:
                return await work(bench)

        yield lambda work: asyncio.run(measure(work))


def high(values: Sequence[float]) -> float:
    found = percentile(values, 0.9)
    assert found is not None
    return found


def excesses(run: Isolation) -> dict[str, tuple[float, float]]:
    """What is over its bound: figure and bound, in seconds. A step is as long as the machine lets it be just then."""
    figures = {
        "TTFT": (high(run.ttft_beside_s), 2.5 * high(run.ttft_alone_s) + high(run.pace_beside_s)),
        "gap": (high(run.gaps_beside_s), max(3 * high(run.gaps_alone_s), 0.060)),
        "long prompt": (run.long_beside_s[0], 3.5 * run.long_alone_s[0]),
    }
    return {name: (value, bound) for name, (value, bound) in figures.items() if value > bound}


def test_a_quiet_team_hardly_notices_a_flood(settings: Settings) -> None:
    runs: list[Isolation] = []
    over: dict[str, list[tuple[float, float]]] = {}
    with running(settings, "fair") as measured:
        while not runs or (over and len(runs) < ATTEMPTS):
            runs.append(measured(Bench.isolation))
            found = excesses(runs[-1])
            over = {name: [*over.get(name, []), found[name]] for name in found if name in over or len(runs) == 1}

    assert [failure for run in runs for failure in run.failures] == []
    assert all(len(run.ttft_beside_s) == LOAD.num_samples for run in runs)
    assert over == {}


def test_in_order_of_arrival_a_quiet_team_waits_for_the_flood(settings: Settings) -> None:
    """So the bound above is one that can be missed."""

    async def first_beside_a_flood(bench: Bench) -> tuple[Answer, Answer]:
        alone = await bench.sample()
        async with bench.flood().running() as flood:
            await flood.under_way()
            return alone, await bench.sample()

    with running(settings, "fcfs") as measured:
        alone, beside = measured(first_beside_a_flood)

    assert alone.ttft_s is not None
    assert beside.ttft_s is not None
    assert beside.ttft_s > 3 * (2.5 * alone.ttft_s + max(beside.gaps_s()))
