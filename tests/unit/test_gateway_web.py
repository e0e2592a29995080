"""The HTTP edge without a server: streams, the watch for clients that leave, body limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from identity_kit import PRINCIPAL

from gateway.backends.scripted import Fail, Gate, Say, Script, ScriptedBackend
from gateway.clock import SystemClock
from gateway.domain.events import GenerationEvent, TextDelta
from gateway.domain.ids import RequestId
from gateway.domain.ledger import Opening
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.request import GenerationRequest, Text
from gateway.domain.usage import TokenUsage
from gateway.errors import BodyTooLarge, ClientGone, EngineDown, EvenhandError
from gateway.limit_opening import in_memory
from gateway.services.call import Call
from gateway.services.catalog import Catalog, FixedListing
from gateway.services.inference import Inference
from gateway.services.limiter import Limiter
from gateway.services.ports import Running
from gateway.web.body import read_body
from gateway.web.disconnect import ClientWatch
from gateway.web.sse import EventStream, WholeAnswer

BODY_TIMEOUT_S = 10.0


class Client:
    """The other end of an ASGI call: what it was sent, and whether it is still there."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.news = asyncio.Event()

    async def receive(self) -> Any:
        if self.messages:
            self.news.set()
            return self.messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.news.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_so():
                self.news.clear()
                await self.news.wait()


class PlainWriter:
    """Text as it is, so that tests can read it."""

    heartbeat = b"<beat>"

    def __init__(self) -> None:
        self.text = b""

    def write(self, events: Sequence[GenerationEvent]) -> bytes:
        return b"".join(event.text.encode() for event in events if isinstance(event, TextDelta))

    def add(self, events: Sequence[GenerationEvent]) -> None:
        self.text += self.write(events)

    def finish(self, usage: TokenUsage) -> bytes:
        return self.text + b"<%d tokens>" % usage.completion_tokens

    def error(self, error: EvenhandError) -> bytes:
        return b"<error %s>" % (error.code or "none").encode()


class BrokenWriter(PlainWriter):
    def write(self, events: Sequence[GenerationEvent]) -> bytes:
        raise ZeroDivisionError


class Records:
    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def opened(self, opening: Opening, running: Running) -> None:
        pass

    def settled(self, record: RequestRecord) -> None:
        self.outcomes.append(record.outcome)


async def call_of(*steps: Say | Gate | Fail) -> tuple[Call, ScriptedBackend, Records]:
    backend, records = ScriptedBackend({"m": Script(steps=steps)}), Records()
    info = RequestInfo(
        request_id=RequestId("req_1"),
        principal=PRINCIPAL,
        request_class="interactive",
        endpoint="chat",
        stream=True,
    )
    clock = SystemClock()
    limiter = Limiter(in_memory(clock), clock)
    inference = Inference(backend, Catalog(backend, FixedListing()), clock, records, limiter)
    return await inference.prepare(GenerationRequest(model="m", prompts=(Text("x"),)), info), backend, records


def run(app: EventStream | WholeAnswer, client: Client) -> asyncio.Task[None]:
    return asyncio.ensure_future(app({"type": "http"}, client.receive, client.send))  # type: ignore[arg-type, typeddict-item]


async def test_a_stream_opens_with_a_heartbeat_and_ends_complete() -> None:
    call, _, records = await call_of(Say("a"), Say("b"))
    client = Client()
    await run(EventStream(call, PlainWriter(), 10), client)

    assert client.body == b"<beat>ab<2 tokens>"
    assert client.is_complete
    assert records.outcomes == ["finished"]


async def test_headers_go_out_before_the_first_token() -> None:
    call, backend, _ = await call_of(Gate("go"), Say("a"))
    client = Client()
    task = run(EventStream(call, PlainWriter(), 10), client)
    await client.wait_for(lambda: client.body == b"<beat>")
    assert client.sent[0]["status"] == 200
    backend.gate("go").set()
    await task

    assert client.body == b"<beat>a<1 tokens>"


