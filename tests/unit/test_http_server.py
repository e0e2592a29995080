"""The drain, with granian on a real port and an application that answers as it is told."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import gateway.http_server
from gateway.http_server import check_tls, serve_http
from gateway.settings import ServerSettings
from gateway.settings_sources import SettingsError
from gateway.shutdown import Shutdown

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

    def __init__(self, port: int, drain_s: float, drain_notice_s: float) -> None:
        self.application = Application()
        self.shutdown = Shutdown()
        self.url = f"http://127.0.0.1:{port}"
        settings = ServerSettings(port=port, drain_s=drain_s, drain_notice_s=drain_notice_s)
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
def open_house(free_port: Callable[[], int]) -> Callable[..., House]:
    return lambda drain_s, drain_notice_s=0.0: House(free_port(), drain_s, drain_notice_s)


async def test_a_drain_lets_running_requests_finish_while_the_port_stays_open(
    open_house: Callable[..., House],
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
    open_house: Callable[..., House], drain_s: float
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


async def test_an_idle_server_stays_for_the_notice_before_it_closes(open_house: Callable[..., House]) -> None:
    house = open_house(1000, 0.3)
    await house.opened()
    started = time.monotonic()
    house.shutdown.request()
    async with httpx.AsyncClient() as newcomer:
        assert (await newcomer.get(f"{house.url}/quick")).text == "1.1"
    assert house.shutdown.is_draining
    assert not house.shutdown.is_closing
    await asyncio.wait_for(house.serving, 10)

    assert house.shutdown.is_closing
    assert time.monotonic() - started > 0.3


async def test_a_second_request_cuts_the_notice_short(open_house: Callable[..., House]) -> None:
    house = open_house(1000, 1000)
    await house.opened()
    house.shutdown.request()
    house.shutdown.request()

    await asyncio.wait_for(house.serving, 10)


async def test_a_client_that_does_not_read_cannot_hold_up_the_end(
    open_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
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


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key, and the key of another."""
    folder = tmp_path_factory.mktemp("pem")
    for key, certificate in (("tls.key", "tls.crt"), ("other.key", "other.crt")):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=hub.example"),
                *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / key, "-out", folder / certificate),
            ],
            check=True,
            capture_output=True,
        )
    lock: list[str | Path] = [
        "openssl",
        "rsa",
        "-aes256",
        "-passout",
        "pass:secret",
        "-in",
        folder / "tls.key",
        "-out",
        folder / "locked.key",
    ]
    subprocess.run(lock, check=True, capture_output=True)
    curve = ("openssl", "ecparam", "-genkey", "-noout", "-name", "prime256v1", "-out", folder / "ec.key")
    subprocess.run(curve, check=True, capture_output=True)
    (folder / "text").write_text("not a key")
    return folder


async def answer_over_tls(settings: ServerSettings) -> str:
    shutdown = Shutdown()
    serving = asyncio.create_task(serve_http(Application(), settings, "127.0.0.1", shutdown))
    trust = ssl.create_default_context(cafile=str(settings.tls_cert))
    async with asyncio.timeout(10), httpx.AsyncClient(verify=trust) as client:
        while not serving.done():
            try:
                answer = await client.get(f"https://127.0.0.1:{settings.port}/quick")
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.01)
    shutdown.request()
    await asyncio.wait_for(serving, 10)
    return answer.text


KINDS = {
    "rsa1024": ("rsa:1024",),
    "rsa2048": ("rsa:2048",),
    "rsa3072": ("rsa:3072",),
    "p256": ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    "p384": ("ec", "-pkeyopt", "ec_paramgen_curve:secp384r1"),
    "p521": ("ec", "-pkeyopt", "ec_paramgen_curve:secp521r1"),
    "ed25519": ("ed25519",),
    "ed448": ("ed448",),
}


def key_pair(folder: Path, kind: str) -> ServerSettings:
    certificate, key = folder / f"{kind}.crt", folder / f"{kind}.key"
    make = ("openssl", "req", "-x509", "-newkey", *KINDS[kind], "-nodes", "-days", "1", "-subj", "/CN=hub.example")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run([*make, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return ServerSettings(tls_cert=certificate, tls_key=key)


@pytest.mark.parametrize("kind", ["rsa2048", "rsa3072", "p256", "p384", "ed25519"])
async def test_tls_is_served_with_every_kind_of_key_that_is_taken(
    free_port: Callable[[], int], tmp_path: Path, kind: str
) -> None:
    pair = key_pair(tmp_path, kind)
    check_tls(pair)
    assert await answer_over_tls(pair.model_copy(update={"port": free_port()})) == "1.1"


@pytest.mark.parametrize("kind", ["p521", "ed448"])
def test_a_kind_of_key_that_granian_would_abort_at_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SettingsError, match=rf"server\.tls_key \S+{kind}\.key .* RSA key .* P-384 or Ed25519"):
        check_tls(key_pair(tmp_path, kind))


def test_an_rsa_key_that_is_too_short_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="key is too short: it must be an RSA key of 2048"):
        check_tls(key_pair(tmp_path, "rsa1024"))


def test_a_certificate_of_version_1_is_refused(pem: Path, tmp_path: Path) -> None:
    request, certificate = tmp_path / "tls.csr", tmp_path / "v1.crt"
    new = ("openssl", "req", "-new", "-key", pem / "tls.key", "-subj", "/CN=hub.example", "-out", request)
    subprocess.run(new, check=True, capture_output=True)
    sign = ("openssl", "x509", "-req", "-in", request, "-signkey", pem / "tls.key", "-out", certificate)
    subprocess.run(sign, check=True, capture_output=True)

    with pytest.raises(SettingsError, match=r"server\.tls_cert \S+v1\.crt .* not an X\.509 version 3"):
        check_tls(ServerSettings(tls_cert=certificate, tls_key=pem / "tls.key"))


@pytest.mark.parametrize(
    ("certificate", "key", "why"),
    [
        ("tls.crt", "other.key", "the key is not the certificate's"),
        ("tls.crt", "ec.key", "the key is not the certificate's"),
        ("tls.crt", "text", "one is not PEM"),
        ("text", "tls.key", "one is not PEM"),
        ("tls.crt", "locked.key", "the key has a password"),
    ],
)
def test_a_certificate_and_a_key_that_do_not_fit_are_named(pem: Path, certificate: str, key: str, why: str) -> None:
    with pytest.raises(SettingsError, match=rf"tls_cert \S+{certificate} and server\.tls_key \S+{key} .*{why}"):
        check_tls(ServerSettings(tls_cert=pem / certificate, tls_key=pem / key))
