"""`evenhand serve` as a whole, with the real model: start, stop, and every process killed in turn."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from evenhand_process import EvenhandProcess, wait_until

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
COUNTING = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], "stream": True, "temperature": 0}
Serve = Callable[..., EvenhandProcess]


@pytest.fixture
def serve(new_home: Callable[[], Path], free_port: Callable[[], int]) -> Iterator[Serve]:
    """Starts servers, in a home of its own each or in a given one, and ends what is left of them."""
    started: list[EvenhandProcess] = []

    def start(home: Path | None = None, **settings: str) -> EvenhandProcess:
        server = EvenhandProcess(home or new_home(), free_port(), free_port(), settings)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@contextmanager
def _stream(server: EvenhandProcess, max_tokens: int) -> Iterator[Iterator[str]]:
    """The data of a running answer's events, after its first token; it goes on to max_tokens whatever it says."""
    body = {**COUNTING, "max_tokens": max_tokens, "ignore_eos": True}
    with server.client() as client, client.stream("POST", "/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        events = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        for event in events:
            if json.loads(event)["choices"][0]["delta"].get("content"):
                break
        yield events


def _chat(server: EvenhandProcess, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **more}
    with server.client() as client:
        return client.post("/chat/completions", json=body)


def test_an_openai_client_gets_an_answer(evenhand_server: EvenhandProcess) -> None:
    with openai.OpenAI(base_url=evenhand_server.base_url, api_key=evenhand_server.key) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=32,
        )

    assert "Paris" in (answer.choices[0].message.content or "")


def test_the_first_start_shows_two_keys_and_the_second_is_quick_and_shows_none(serve: Serve) -> None:
    first = serve()
    first.wait_ready()
    assert list(first.keys) == ["alpha", "beta"]
    assert f"curl {first.base_url}/chat/completions" in first.stderr
    assert f"-H 'Authorization: Bearer {first.keys['alpha']}'" in first.stderr
    assert first.stop() == 0

    second = serve(first.home)
    assert second.wait_ready() < 15
    assert second.keys == first.keys
    for key in second.keys.values():
        assert key not in second.stderr
    assert "keys     evenhand key create --org ORG --team TEAM --name NAME" in second.stderr
    assert _chat(second).status_code == 200
    assert second.stop() == 0
    assert second.process.stdout is not None
    assert second.process.stdout.read() == b""


