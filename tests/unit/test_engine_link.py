"""One engine's link and its streams, over a scripted carrier: what no real engine can be made to do on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.errors import EngineUnavailable
from engine.link import EngineLink, LinkTimes
from engine.messages import (
    FromEngine,
    Hello,
    Output,
    Outputs,
    Ready,
    Submit,
    ToEngine,
    TokenLogprobs,
    decode_to_engine,
    encode,
)
from engine.sampling_params import SamplingParams
from engine.stream import OutputStream

TIMES = LinkTimes(abort_timeout_s=0.05, backoff_min_s=0.001, backoff_max_s=0.004)


def ready(incarnation: str) -> Ready:
    return Ready(
        engine_id="e",
        model="m",
        max_model_len=8,
        vocab_size=8,
        eos_token_ids=(),
        kv_capacity_tokens=8,
        max_sequences=1,
        incarnation=incarnation,
    )


def submit(request_id: str) -> Submit:
    return Submit(engine_id="e", request_id=request_id, token_ids=[1], sampling=SamplingParams(), path=(), output_cap=4)


class ScriptedChannel:
    """`Channel` that answers hello and is fed by the test. With `flood` it never lets a reader wait."""

    def __init__(self, incarnation: str) -> None:
        self.sent: list[ToEngine] = []
        self.flood: Output | None = None
        self._incarnation = incarnation
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    def feed(self, *messages: FromEngine) -> None:
        for message in messages:
            self._frames.put_nowait(encode(message))

    def lose(self) -> None:
        self._frames.put_nowait(None)

    def send(self, frame: bytes) -> None:
        message = decode_to_engine(frame)
        self.sent.append(message)
        if isinstance(message, Hello):
            self.feed(ready(self._incarnation))

    async def receive(self) -> list[bytes]:
        if self.flood is not None:
            return [encode(Outputs("e", (self.flood,)))]
        frame = await self._frames.get()
        if frame is None:
            raise EngineUnavailable("scripted loss")
        return [frame]

    def close(self, reason: str = "closed") -> None:
        """Nothing is held."""


class ScriptedCarrier:
    """`ClientCarrier` whose first `num_refusals` connections do not come about."""

    def __init__(self, num_refusals: int = 0) -> None:
        self.channels: list[ScriptedChannel] = []
        self.num_refusals = num_refusals
        self.is_closed = False

    async def connect(self, timeout_s: float) -> ScriptedChannel:
        if self.num_refusals:
            self.num_refusals -= 1
            raise EngineUnavailable("scripted refusal")
        self.channels.append(ScriptedChannel(f"incarnation {len(self.channels)}"))
        return self.channels[-1]

    def close(self) -> None:
        self.is_closed = True


class Watched:
    """A started link, and a way to wait until it is up or down."""

    def __init__(self, carrier: ScriptedCarrier) -> None:
        self.carrier = carrier
        self.link = EngineLink("e", carrier, times=TIMES)
        self._changes: asyncio.Queue[bool] = asyncio.Queue()
        self.link.start("c", lambda: self._changes.put_nowait(self.link.is_up))

    @property
    def channel(self) -> ScriptedChannel:
        return self.carrier.channels[-1]

    async def becomes(self, is_up: bool) -> None:
        async with asyncio.timeout(5):
            while await self._changes.get() is not is_up:
                pass


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    started = Watched(ScriptedCarrier())
    await started.becomes(is_up=True)
    yield started
    await started.link.close()
    assert started.carrier.is_closed


async def read(stream: OutputStream) -> list[Output]:
    async with asyncio.timeout(5):
        return [output async for output in stream]


async def test_connecting_is_tried_until_it_comes_about() -> None:
    watched = Watched(ScriptedCarrier(num_refusals=4))
    await watched.becomes(is_up=True)
    assert (watched.carrier.num_refusals, len(watched.carrier.channels)) == (0, 1)
    await watched.link.close()


async def test_a_lost_connection_fails_everything_in_flight_and_the_next_one_serves(watched: Watched) -> None:
    stream = watched.link.submit(submit("r"))
    question = asyncio.create_task(watched.link.stats())
    finals = asyncio.create_task(watched.link.collect_finals(()))
    await asyncio.sleep(0)
    watched.channel.lose()
    for lost in (read(stream), question, finals):
        with pytest.raises(EngineUnavailable, match="scripted loss"):
            await lost
    await watched.becomes(is_up=True)
    again = watched.link.submit(submit("r"))
    watched.channel.feed(Outputs("e", (Output(request_id="r", finish="stop"),)))
    assert [output.finish for output in await read(again)] == ["stop"]
    assert watched.link.card == ready("incarnation 1")


async def test_a_ready_of_another_incarnation_on_the_same_connection_fails_what_went_to_the_old_one(
    watched: Watched,
) -> None:
    stream = watched.link.submit(submit("r"))
    watched.channel.feed(ready("incarnation 0"), Outputs("e", (Output(request_id="r", token_ids=(5,)),)))
    assert (await anext(stream)).token_ids == (5,)
    watched.channel.feed(ready("another"))
    with pytest.raises(EngineUnavailable, match="replaced by another process"):
        await read(stream)
    assert watched.link.is_up


async def test_a_message_that_cannot_be_decoded_ends_the_connection(watched: Watched) -> None:
    stream = watched.link.submit(submit("r"))
    watched.channel._frames.put_nowait(b"\xc1")
    with pytest.raises(EngineUnavailable, match="another protocol"):
        await read(stream)
    await watched.becomes(is_up=True)


async def test_a_bug_in_the_link_fails_streams_and_the_link_comes_back(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    stream = watched.link.submit(submit("r"))
    watched.channel._frames.put_nowait("not bytes")  # type: ignore[arg-type]
    with pytest.raises(EngineUnavailable, match="the gateway's link to it failed"):
        await read(stream)
    await watched.becomes(is_up=True)
    assert "Traceback" in caplog.text


async def test_news_of_requests_that_nobody_waits_for_are_ignored(watched: Watched) -> None:
    watched.channel.feed(Outputs("e", (Output(request_id="unheard of", finish="stop"),)))
    stream = watched.link.submit(submit("r"))
    watched.channel.feed(Outputs("e", (Output(request_id="r", finish="stop"),)))
    assert [output.finish for output in await read(stream)] == ["stop"]


async def test_an_engine_that_never_pauses_does_not_starve_the_readers(watched: Watched) -> None:
    stream = watched.link.submit(submit("r"))
    watched.channel.feed(Outputs("e", (Output(request_id="r", token_ids=(1,)),)))
    watched.channel.flood = Output(request_id="r", token_ids=(2,))
    async with asyncio.timeout(5):
        assert (await anext(stream)).token_ids[0] == 1
        assert set((await anext(stream)).token_ids) == {2}
    watched.channel.flood = None


async def test_a_confirmed_abort_does_not_touch_the_next_request_of_that_name(watched: Watched) -> None:
    first = watched.link.submit(submit("r"))
    first.abort()
    watched.channel.feed(Outputs("e", (Output(request_id="r", finish="abort"),)))
    await read(first)
    second = watched.link.submit(submit("r"))
    unconfirmed = watched.link.submit(submit("s"))
    unconfirmed.abort()
    with pytest.raises(EngineUnavailable, match="did not confirm an abort"):
        await read(unconfirmed)  # by now the first abort's time would be over as well
    watched.link.submit(submit("s"))
    watched.channel.feed(Outputs("e", (Output(request_id="r", finish="stop"),)))
    assert [output.finish for output in await read(second)] == ["stop"]


async def test_unread_outputs_are_joined_for_each_choice(watched: Watched) -> None:
    stream = OutputStream("r", 2, watched.link, 1.0)
    logprobs = [TokenLogprobs(-float(i)) for i in range(4)]
    stream.feed(Output(request_id="r", token_ids=(1, 2), logprobs=tuple(logprobs[:2]), num_delivered_tokens=2))
    stream.feed(Output(request_id="r", choice=1, token_ids=(9,), num_delivered_tokens=1))
    stream.feed(Output(request_id="r", token_ids=(3,), logprobs=(logprobs[2],), num_delivered_tokens=3))
    stream.feed(Output(request_id="r", held_at_cap=True, num_delivered_tokens=3))
    first, second = await anext(stream), await anext(stream)
    assert (first.token_ids, first.logprobs) == ((1, 2, 3), tuple(logprobs[:3]))
    assert (first.held_at_cap, first.num_delivered_tokens) == (True, 3)
    assert (second.choice, second.token_ids, second.logprobs) == (1, (9,), None)


async def test_what_came_before_a_failure_is_read_before_it(watched: Watched) -> None:
    stream = watched.link.submit(submit("r"))
    stream.feed(Output(request_id="r", token_ids=(1,)))
    stream.fail(EngineUnavailable("gone"))
    assert (await anext(stream)).token_ids == (1,)
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="gone"):
            await anext(stream)
