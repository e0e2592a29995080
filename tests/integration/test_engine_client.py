"""The gateway's client of a pool of engines, over every carrier: requests, aborts, questions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from client_kit import FOREVER, PATIENT, QUICK, connected, read, run, until
from engine_kit import MODEL, PATH, EngineThread, card
from scripted_core import ScriptedCore

from engine.carriers.port import ClientCarrier, ServerCarrier
from engine.carriers.zeromq_client import ZeroMQClient
from engine.carriers.zeromq_server import ZeroMQServer
from engine.client import EngineClient
from engine.errors import EngineUnavailable, RequestRejected
from engine.link import EngineLink, LinkTimes


@pytest.fixture
def core(carriers: tuple[ServerCarrier, ClientCarrier]) -> Iterator[ScriptedCore]:
    """The core of an engine that runs in a thread."""
    with EngineThread(ScriptedCore(), carriers[0], card()) as engine:
        yield engine.core


@pytest.fixture
async def client(core: ScriptedCore, carriers: tuple[ServerCarrier, ClientCarrier]) -> AsyncIterator[EngineClient]:
    async with connected(EngineLink("engine-0", carriers[1], times=PATIENT), client_id="gateway") as connected_client:
        await connected_client.wait_up(MODEL, 20)
        yield connected_client


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_a_stream_ends_after_its_finish(client: EngineClient) -> None:
    outputs = await read(run(client, "r"))
    assert [token for output in outputs for token in output.token_ids] == [0, 1, 2, 3]
    assert [output.finish for output in outputs if output.finish] == ["length"]


async def test_a_stream_of_several_choices_ends_after_the_last_finish(client: EngineClient) -> None:
    outputs = await read(run(client, "r", num_choices=3))
    for choice in range(3):
        mine = [output for output in outputs if output.choice == choice]
        assert [t for output in mine for t in output.token_ids] == [1000 * choice + i for i in range(4)]
        assert mine[-1].finish == "length"


async def test_many_streams_at_once_get_their_own_outputs(client: EngineClient) -> None:
    streams = [run(client, f"r{i}", output_cap=i + 1) for i in range(32)]
    for i, outputs in enumerate(await asyncio.gather(*map(read, streams))):
        assert {output.request_id for output in outputs} == {f"r{i}"}
        assert outputs[-1].num_delivered_tokens == i + 1


async def test_all_parameters_reach_the_core(client: EngineClient, core: ScriptedCore) -> None:
    await read(run(client, "r", request_class="batch", num_choices=2, hold_at_cap=False, deadline_ms=90_000))
    sent = core.submitted["r"]
    assert (sent.token_ids, sent.path, sent.output_cap) == ([5, 6, 7], PATH, 4)
    assert (sent.request_class, sent.num_choices, sent.deadline_ms) == ("batch", 2, 90_000)


async def test_a_slow_reader_finds_what_came_in_one_output(client: EngineClient, core: ScriptedCore) -> None:
    stream = run(client, "r", output_cap=50)
    await until(lambda: stream.ended, "everything has come")
    (output,) = await read(stream)
    assert output.token_ids == tuple(range(50))
    assert (output.finish, output.num_delivered_tokens) == ("length", 50)


async def test_a_cancelled_read_loses_nothing(client: EngineClient) -> None:
    stream = run(client, "r", output_cap=30)
    tokens: list[int] = []
    while True:
        try:
            async with asyncio.timeout(0.001):
                output = await anext(stream)
        except TimeoutError:
            continue
        except StopAsyncIteration:
            break
        tokens += output.token_ids
    assert tokens == list(range(30))


async def test_what_the_engine_rejects_the_stream_raises(client: EngineClient) -> None:
    with pytest.raises(RequestRejected, match="longer than the KV pool") as caught:
        await read(run(client, "r", salt="reject"))
    assert caught.value.code == "over_capacity"


async def test_an_id_in_flight_is_rejected_and_its_stream_goes_on(client: EngineClient) -> None:
    first = run(client, "r", output_cap=20)
    with pytest.raises(RequestRejected, match="already running") as caught:
        run(client, "r")
    assert caught.value.code == "duplicate_request"
    assert (await read(first))[-1].finish == "length"


async def test_a_model_that_no_engine_serves_is_rejected(client: EngineClient) -> None:
    with pytest.raises(RequestRejected, match="no engine serves model 'gpt-9'") as caught:
        run(client, "r", model="gpt-9")
    assert caught.value.code == "model_not_served"


async def test_a_held_request_goes_on_when_its_cap_is_raised(client: EngineClient) -> None:
    stream = run(client, "r", output_cap=2, hold_at_cap=True)
    tokens: list[int] = []
    caps = iter((5, 5))
    async for output in stream:
        tokens += output.token_ids
        if output.held_at_cap:
            stream.raise_cap(next(caps))
    assert tokens == [0, 1, 2, 3, 4]
    assert output.finish == "length"


# --- abort at every moment --------------------------------------------------------------------------------------------


async def test_abort_right_after_submit(client: EngineClient) -> None:
    stream = run(client, "r", output_cap=FOREVER)
    stream.abort()
    assert (await read(stream))[-1].finish == "abort"


async def test_abort_of_a_waiting_request(client: EngineClient, core: ScriptedCore) -> None:
    stream = run(client, "r", salt="wait", num_choices=2)
    await until(lambda: "r" in core.submitted, "the engine has it")
    stream.abort()
    assert [output.finish for output in await read(stream)] == ["abort", "abort"]


async def test_abort_in_mid_stream_yields_the_final_counts(client: EngineClient) -> None:
    stream = run(client, "r", output_cap=FOREVER)
    tokens: list[int] = []
    async for output in stream:
        tokens += output.token_ids
        stream.abort()
    assert output.finish == "abort"
    assert output.num_delivered_tokens == len(tokens) == output.num_computed_tokens - 3


async def test_abort_while_somebody_reads(client: EngineClient, core: ScriptedCore) -> None:
    stream = run(client, "r", salt="wait")
    reader = asyncio.create_task(read(stream))
    await until(lambda: "r" in core.submitted, "the engine has it")
    stream.abort()
    assert [output.finish for output in await reader] == ["abort"]


async def test_abort_of_a_held_request(client: EngineClient) -> None:
    stream = run(client, "r", output_cap=1, hold_at_cap=True)
    assert (await anext(stream)).held_at_cap
    stream.abort()
    assert (await read(stream))[-1].finish == "abort"


async def test_abort_after_the_end_and_twice_changes_nothing(client: EngineClient, core: ScriptedCore) -> None:
    stream = run(client, "r")
    assert (await read(stream))[-1].finish == "length"
    stream.abort()
    stream.abort()
    await client.stats(MODEL)
    assert core.aborted == []


async def test_abort_twice_is_one_abort(client: EngineClient, core: ScriptedCore) -> None:
    stream = run(client, "r", salt="wait")
    stream.abort()
    stream.abort()
    await read(stream)
    assert core.aborted == ["r"]


async def test_abort_of_a_rejected_request_changes_nothing(client: EngineClient) -> None:
    stream = run(client, "r", salt="reject")
    stream.abort()
    with pytest.raises(RequestRejected):
        await read(stream)
    stream.abort()


async def test_an_aborted_stream_may_be_dropped_unread(client: EngineClient) -> None:
    stream = run(client, "r", output_cap=FOREVER)
    stream.abort()
    await until(lambda: stream.ended, "the finals came")
    assert (await read(run(client, "r")))[-1].finish == "length"


async def test_an_abort_that_is_not_confirmed_has_a_bound_in_time(endpoint: str) -> None:
    core = ScriptedCore()
    times = LinkTimes(abort_timeout_s=0.1)
    with EngineThread(core, ZeroMQServer(endpoint), card()):
        async with connected(EngineLink("engine-0", ZeroMQClient(endpoint), times=times)) as client:
            await client.wait_up(MODEL, 20)
            stream = run(client, "r", salt="block")
            stream.abort()
            with pytest.raises(EngineUnavailable, match=r"did not confirm an abort within 0\.1 s"):
                await read(stream)


# --- control ----------------------------------------------------------------------------------------------------------


async def test_stats(client: EngineClient, core: ScriptedCore) -> None:
    stream = run(client, "r", salt="wait")
    stats = await client.stats(MODEL)
    assert (stats.engine_id, stats.num_running) == ("engine-0", 1)
    stream.abort()


async def test_two_questions_at_once_get_their_own_answers(client: EngineClient) -> None:
    first, second, finals = await asyncio.gather(client.stats(MODEL), client.stats(MODEL), client.collect_finals())
    assert first.query_id != second.query_id
    assert finals.counts == []


async def test_finals_of_an_earlier_life_can_be_collected(
    core: ScriptedCore, carriers: tuple[ServerCarrier, ClientCarrier], endpoint: str
) -> None:
    async with connected(EngineLink("engine-0", carriers[1]), client_id="gateway") as earlier:
        await earlier.wait_up(MODEL, 20)
        await anext(run(earlier, "r", output_cap=FOREVER))
    await until(lambda: core.aborted == ["r"], "the request is aborted")
    async with connected(EngineLink("engine-0", carriers[1]), client_id="gateway") as later:
        await later.wait_up(MODEL, 20)
        (final,), _ = await later.collect_finals()
        assert (final.request_id, final.finish) == ("r", "abort")
        assert final.num_output_tokens >= 1
        assert (await later.collect_finals(acknowledge=["r"])).counts == []


async def test_an_end_that_was_read_leaves_no_final(carriers: tuple[ServerCarrier, ClientCarrier]) -> None:
    with EngineThread(ScriptedCore(), carriers[0], card()) as engine:
        async with connected(EngineLink("engine-0", carriers[1], times=QUICK), client_id="gateway") as earlier:
            await earlier.wait_up(MODEL, 20)
            await read(run(earlier, "r"))
            await earlier.stats(MODEL)  # the engine has done with the step that ended it
            await until(lambda: engine.num_unread_ends == 0, "a ping has told that the end was read")
        async with connected(EngineLink("engine-0", carriers[1]), client_id="gateway") as later:
            await later.wait_up(MODEL, 20)
            assert (await later.collect_finals()).counts == []


@pytest.fixture
def two_engines(
    folder: Path,
) -> Iterator[tuple[EngineThread[ScriptedCore], EngineThread[ScriptedCore], list[EngineLink]]]:
    a, b = f"ipc://{folder}/a", f"ipc://{folder}/b"
    with (
        EngineThread(ScriptedCore(), ZeroMQServer(a), card("a", "model-a")) as first,
        EngineThread(ScriptedCore(), ZeroMQServer(b), card("b", "model-b")) as second,
    ):
        yield first, second, [EngineLink(name, ZeroMQClient(f"ipc://{folder}/{name}"), times=PATIENT) for name in "ab"]


async def test_a_pool_routes_by_model_and_tells_every_engine_of_weights(
    two_engines: tuple[EngineThread[ScriptedCore], EngineThread[ScriptedCore], list[EngineLink]],
) -> None:
    first, second, links = two_engines
    async with connected(*links) as client:
        await client.wait_up("model-a", 20)
        await client.wait_up("model-b", 20)
        await read(run(client, "r", model="model-b"))
        client.set_weight("team", 5)
        client.charge_external("a", "team", 777)
        await client.stats("model-a")
        await client.stats("model-b")
    assert (list(first.core.submitted), list(second.core.submitted)) == ([], ["r"])
    assert first.core.weights == second.core.weights == [("team", 5)]
    assert (first.core.charges, second.core.charges) == ([("team", 777)], [])


async def test_a_pool_goes_on_with_what_is_left_of_it(folder: Path) -> None:
    carriers = [ZeroMQServer(f"ipc://{folder}/{name}") for name in "ab"]
    links = [EngineLink(name, ZeroMQClient(f"ipc://{folder}/{name}"), times=PATIENT) for name in "ab"]
    with EngineThread(ScriptedCore(), carriers[1], card("b")) as second:
        async with connected(*links) as client:
            with EngineThread(ScriptedCore(), carriers[0], card("a")) as first:
                await until(lambda: all(link.is_up for link in links), "both are up")
                await read(run(client, "r1"))
                assert list(first.core.submitted) == ["r1"]
            await until(lambda: not links[0].is_up, "the first is noticed to be gone")
            assert client.is_up(MODEL)
            await read(run(client, "r2"))
            assert list(second.core.submitted) == ["r2"]
