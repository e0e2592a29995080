"""Where a request stands, asked over every carrier, of one engine and of several, by its own gateway and another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from client_kit import PATIENT, connected, run, until
from engine_kit import MODEL, EngineThread, card
from scripted_core import ScriptedCore

from engine.carriers.inprocess import InProcessClient, InProcessServer
from engine.carriers.port import ClientCarrier, ServerCarrier
from engine.carriers.zeromq_client import ZeroMQClient
from engine.errors import EngineUnavailable
from engine.link import EngineLink


@pytest.fixture
def core(carriers: tuple[ServerCarrier, ClientCarrier]) -> Iterator[ScriptedCore]:
    with EngineThread(ScriptedCore(), carriers[0], card()) as engine:
        yield engine.core


async def test_a_request_can_be_asked_about_by_the_client_that_sent_it_and_by_another_one(
    engine: EngineThread[ScriptedCore], endpoint: str
) -> None:
    link, other_link = (EngineLink("engine-0", ZeroMQClient(endpoint), times=PATIENT) for _ in range(2))
    async with connected(link, client_id="one") as client, connected(other_link, client_id="two") as other:
        await client.wait_up(MODEL, 20)
        await other.wait_up(MODEL, 20)
        streams = [run(client, request_id, salt="wait") for request_id in ("a", "b-0")]
        await until(lambda: len(engine.core.submitted) == 2, "both are there")
        for asking in (client, other):
            standing = await asking.standing("b", ["b-0", "b-1"])
            assert (standing.phase, standing.resource) == ("queue", "slot")
            assert (standing.ahead, standing.ahead_of_team) == ({"interactive": 1}, ("a",))
            assert (standing.team_id, standing.request_class) == ("team", "interactive")
            assert (standing.expected_wait_us, standing.queue_us) == (2_500_000, 1000)
            assert (await asking.standing("b")).phase == "unknown"
        for stream in streams:
            stream.abort()


async def test_questions_of_both_kinds_at_once_get_their_own_answers(
    core: ScriptedCore, carriers: tuple[ServerCarrier, ClientCarrier]
) -> None:
    async with connected(EngineLink("engine-0", carriers[1], times=PATIENT)) as client:
        await client.wait_up(MODEL, 20)
        stream = run(client, "a", salt="wait")
        stats, standing, nobody = await asyncio.gather(
            client.stats(MODEL), client.standing("a"), client.standing("nobody")
        )
        assert (stats.num_running, standing.phase, nobody.phase) == (1, "queue", "unknown")
        stream.abort()


async def test_of_several_engines_the_one_that_has_it_answers_and_one_that_is_down_leaves_it_open() -> None:
    servers = [InProcessServer() for _ in range(2)]
    with contextlib.ExitStack() as engines:
        cards = [card("engine-0", "first"), card("engine-1", "second")]
        first, second = (
            engines.enter_context(EngineThread(ScriptedCore(), server, ready))
            for server, ready in zip(servers, cards, strict=True)
        )
        links = [EngineLink(f"engine-{i}", InProcessClient(server), times=PATIENT) for i, server in enumerate(servers)]
        async with connected(*links) as client:
            await client.wait_up("first", 20)
            await client.wait_up("second", 20)
            stream = run(client, "b", salt="wait", model="second")
            await until(lambda: "b" in second.core.submitted, "it is there")
            assert (await client.standing("b")).phase == "queue"
            assert (await client.standing("c")).phase == "unknown"

            first.server.stop()
            await until(lambda: not client.is_up("first"), "the first engine is gone")
            assert (await client.standing("b")).phase == "queue"
            with pytest.raises(EngineUnavailable):
                await client.standing("c")
            stream.abort()
