"""A quiet team beside one that floods, phase by phase, on a server that nobody else uses.

The flood's own output is measured within one run of it, for as long before the quiet team comes as after it has left,
so that a machine that grows slower meanwhile does not look like a loss. Whatever is measured twice is measured with
other prompts of the same lengths.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from gateway.bench.caller import Answer, Caller
from gateway.bench.engine_seconds import EngineSeconds, difference
from gateway.bench.figures import Isolation, Shares
from gateway.bench.flood import Flood
from gateway.bench.prompts import Prompts

_LONG_OUTPUT = 8
_SILENCE_S = 600.0
"""After so long without a byte there will be no answer; in order of arrival a flood waits for minutes."""

Say = Callable[[str], None]


class CannotMeasure(Exception):
    """There is no server, or no teams, to measure; the message is one line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of what is sent. Lengths are in tokens, all but those of long prompts on average.

    Attributes:
        num_flooding: requests that a flood has under way at any time.
        num_samples: of the quiet team, alone and beside the flood.
        pause_s: on average, between the quiet team's answer and its next request.
        long_repeats: long prompts one after the other, alone and beside the flood.
        num_beside: long prompts at once beside the quiet team's stream.
        window_s: how long the flood's own output is measured, half of it before and half after the quiet team.
        limit_s: that the quiet team's requests take at most, alone and beside the flood; what it has by then counts.
    """

    num_flooding: int = 64
    flood_prompt: int = 400
    flood_output: int = 96
    num_samples: int = 200
    quiet_prompt: int = 100
    quiet_output: int = 16
    pause_s: float = 0.5
    long_prompt: int = 6000
    long_repeats: int = 3
    stream_output: int = 400
    num_beside: int = 3
    window_s: float = 60.0
    limit_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server, and who is who there.

    Attributes:
        quiet_keys, flood_keys: of one team each, at least one.
        model: None is the first one that the server lists.
        metrics_url: of Evenhand's metrics; None if they cannot be read.
    """

    url: str
    quiet_keys: Sequence[str]
    flood_keys: Sequence[str]
    model: str | None = None
    metrics_url: str | None = None


@dataclass(frozen=True, slots=True)
class StreamGaps:
    """Seconds between a stream's tokens, and the answers of whom they come from."""

    alone_s: Sequence[float]
    beside_s: Sequence[float]
    streams: Sequence[Answer]
    others: Sequence[Answer]


