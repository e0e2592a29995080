"""Hard quotas with the real engine core: not a token beyond them, and charged for what was computed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from byte_text import byte_assets
from client_kit import until
from engine_kit import EngineThread, card
from fake_runner import EOS, FakeRunner
from limited_calls_kit import Calls, drained, ends
from limiter_kit import MODEL, ORGANIZATION, Wanted

from engine.carriers.zeromq_client import ZeroMQClient
from engine.carriers.zeromq_server import ZeroMQServer
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.link import EngineLink
from engine.router import FirstReady
from gateway.backends.local import LocalBackend
from gateway.backends.scripted import Script
from gateway.domain.limits.policy import QuotaRule
from gateway.domain.request import Text
from gateway.domain.usage import TokenUsage
from gateway.errors import QuotaExceeded

STEP_TOKENS = 32


def day(amount: int) -> QuotaRule:
    return QuotaRule(unit="tokens", period="day", amount=amount)


class Steps:
    """Of the engine: as many as the test lets it take. `num_waiting` were begun while it did not."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._may = threading.Semaphore(0)
        self._is_free = True

    def stop(self) -> None:
        self._is_free = False

    def let(self, num: int) -> None:
        self._may.release(num)

    def go_on(self) -> None:
        self._is_free = True
        self._may.release(1)

    def wait(self) -> None:
        time.sleep(0.0002)  # a step's computing time
        if not self._is_free:
            self.num_waiting += 1
            self._may.acquire(timeout=20)


@asynccontextmanager
async def engine_with(
    hub: Calls, endpoint: str, *, max_sequences: int = 8, eos_every: int = 0
) -> AsyncIterator[tuple[EngineCore, Steps]]:
    """Serves the hub."""
    steps = Steps()
    runner = FakeRunner(
        200,
        max_sequences=max_sequences,
        max_step_tokens=STEP_TOKENS,
        eos_every=eos_every,
        on_wait=steps.wait,
    )
    config = EngineConfig(
        model=Path("none"), max_sequences=max_sequences, max_step_tokens=STEP_TOKENS, plan_ahead=False
    )
    core = EngineCore(
        config, runner, max_model_len=2_000, eos_token_ids=(EOS,), clock=lambda: time.monotonic_ns() // 1000
    )
    with EngineThread(core, ZeroMQServer(endpoint), card(model=MODEL)):
        client = EngineClient([EngineLink("engine-0", ZeroMQClient(endpoint))], FirstReady())
        await client.start()
        try:
            await client.wait_up(MODEL, 20)
            hub.serve(LocalBackend(client, {MODEL: byte_assets()}))
            yield core, steps
        finally:
            steps.go_on()
            await client.close()


async def hub_with(amount: int) -> Calls:
    hub = Calls(Script(steps=()), day(amount))
    await hub.begin()
    return hub


@pytest.mark.parametrize(
    ("prompts", "num_choices", "amount"),
    [
        ((Text("x" * 12),), 1, 12 + 1),
        ((Text("x" * 12),), 1, 12 + 137),
        ((Text("x" * 12),), 3, 12 + 3 * 40 + 2),
        ((Text("x" * 12), Text("y" * 70)), 2, 82 + 4 * 33 + 3),
        ((Text("x" * 600),), 1, 600 + 300),
    ],
)
async def test_answers_end_where_the_quota_does(
    endpoint: str, prompts: tuple[Text, ...], num_choices: int, amount: int
) -> None:
    hub = await hub_with(amount)
    async with engine_with(hub, endpoint):
        events = await hub.answer(*prompts, num_choices=num_choices, most=1_000)
        num_answers = len(prompts) * num_choices
        num_prompt = sum(len(prompt.text) for prompt in prompts)
        each = (amount - num_prompt) // num_answers

        assert ends(events) == dict.fromkeys(range(num_answers), ("length", "quota_exceeded"))
        assert hub.records[0].usage.completion_tokens == num_answers * each
        assert await hub.left() == [amount - num_prompt - num_answers * each]


