"""The drain, with granian on a real port and an application that answers as it is told."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import gateway.http_server
from gateway.commands.serve import wait_until_ready
from gateway.http_server import Shutdown, serve_http
from gateway.settings import ServerSettings

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Application:
    """Streams one chunk at once and the last one when it is let go."""

    def __init__(self) -> None:
        self.may_finish = asyncio.Event()
        self.endings: list[str] = []

    async def __call__(self, scope: Message, receive: object, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] in {"/quick", "/ready"}:
            await send({"type": "http.response.body", "body": scope["http_version"].encode()})
            return
        try:
            chunk = b"x" * (1 << 20 if scope["path"] == "/big" else 1)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            while scope["path"] == "/big":
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await self.may_finish.wait()
            await send({"type": "http.response.body", "body": b"end"})
            self.endings.append("finished")
        except asyncio.CancelledError:
            self.endings.append("cut")
            raise


class House:
    """The application on a port."""

    def __init__(self, port: int, drain_s: float) -> None:
        self.application = Application()
        self.shutdown = Shutdown()
        self.url = f"http://127.0.0.1:{port}"
        settings = ServerSettings(port=port, drain_s=drain_s)
        self.serving = asyncio.create_task(serve_http(self.application, settings, "127.0.0.1", self.shutdown))

    async def opened(self) -> None:
        async with asyncio.timeout(10), httpx.AsyncClient() as client:
            while True:
                try:
                    await client.get(f"{self.url}/quick")
                except httpx.TransportError:
                    await asyncio.sleep(0.01)
                else:
                    return


@pytest.fixture
def open_house(free_port: Callable[[], int]) -> Callable[[float], House]:
    return lambda drain_s: House(free_port(), drain_s)


async def test_a_drain_lets_running_requests_finish_while_the_port_stays_open(
    open_house: Callable[[float], House],
) -> None:
    house = open_house(1000)
    await house.opened()
    async with httpx.AsyncClient() as client, client.stream("GET", f"{house.url}/stream") as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"x"
        house.shutdown.request()
        async with httpx.AsyncClient() as newcomer:
            assert (await newcomer.get(f"{house.url}/quick")).text == "1.1"
        assert not house.serving.done()
        house.application.may_finish.set()
        assert b"".join([chunk async for chunk in chunks]) == b"end"
    await asyncio.wait_for(house.serving, 10)

    assert house.application.endings == ["finished"]
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{house.url}/quick")


@pytest.mark.parametrize("drain_s", [0.1, 1000.0])
async def test_the_end_of_the_grace_or_a_second_request_cuts_what_still_runs(
    open_house: Callable[[float], House], drain_s: float
) -> None:
    house = open_house(drain_s)
    await house.opened()
    async with httpx.AsyncClient() as client, client.stream("GET", f"{house.url}/stream") as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"x"
        house.shutdown.request()
        if drain_s > 1:
            house.shutdown.request()
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(chunks)
    await asyncio.wait_for(house.serving, 10)

    assert house.application.endings == ["cut"]


async def test_a_client_that_does_not_read_cannot_hold_up_the_end(
    open_house: Callable[[float], House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.http_server, "STOP_S", 0.2)
    house = open_house(0.1)
    await house.opened()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rpartition(":")[2]))
    writer.write(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readexactly(100)
    house.shutdown.request()
    await asyncio.wait_for(house.serving, 10)
    writer.close()


async def test_a_port_that_cannot_be_listened_on_is_an_error(free_port: Callable[[], int]) -> None:
    port = free_port()
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", port):
        with pytest.raises(RuntimeError, match="in use"):
            await serve_http(Application(), ServerSettings(port=port), "127.0.0.1", Shutdown())


async def test_tls_is_served_and_readiness_is_seen_through_it(free_port: Callable[[], int], tmp_path: Path) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    make = await asyncio.create_subprocess_exec(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=hub.example"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await make.wait() == 0
    settings = ServerSettings(port=free_port(), tls_cert=certificate, tls_key=key)
    shutdown = Shutdown()
    serving = asyncio.create_task(serve_http(Application(), settings, "127.0.0.1", shutdown))

    await asyncio.wait_for(wait_until_ready(settings, "127.0.0.1"), 10)
    trust = ssl.create_default_context(cafile=str(certificate))
    async with httpx.AsyncClient(verify=trust) as client:
        assert (await client.get(f"https://127.0.0.1:{settings.port}/quick")).text == "1.1"
    shutdown.request()
    await asyncio.wait_for(serving, 10)
