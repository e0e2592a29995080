"""HTTPS with an authority of our own: the official client, what is refused, and files that do not fit."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from scripted_server import KEY, ScriptedServer, running_server


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a chain of a certificate for 127.0.0.1, its key, and somebody else's key."""
    folder = tmp_path_factory.mktemp("pem")
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *ec, "-subj", "/CN=Our CA", "-keyout", folder / "ca.key", "-out", folder / "ca.crt")
    openssl("req", *ec, "-subj", "/CN=hub.example", "-keyout", folder / "tls.key", "-out", folder / "tls.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:hub.example\n")
    sign = ("x509", "-req", "-in", folder / "tls.csr", "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key")
    openssl(*sign, "-days", "1", "-extfile", folder / "names", "-out", folder / "leaf.crt")
    (folder / "tls.crt").write_text((folder / "leaf.crt").read_text() + (folder / "ca.crt").read_text())
    return folder


@pytest.fixture(scope="module")
def secure(
    pem: Path, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("tls")
    files = {"tls_cert": str(pem / "tls.crt"), "tls_key": str(pem / "tls.key")}
    with running_server(free_port(), folder, **files) as server:
        yield server


def test_the_official_client_talks_and_streams_over_https(secure: ScriptedServer, pem: Path) -> None:
    trust = ssl.create_default_context(cafile=str(pem / "ca.crt"))
    with (
        httpx.Client(verify=trust) as http,
        openai.OpenAI(base_url=f"{secure.url}/v1", api_key=KEY, http_client=http) as client,
    ):
        whole = client.chat.completions.create(model="hello", messages=[{"role": "user", "content": "hi"}])
        stream = client.chat.completions.create(
            model="eight", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert whole.choices[0].message.content == "Hello, world!"
    assert text == "".join(f"word{i} " for i in range(8))


def test_a_client_that_does_not_trust_the_authority_gets_nothing(secure: ScriptedServer) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secure.url}/health")


def test_plain_http_gets_nothing_on_the_tls_port(secure: ScriptedServer) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secure.port}/health")


def test_health_and_the_doctor_find_it_without_trusting_the_authority(
    secure: ScriptedServer, pem: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")} | {
        "EVENHAND_HOME": str(tmp_path),
        "EVENHAND_SERVER__PORT": str(secure.port),
        "EVENHAND_SERVER__METRICS_PORT": str(free_port()),
        "EVENHAND_SERVER__TLS_CERT": str(pem / "tls.crt"),
        "EVENHAND_SERVER__TLS_KEY": str(pem / "tls.key"),
    }

    def run(command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "gateway.cli", command]
        return subprocess.run(words, env=environment | settings, capture_output=True, text=True, timeout=60)

    well = run("health")
    assert (well.returncode, well.stdout) == (0, f"https://127.0.0.1:{secure.port} answers\n")
    nobody = run("health", EVENHAND_SERVER__PORT=str(free_port()))
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert f"127.0.0.1 port {secure.port} is served by an Evenhand that runs" in run("doctor").stdout


@pytest.mark.parametrize(("version", "works"), [("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)])
def test_the_oldest_tls_is_1_2(secure: ScriptedServer, pem: Path, version: str, works: bool) -> None:
    lenient = ["-cipher", "DEFAULT@SECLEVEL=0", "-verify_return_error", "-CAfile", pem / "ca.crt"]
    probe = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{secure.port}", version, *lenient],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=20,
    )

    assert (probe.returncode == 0) == works


def start(
    command: str, home: Path, free_port: Callable[[], int], certificate: Path, key: Path
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")} | {
        "EVENHAND_HOME": str(home),
        "EVENHAND_SERVER__PORT": str(free_port()),
        "EVENHAND_SERVER__METRICS_PORT": str(free_port()),
        "EVENHAND_SERVER__TLS_CERT": str(certificate),
        "EVENHAND_SERVER__TLS_KEY": str(key),
    }
    words = [sys.executable, "-m", "gateway.cli", command]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_a_key_that_the_server_would_abort_at_ends_the_start_with_one_line(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int], command: str
) -> None:
    folder = tmp_path_factory.mktemp("p521")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:secp521r1", "-nodes")
    openssl("req", "-x509", *curve, "-subj", "/CN=hub.example", "-keyout", folder / "key", "-out", folder / "crt")
    ended = start(command, tmp_path, free_port, folder / "crt", folder / "key")

    assert ended.returncode == 78
    assert ended.stderr.startswith(f"evenhand: server.tls_key {folder / 'key'} cannot be used: it must be an RSA key")
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["serve", "gateway"])
@pytest.mark.parametrize(("key", "why"), [("ca.key", "the key is not the certificate's"), ("names", "one is not PEM")])
def test_a_key_that_does_not_fit_ends_the_start_with_one_line(
    pem: Path, tmp_path: Path, free_port: Callable[[], int], command: str, key: str, why: str
) -> None:
    ended = start(command, tmp_path, free_port, pem / "tls.crt", pem / key)

    assert ended.returncode == 78
    assert ended.stderr.startswith(f"evenhand: server.tls_cert {pem / 'tls.crt'} and server.tls_key {pem / key} cannot")
    assert why in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