async def test_output_is_raised_in_slices_while_it_streams_up_to_what_was_asked_for(endpoint: str) -> None:
    hub = await hub_with(2_000)
    other = await hub.admit(Wanted((1,), (1_899,)))
    asked: list[tuple[int, int]] = []
    raise_output = hub.limiter.raise_output

    async def kept(grant: object, wanted: int) -> int:
        granted = await raise_output(grant, wanted)  # type: ignore[arg-type]
        asked.append((wanted, granted))
        return granted

    hub.limiter.raise_output = kept  # type: ignore[method-assign]
    async with engine_with(hub, endpoint), await hub.call(Text("x" * 10), most=700) as call:
        assert call.grant.granted == 90
        await call.__anext__()
        await hub.limiter.settle(other, TokenUsage(1, 1))
        events = [event async for some in call for event in some]

    assert ends(events) == {0: ("length", None)}
    assert hub.records[0].usage == TokenUsage(10, 700)
    assert [granted for _, granted in asked] == [346, 602, 700]
    assert await hub.left() == [2_000 - 2 - 710]


async def test_who_leaves_the_queue_has_used_nothing(endpoint: str) -> None:
    hub = await hub_with(1_000)
    async with engine_with(hub, endpoint, max_sequences=2) as (core, steps):
        steps.stop()
        tasks = [asyncio.create_task(hub.answer(Text(letter * 20), most=50)) for letter in "xyz"]
        await until(lambda: len(hub.openings) == 3, "all are handed over")
        assert await hub.left() == [1_000 - 3 * 70]
        tasks[2].cancel()
        await asyncio.sleep(0)
        steps.go_on()
        await asyncio.wait(tasks)
        await until(lambda: not core.has_work, "the engine is idle")

    usages = {record.info.request_id: record.usage for record in hub.records}
    assert [usages[opening.request_id] for opening in hub.openings] == [TokenUsage(20, 50)] * 2 + [TokenUsage()]
    assert await hub.left() == [1_000 - 140]


async def test_who_leaves_while_the_prompt_is_computed_is_charged_for_what_was(endpoint: str) -> None:
    hub = await hub_with(1_000)
    async with engine_with(hub, endpoint) as (_, steps):
        steps.stop()
        task = asyncio.create_task(hub.answer(Text("x" * 300), most=50))
        await until(lambda: len(hub.openings) == 1, "it is handed over")
        steps.let(3)
        await until(lambda: steps.num_waiting == 4, "three steps are done, and the fourth waits")
        task.cancel()
        while not task.done():
            await asyncio.sleep(0.01)  # so that the engine hears of it within a step or two
            steps.let(1)
        with pytest.raises(asyncio.CancelledError):
            await task

    usage = hub.records[0].usage
    assert usage.completion_tokens == 0
    assert 3 * STEP_TOKENS <= usage.prompt_tokens < 300
    assert usage.prompt_tokens % STEP_TOKENS == 0
    assert await hub.left() == [1_000 - usage.prompt_tokens]


async def test_many_at_once_that_stop_early_never_exceed_it_and_what_they_leave_is_usable_at_once(
    endpoint: str,
) -> None:
    amount = 3_000
    hub = await hub_with(amount)
    dice = random.Random(5)
    num_refused = 0

    async def ask() -> None:
        nonlocal num_refused
        length, most = dice.randrange(5, 60), dice.randrange(20, 400)
        try:
            call = await hub.call(Text("x" * length), most=most, num_choices=dice.choice((1, 1, 2)))
            await drained(call)
        except QuotaExceeded:
            num_refused += 1

    async with engine_with(hub, endpoint, eos_every=40):
        while (await hub.left())[0] > 20:
            await asyncio.gather(*(ask() for _ in range(10)))
            used = sum(record.usage.total_tokens for record in hub.records)
            assert used <= amount
            assert await hub.left() == [amount - used]
        [left] = await hub.left()
        if left > 1:
            await hub.answer(Text("x"), most=left - 1)

    used = sum(record.usage.total_tokens for record in hub.records)
    assert used <= amount
    assert num_refused
    assert await hub.store.held(ORGANIZATION) == []
