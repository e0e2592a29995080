"""The real core behind the real server and client: what arrives at a stream is what the core said.

The runner is the checking fake of `fake_runner.py`, so every step also proves the planner's books.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_kit import MODEL, PATH, EngineThread, card
from fake_runner import EOS, FakeRunner, reference_tokens

from engine.carriers.zeromq_client import ZeroMQClient
from engine.carriers.zeromq_server import ZeroMQServer
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import RequestRejected
from engine.link import EngineLink
from engine.messages import Output
from engine.router import FirstReady
from engine.sampling_params import SamplingParams
from engine.stream import OutputStream

MAX_SEQUENCES = 8
MAX_STEP_TOKENS = 64
NUM_BLOCKS = 64
SEED = 11


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(
        NUM_BLOCKS,
        max_sequences=MAX_SEQUENCES,
        max_step_tokens=MAX_STEP_TOKENS,
        on_wait=lambda: time.sleep(0.0005),  # a step's computing time
    )


@pytest.fixture(params=[False, True], ids=["in step", "ahead"])
def engine(request: pytest.FixtureRequest, runner: FakeRunner, endpoint: str) -> Iterator[EngineThread[EngineCore]]:
    config = EngineConfig(
        model=Path("none"), max_sequences=MAX_SEQUENCES, max_step_tokens=MAX_STEP_TOKENS, plan_ahead=request.param
    )
    core = EngineCore(
        config, runner, max_model_len=512, eos_token_ids=(EOS,), clock=lambda: time.monotonic_ns() // 1000
    )
    with EngineThread(core, ZeroMQServer(endpoint), card()) as running:
        yield running


@asynccontextmanager
async def connected(endpoint: str, *, client_id: str | None = None) -> AsyncIterator[EngineClient]:
    client = EngineClient([EngineLink("engine-0", ZeroMQClient(endpoint))], FirstReady(), client_id=client_id)
    await client.start()
    try:
        await client.wait_up(MODEL, 20)
        yield client
    finally:
        await client.close()


@pytest.fixture
async def client(engine: EngineThread[EngineCore], endpoint: str) -> AsyncIterator[EngineClient]:
    async with connected(endpoint) as connected_client:
        yield connected_client


def run(client: EngineClient, request_id: str, prompt: list[int], **other: object) -> OutputStream:
    fields: dict[str, object] = {"output_cap": 40, "sampling": SamplingParams(seed=SEED), **other}
    return client.submit(MODEL, request_id=request_id, token_ids=prompt, path=PATH, **fields)  # type: ignore[arg-type]


def prompt_of(i: int) -> list[int]:
    draw = random.Random(i)
    return [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 200))]


async def read(stream: OutputStream) -> list[Output]:
    return [output async for output in stream]


def tokens(outputs: list[Output], choice: int = 0) -> list[int]:
    return [token for output in outputs if output.choice == choice for token in output.token_ids]


async def idle(client: EngineClient) -> None:
    """Wait until the engine runs nothing, and every block is free or cached."""
    async with asyncio.timeout(20):
        while True:
            stats = await client.stats(MODEL)
            num_back = stats.num_free_blocks + stats.num_cached_blocks
            if (stats.num_running, stats.num_waiting, num_back) == (0, 0, NUM_BLOCKS):
                return


async def test_thirty_two_at_once_each_say_what_they_would_say_alone(client: EngineClient) -> None:
    prompts = [prompt_of(i) for i in range(32)]
    streams = [run(client, f"r{i}", prompt, num_choices=1 + i % 2) for i, prompt in enumerate(prompts)]
    for i, outputs in enumerate(await asyncio.gather(*map(read, streams))):
        for choice in range(1 + i % 2):
            expected = reference_tokens(prompts[i], SamplingParams(seed=SEED), choice, 40, 0)
            assert tokens(outputs, choice) == expected
        assert outputs[-1].num_prompt_tokens == len(prompts[i])
    await idle(client)


async def test_aborts_at_random_moments_leave_nothing_behind(client: EngineClient) -> None:
    draw = random.Random(3)

    async def leave_early(i: int) -> None:
        stream = run(client, f"r{i}", prompt_of(i), output_cap=300, num_choices=draw.choice((1, 1, 3)))
        num_reads = draw.randrange(0, 30)
        seen = []
        async for output in stream:
            seen.append(output)
            if len(seen) == num_reads:
                break
        stream.abort()
        seen += await read(stream)
        for choice in {output.choice for output in seen}:
            last = [output for output in seen if output.choice == choice][-1]
            assert last.finish in ("abort", "length")
            assert last.num_delivered_tokens == len(tokens(seen, choice))

    await asyncio.gather(*(leave_early(i) for i in range(60)))
    await idle(client)


async def test_a_held_request_waits_for_its_cap_without_busy_steps(
    client: EngineClient, engine: EngineThread[EngineCore]
) -> None:
    stream = run(client, "r", [1, 2, 3], output_cap=4, hold_at_cap=True)
    got: list[Output] = []
    while not got or not got[-1].held_at_cap:
        got.append(await anext(stream))
    num_steps = (await client.stats(MODEL)).num_steps
    assert not engine.core.has_work
    assert (await client.stats(MODEL)).num_steps == num_steps
    stream.raise_cap(6)
    while not got[-1].held_at_cap or got[-1].num_delivered_tokens < 6:
        got.append(await anext(stream))
    stream.raise_cap(6)
    got += await read(stream)
    assert got[-1].finish == "length"
    assert tokens(got) == reference_tokens([1, 2, 3], SamplingParams(seed=SEED), 0, 6, 0)


async def test_a_deadline_ends_a_request_that_runs_and_one_that_is_held(client: EngineClient) -> None:
    running = run(client, "running", [1, 2, 3], output_cap=100_000, deadline_ms=30)
    held = run(client, "held", [1, 2, 3], output_cap=2, hold_at_cap=True, deadline_ms=30)
    for stream in (running, held):
        assert (await read(stream))[-1].finish in ("deadline", "length")
    await idle(client)


async def test_a_request_that_can_never_fit_is_rejected_at_once(client: EngineClient) -> None:
    with pytest.raises(RequestRejected):
        await read(run(client, "r", [1] * 600))
    await idle(client)


async def test_finals_of_a_vanished_gateway_are_what_its_requests_had_used(client: EngineClient, endpoint: str) -> None:
    names = {f"r{i}" for i in range(12)}
    async with connected(endpoint, client_id="gateway") as gateway:
        streams = [run(gateway, name, prompt_of(5), output_cap=300, num_choices=2) for name in sorted(names)]
        seen = await anext(streams[0])
    await idle(client)
    async with connected(endpoint, client_id="gateway") as gateway:
        finals = {final.request_id: final for final in (await gateway.collect_finals()).counts}
    assert set(finals) == names
    assert {final.num_prompt_tokens for final in finals.values()} == {len(prompt_of(5))}
    assert finals["r0"].num_output_tokens >= seen.num_delivered_tokens > 0
    assert {final.finish for final in finals.values()} == {"abort"}


async def test_a_step_that_fails_ends_every_stream_in_band(
    client: EngineClient, engine: EngineThread[EngineCore], runner: FakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    streams = [run(client, f"r{i}", prompt_of(i), output_cap=300) for i in range(12)]
    await anext(streams[0])
    runner.fail_at = runner.plans[-1].step_id + 5
    ends = [outputs[-1] for outputs in await asyncio.gather(*map(read, streams))]
    assert {end.finish for end in ends} == {"error"}
    engine.join()
    assert engine.ended is False
    assert "the device is gone" in caplog.text


def engine_program(folder: Path, endpoint: str, config: str) -> list[str | Path]:
    """A command that runs an engine process of this configuration."""
    program = folder / "program.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom engine.config import EngineConfig\n"
        "from engine.process import run_engine\n"
        f"sys.exit(run_engine(EngineConfig({config}), {endpoint!r}))\n"
    )
    return [sys.executable, program]


ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.parametrize(
    ("model", "endpoint", "says"),
    [
        ("/nowhere/model.gguf", None, "/nowhere/model.gguf"),
        ("/nowhere/model.gguf", "tcp://127.0.0.1:5000", "requires CURVE keys"),
    ],
    ids=["model", "endpoint"],
)
def test_what_cannot_work_is_one_line_and_exit_code_78_before_anything_listens(
    folder: Path, model: str, endpoint: str | None, says: str
) -> None:
    command = engine_program(folder, endpoint or f"ipc://{folder}/e", f"model=Path({model!r})")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == 78
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "e").exists()


@pytest.mark.model
async def test_a_real_engine_process_answers_and_stops(endpoint: str, smollm2_path: Path, folder: Path) -> None:
    config = f"model=Path({str(smollm2_path)!r}), model_name={MODEL!r}, kv_cache_bytes=64 << 20, num_threads=1"
    process = await asyncio.create_subprocess_exec(
        *engine_program(folder, endpoint, config), env=ENVIRONMENT, stderr=subprocess.PIPE
    )
    try:
        async with connected(endpoint) as client:
            sampling = SamplingParams(temperature=0.0)
            outputs = await read(run(client, "r", list(range(100, 140)), output_cap=8, sampling=sampling))
        assert len(tokens(outputs)) == outputs[-1].num_delivered_tokens == 8
        assert outputs[-1].finish == "length"
    finally:
        process.terminate()
        _, stderr = await process.communicate()
    assert (process.returncode, stderr.decode()) == (0, "")