class Bench:
    """The two teams and what they send; each method is a phase."""

    def __init__(self, quiet: Caller, flooding: Caller, engine: EngineSeconds, load: Load, say: Say) -> None:
        self._quiet = quiet
        self._flooding = flooding
        self._engine = engine
        self._load = load
        self._say = say

    async def isolation(self) -> Isolation:
        load = self._load
        team = await self._engine.owner_of(self._quiet)
        self._say(f"quiet team alone: {load.num_samples} requests ...")
        alone = await self.samples()
        self._say("long prompts alone ...")
        long_alone = await self.long_prompts()
        self._say("stream, alone and beside long prompts of the other team ...")
        gaps = await self.stream_gaps()
        flood = self.flood()
        async with flood.running():
            self._say(f"flood of {load.num_flooding} alone ...")
            await flood.under_way()
            before = await self._window(load.window_s / 2)
            charged_before = await self._engine.settled()
            self._say(f"quiet team beside the flood: {load.num_samples} requests ...")
            begun_s = time.perf_counter()
            beside = await self.samples()
            ended_s = time.perf_counter()
            charged_after = await self._engine.settled()
            self._say("long prompts beside the flood ...")
            long_beside = await self.long_prompts()
            self._say("flood alone again ...")
            after = await self._window(load.window_s / 2)
        own_s = sum(until_s - since_s for since_s, until_s in (before, after))
        charged_s = difference(charged_before, charged_after, team)
        quiet_answers = [*alone, *long_alone, *gaps.streams, *beside, *long_beside]
        return Isolation(
            ttft_alone_s=_ttfts(alone),
            ttft_beside_s=_ttfts(beside),
            pace_beside_s=[gap_s for answer in beside for gap_s in answer.gaps_s()],
            long_alone_s=_ttfts(long_alone),
            long_beside_s=_ttfts(long_beside),
            gaps_alone_s=gaps.alone_s,
            gaps_beside_s=gaps.beside_s,
            flood_alone_per_s=sum(flood.num_tokens(*window) for window in (before, after)) / own_s,
            flood_beside_per_s=flood.num_tokens(begun_s, ended_s) / (ended_s - begun_s),
            charged=None if charged_s is None else charged_s / (ended_s - begun_s),
            quiet_failures=_failures(quiet_answers),
            flood_failures=[*flood.failures, *_failures(gaps.others)],
        )

    async def shares(self, weights: tuple[int, int]) -> Shares:
        """Both teams flood, as far as they come with these weights, which they have already.

        Raises:
            CannotMeasure: they are one team.
        """
        owners = [await self._engine.owner_of(caller) for caller in (self._quiet, self._flooding)]
        if owners[0] is not None and owners[0] == owners[1]:
            raise CannotMeasure("the keys of the two teams belong to one and the same team")
        floods = [self.flood(self._quiet), self.flood()]
        async with floods[0].running(), floods[1].running():
            self._say(f"both teams flood, {self._load.num_flooding} requests each ...")
            await asyncio.gather(*(flood.under_way() for flood in floods))
            before = await self._engine.now()
            since_s, until_s = await self._window(self._load.window_s)
            after = await self._engine.now()
        served = [difference(before, after, owner) for owner in owners]
        outputs = [flood.num_tokens(since_s, until_s) / (until_s - since_s) for flood in floods]
        return Shares(
            weights=weights,
            output_per_s=(outputs[0], outputs[1]),
            engine_s=None if served[0] is None or served[1] is None else (served[0], served[1]),
            failures=[failure for flood in floods for failure in flood.failures],
        )

    async def samples(self) -> list[Answer]:
        """The quiet team's requests, one after the other with pauses, at moments that fit nobody's rhythm."""
        load, prompts = self._load, self._quiet.prompts
        until_s = time.perf_counter() + load.limit_s
        answers: list[Answer] = []
        while len(answers) < load.num_samples and time.perf_counter() < until_s:
            answers.append(await self.sample())
            await asyncio.sleep(prompts.within(0.5 * load.pause_s, 1.5 * load.pause_s))
        return answers

    async def sample(self) -> Answer:
        """One request of the quiet team."""
        return await self._quiet.complete(self._quiet.prompts.about(self._load.quiet_prompt), self._load.quiet_output)

    async def long_prompts(self) -> list[Answer]:
        """The quiet team's, one after the other."""
        return [
            await self._quiet.complete(self._load.long_prompt, _LONG_OUTPUT) for _ in range(self._load.long_repeats)
        ]

    async def stream_gaps(self) -> StreamGaps:
        """Of a stream of the quiet team alone, and of one beside long prompts, while these run."""
        alone = await self._stream(Answer())
        beside = Answer()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stream(beside))
            await beside.begun.wait()
            since_s = time.perf_counter()
            others = await asyncio.gather(
                *(self._flooding.complete(self._load.long_prompt, _LONG_OUTPUT) for _ in range(self._load.num_beside))
            )
            until_s = time.perf_counter()
        return StreamGaps(alone.gaps_s(), beside.gaps_s(since_s, until_s), [alone, beside], others)

    async def _stream(self, answer: Answer) -> Answer:
        return await self._quiet.complete(self._load.quiet_prompt, self._load.stream_output, answer=answer)

    def flood(self, caller: Caller | None = None) -> Flood:
        """Of the flooding team, if no other is named; it does not run yet."""
        load, caller = self._load, caller or self._flooding
        return Flood(caller, size=load.num_flooding, num_prompt=load.flood_prompt, num_output=load.flood_output)

    async def _window(self, duration_s: float) -> tuple[float, float]:
        since_s = time.perf_counter()
        await asyncio.sleep(duration_s)
        return since_s, time.perf_counter()


@asynccontextmanager
async def prepared(target: Target, load: Load, say: Say) -> AsyncIterator[Bench]:
    """A bench whose server has answered each team once.

    Raises:
        CannotMeasure: it has not.
    """
    limits = httpx.Limits(max_connections=None)
    # Without the proxies that the environment names: they would be measured, too.
    async with httpx.AsyncClient(base_url=target.url, timeout=_SILENCE_S, limits=limits, trust_env=False) as http:
        model = target.model or await _first_model(http, target)
        prompts = Prompts()
        quiet, flooding = (Caller(http, model, keys, prompts) for keys in (target.quiet_keys, target.flood_keys))
        for caller in [quiet] * len(target.quiet_keys) + [flooding] * len(target.flood_keys):
            answer = await caller.complete(load.quiet_prompt, load.quiet_output)
            if answer.failure is not None:
                raise CannotMeasure(f"{target.url} does not answer as it should: {answer.failure}")
        yield Bench(quiet, flooding, EngineSeconds(http, target.metrics_url), load, say)


async def _first_model(http: httpx.AsyncClient, target: Target) -> str:
    try:
        response = await http.get("/v1/models", headers={"authorization": f"Bearer {target.quiet_keys[0]}"})
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, ValueError) as e:
        raise CannotMeasure(f"{target.url} does not list its models; name one with --model: {e}") from e


def _ttfts(answers: Sequence[Answer]) -> list[float]:
    return [answer.ttft_s for answer in answers if answer.ttft_s is not None]


def _failures(answers: Sequence[Answer]) -> list[str]:
    return [answer.failure for answer in answers if answer.failure is not None]