async def test_heartbeats_come_while_nothing_else_does() -> None:
    call, backend, _ = await call_of(Gate("go"), Say("a"))
    client = Client()
    task = run(EventStream(call, PlainWriter(), 0.01), client)
    await client.wait_for(lambda: client.body.count(b"<beat>") == 4)
    backend.gate("go").set()
    await task

    assert client.body.endswith(b"<beat>a<1 tokens>")


async def test_no_heartbeat_goes_between_a_slow_write_and_the_next() -> None:
    """One write at a time: a heartbeat waits for the chunk that its reader has not taken yet."""
    call, _, _ = await call_of(Say("a"), Say("b"))
    client = Client()
    gate = asyncio.Event()
    in_send = 0

    async def slow_send(message: Any) -> None:
        nonlocal in_send
        in_send += 1
        assert in_send == 1
        if message.get("body") == b"a":
            await gate.wait()
        in_send -= 1
        await client.send(message)

    app = EventStream(call, PlainWriter(), 0.005)
    task = asyncio.ensure_future(app({"type": "http"}, client.receive, slow_send))  # type: ignore[arg-type, typeddict-item]
    asyncio.get_running_loop().call_later(0.05, gate.set)
    await task

    assert client.body == b"<beat>ab<2 tokens>"


async def test_a_write_waits_for_a_heartbeat_that_its_reader_has_not_taken() -> None:
    call, backend, _ = await call_of(Gate("go"), Say("a"))
    client = Client()
    blocked, release = asyncio.Event(), asyncio.Event()
    in_send = 0

    async def slow_send(message: Any) -> None:
        nonlocal in_send
        in_send += 1
        assert in_send == 1
        if message.get("body") == b"<beat>" and client.body == b"<beat>":
            blocked.set()
            await release.wait()
        in_send -= 1
        await client.send(message)

    app = EventStream(call, PlainWriter(), 0.005)
    task = asyncio.ensure_future(app({"type": "http"}, client.receive, slow_send))  # type: ignore[arg-type, typeddict-item]
    await blocked.wait()
    backend.gate("go").set()
    await backend.wait_until(lambda: backend.generations[0].num_told > 0)
    release.set()
    await task

    assert client.body == b"<beat><beat>a<1 tokens>"


async def test_a_bug_in_the_writer_ends_the_stream_in_band_and_stops_the_engine() -> None:
    call, backend, records = await call_of(Say("a"), Gate("never"))
    client = Client()
    await run(EventStream(call, BrokenWriter(), 10), client)

    assert client.body == b"<beat><error internal_error>"
    assert client.is_complete
    assert backend.generations[0].aborted
    assert records.outcomes == ["internal_error"]


async def test_a_lost_engine_ends_the_stream_in_band() -> None:
    call, _, records = await call_of(Say("a"), Fail(EngineDown("lost")))
    client = Client()
    await run(EventStream(call, PlainWriter(), 10), client)

    assert client.body == b"<beat>a<error engine_unavailable>"
    assert records.outcomes == ["engine_down"]


async def test_a_lost_engine_is_a_status_when_nothing_was_sent() -> None:
    call, _, _ = await call_of(Say("a"), Fail(EngineDown("lost")))
    client = Client()
    with pytest.raises(EngineDown):
        await run(WholeAnswer(call, PlainWriter()), client)

    assert client.sent == []