def test_a_start_that_comes_to_nothing_makes_no_keys_and_the_next_one_shows_them(
    serve: Serve, smollm2_path: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    with smollm2_path.open("rb") as whole:
        broken.write_bytes(whole.read(50 << 20))
    failed = serve(EVENHAND_ENGINE__MODEL=str(broken))
    assert failed.wait_exit(30) == 78

    interrupted = serve(failed.home)
    wait_until(lambda: (failed.home / "run").exists())
    assert interrupted.stop(signal.SIGINT) in (0, -signal.SIGINT)

    third = serve(failed.home)
    third.wait_ready()
    assert list(third.keys) == ["alpha", "beta"]
    assert _chat(third).status_code == 200
    assert third.stop() == 0
    assert "is closed" in third.stderr
    assert "is down" not in third.stderr.partition("is ready in")[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_running_answer_finish_and_leaves_nothing(serve: Serve, number: signal.Signals) -> None:
    server = serve()
    server.wait_ready()
    with _stream(server, 150) as events:
        if number is signal.SIGINT:
            os.killpg(server.process.pid, number)  # as the terminal does: to the children, too
        else:
            server.process.send_signal(number)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        rest = list(events)

    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert server.wait_exit() == 0
    server.wait_gone()
    assert list((server.home / "run").glob("serve-*")) == []


def test_a_second_signal_cuts_the_running_answer_short(serve: Serve) -> None:
    server = serve(EVENHAND_SERVER__DRAIN_S="1000")
    server.wait_ready()
    with _stream(server, 4000) as events:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.is_ready())
        server.process.send_signal(signal.SIGTERM)
        rest = list(events)

    assert "shutting down" in json.loads(rest[-1])["error"]["message"]
    assert server.wait_exit(15) == 0
    server.wait_gone()


def test_a_killed_supervisor_leaves_no_orphan(serve: Serve) -> None:
    server = serve()
    server.wait_ready()
    with _stream(server, 4000) as events:
        server.process.kill()
        rest = list(events)

    assert "error" in json.loads(rest[-1])
    assert server.wait_exit() == -signal.SIGKILL
    server.wait_gone(10)


def test_a_killed_engine_ends_streams_in_band_and_comes_back_behind_the_same_gateway(serve: Serve) -> None:
    server = serve()
    server.wait_ready()
    gateway, engine = server.child("gateway"), server.child("engine")
    with _stream(server, 4000) as events:
        engine.kill()
        rest = list(events)

    assert "error" in json.loads(next(event for event in reversed(rest) if event != "[DONE]"))
    refused = _chat(server)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert httpx.get(f"{server.url}/health").status_code == 200
    wait_until(server.is_ready)
    assert _chat(server).status_code == 200
    assert server.child("gateway") == gateway
    assert server.child("engine") != engine
    assert server.stop() == 0
    server.wait_gone()


def test_a_killed_gateway_comes_back_in_front_of_the_same_engine(serve: Serve) -> None:
    server = serve()
    server.wait_ready()
    gateway, engine = server.child("gateway"), server.child("engine")
    with _stream(server, 4000) as events:
        gateway.kill()
        with pytest.raises(httpx.TransportError):
            list(events)

    wait_until(server.is_ready)
    assert _chat(server).status_code == 200
    assert server.child("engine") == engine
    assert server.child("gateway") != gateway
    assert server.stop() == 0
    server.wait_gone()


def test_the_gateway_yields_to_the_engine(evenhand_server: EvenhandProcess) -> None:
    gateway, engine = evenhand_server.child("gateway"), evenhand_server.child("engine")

    assert gateway.nice() == engine.nice() + 5
    assert os.getsid(gateway.pid) == os.getsid(engine.pid) == os.getsid(evenhand_server.process.pid)


def test_a_second_server_on_the_same_home_is_refused_and_harms_nothing(
    evenhand_server: EvenhandProcess, serve: Serve
) -> None:
    other = serve(evenhand_server.home)

    assert other.wait_exit(60) == 78
    assert "another gateway runs with" in other.stderr
    assert _chat(evenhand_server).status_code == 200


def test_a_port_is_kept_from_the_first_moment_of_a_start(serve: Serve) -> None:
    first = serve()
    wait_until(lambda: (first.home / "run").exists())
    second = serve(EVENHAND_SERVER__PORT=str(first.port))

    assert second.wait_exit(15) == 1
    assert "is in use by another program" in second.stderr
    first.wait_ready()
    assert first.stop() == 0


@pytest.mark.parametrize("setting", ["EVENHAND_SERVER__PORT", "EVENHAND_SERVER__METRICS_PORT"])
def test_a_port_in_use_is_one_line_before_anything_starts(serve: Serve, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = serve(**{setting: str(port)})

        assert server.wait_exit(10) == 1
    assert server.stderr.startswith(f"evenhand: 127.0.0.1 port {port} is in use by another program; choose another")
    assert server.stderr.count("\n") == 1


def test_a_broken_model_file_is_named_and_ends_the_start(serve: Serve, smollm2_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with smollm2_path.open("rb") as whole:
        broken.write_bytes(whole.read(50 << 20))
    server = serve(EVENHAND_ENGINE__MODEL=str(broken))

    assert server.wait_exit(30) == 78
    assert str(broken) in server.stderr
    assert "Traceback" not in server.stderr


def test_an_unknown_model_is_refused_at_once(serve: Serve) -> None:
    server = serve(EVENHAND_ENGINE__MODEL="gpt-9")

    assert server.wait_exit(10) == 78
    assert server.stderr.startswith("evenhand: gpt-9: no such file or folder, nor a model of the catalogue")