async def test_a_stream_that_is_cut_says_why() -> None:
    call, backend, records = await call_of(Say("a"), Gate("never"))
    client = Client()
    task = run(EventStream(call, PlainWriter(), 10), client)
    await client.wait_for(lambda: client.body == b"<beat>a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert client.body == b"<beat>a<error none>"
    assert backend.generations[0].aborted
    assert records.outcomes == ["cancelled"]


@pytest.mark.parametrize("kind", [EventStream, WholeAnswer])
async def test_nothing_is_sent_to_a_client_that_left(kind: type[EventStream | WholeAnswer]) -> None:
    call, backend, records = await call_of(Gate("never"))
    client = Client()
    app = EventStream(call, PlainWriter(), 10) if kind is EventStream else WholeAnswer(call, PlainWriter())
    task = run(app, client)
    await backend.wait_until(lambda: bool(backend.generations))
    num_sent = len(client.sent)
    client.left.set()
    await task

    assert len(client.sent) == num_sent
    assert not client.is_complete
    assert backend.generations[0].aborted
    assert records.outcomes == ["client_gone"]


async def watched(receive: Callable[[], Awaitable[Any]], work: Awaitable[Any]) -> Any:
    async with ClientWatch(receive):
        return await work


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    client = Client()
    client.left.set()
    with pytest.raises(ClientGone):
        await watched(client.receive, asyncio.Event().wait())


async def test_work_that_ends_in_time_is_not_disturbed() -> None:
    client = Client()

    assert await watched(client.receive, asyncio.sleep(0, "done")) == "done"
    client.left.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_cancellation_from_outside_stays_one() -> None:
    task = asyncio.create_task(watched(Client().receive, asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_from_outside_wins_over_a_client_that_leaves_just_then() -> None:
    loop = asyncio.get_running_loop()
    message: asyncio.Future[Any] = loop.create_future()
    task = asyncio.create_task(watched(lambda: message, asyncio.Event().wait()))
    await asyncio.sleep(0)
    message.set_result({"type": "http.disconnect"})
    loop.call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_messages_other_than_a_disconnect_are_passed_over() -> None:
    client = Client({"type": "http.request", "body": b"", "more_body": False})
    task = asyncio.create_task(watched(client.receive, asyncio.Event().wait()))
    await client.wait_for(lambda: not client.messages)
    assert not task.done()
    client.left.set()
    with pytest.raises(ClientGone):
        await task


async def test_a_broken_connection_counts_as_gone() -> None:
    def receive() -> Awaitable[Any]:
        broken = asyncio.get_running_loop().create_future()
        broken.set_exception(ConnectionResetError())
        return broken

    with pytest.raises(ClientGone):
        await watched(receive, asyncio.Event().wait())


def part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([part(b"12345", more=False)], b"12345"),
        ([part(b"12", more=True), part(b"", more=True), part(b"345", more=False)], b"12345"),
        ([part(b"123456", more=False)], None),
        ([part(b"1234", more=True), part(b"56", more=False)], None),
        ([part(b"1234", more=True), part(b"56", more=True), part(b"7", more=False)], None),
    ],
)
async def test_a_body_has_a_limit_however_it_comes(parts: list[dict[str, Any]], expected: bytes | None) -> None:
    client = Client(*parts)
    scope: Any = {"type": "http", "headers": []}
    if expected is None:
        with pytest.raises(BodyTooLarge):
            await read_body(scope, client.receive, 5, BODY_TIMEOUT_S)
    else:
        assert await read_body(scope, client.receive, 5, BODY_TIMEOUT_S) == expected
    assert client.messages == []


async def test_a_client_that_waits_to_be_told_to_go_on_is_told_no() -> None:
    """With ``expect: 100-continue`` nothing is read that is not wanted."""
    client = Client(part(b"123456", more=True), part(b"7", more=False))
    scope: Any = {"type": "http", "headers": [(b"expect", b"100-continue")]}
    with pytest.raises(BodyTooLarge):
        await read_body(scope, client.receive, 5, BODY_TIMEOUT_S)

    assert len(client.messages) == 1


async def test_a_client_that_leaves_while_it_sends() -> None:
    client = Client(part(b"12", more=True))
    scope: Any = {"type": "http", "headers": []}
    client.left.set()
    with pytest.raises(ClientGone):
        await read_body(scope, client.receive, 5, BODY_TIMEOUT_S)
