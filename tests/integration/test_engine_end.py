"""How the engine ends: told to, left alone by its supervisor, or because its core failed. Its clients hear of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from engine_kit import EngineProcess, EngineThread, RawClient, card, raw_client, submit, until
from scripted_core import ScriptedCore

from engine.carriers.zeromq_server import ZeroMQServer
from engine.messages import Outputs

FOREVER = 1 << 40


def test_integrity_is_checked_when_the_engine_becomes_idle(
    engine: EngineThread[ScriptedCore], client: RawClient
) -> None:
    until(lambda: engine.core.num_checks == 1, "checked at the start")
    client.send(submit("r"))
    client.until_finish("r")
    until(lambda: engine.core.num_checks == 2, "checked once after the work")
    client.ping()
    assert engine.core.num_checks == 2


def test_stop_ends_every_request_in_band(engine: EngineThread[ScriptedCore], client: RawClient) -> None:
    client.send(submit("waiting", salt="wait", num_choices=2))
    client.ping()
    client.send(submit("running", output_cap=FOREVER))
    client.expect(Outputs)
    engine.server.stop()
    ends = client.ends(3)
    engine.join()
    assert sorted((end.request_id, end.choice) for end in ends) == [("running", 0), ("waiting", 0), ("waiting", 1)]
    assert {(end.finish, end.error) for end in ends} == {("error", "the engine is shutting down")}
    assert engine.ended is True


def test_a_choice_that_has_ended_is_not_ended_again(engine: EngineThread[ScriptedCore], client: RawClient) -> None:
    client.send(submit("r", salt="uneven", output_cap=FOREVER, num_choices=3))
    (first,) = client.ends(1)
    engine.server.stop()
    others = client.ends(2)
    engine.join()
    assert (first.choice, first.finish) == (0, "stop")
    assert [(end.choice, end.finish) for end in others] == [(1, "error"), (2, "error")]


def test_an_idle_engine_stops_at_once(endpoint: str) -> None:
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), card()) as engine:
        until(lambda: engine.core.num_checks == 1, "it is idle")
        engine.server.stop()
        engine.join()
    assert engine.ended is True


def test_a_failing_core_ends_the_requests_of_every_client_in_band(
    engine: EngineThread[ScriptedCore], client: RawClient, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_client(endpoint) as other:
        other.hello("other")
        other.send(submit("theirs", salt="wait"))
        other.ping()
        client.send(submit("crash", salt="crash"))
        for who, request_id in ((client, "crash"), (other, "theirs")):
            end = who.until_finish(request_id)[-1]
            assert end.finish == "error"
            assert "the engine failed" in (end.error or "")
    engine.join()
    assert engine.ended is False
    assert "scripted crash" in caplog.text


def test_a_broken_invariant_ends_the_engine(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedCore):
        def check_integrity(self) -> None:
            raise AssertionError("a block is missing")

    with EngineThread(Broken(), ZeroMQServer(endpoint), card()) as engine:
        engine.join()
    assert engine.ended is False
    assert "a block is missing" in caplog.text


def test_a_failed_process_exits_with_70_after_its_clients_were_told(endpoint: str) -> None:
    with EngineProcess(endpoint) as engine, raw_client(endpoint) as client:
        client.hello()
        client.send(submit("r", salt="crash"))
        assert client.until_finish("r")[-1].finish == "error"
        assert engine.wait() == 70
    assert "RuntimeError: scripted crash" in engine.stderr


def test_sigterm_ends_requests_in_band_and_the_process_with_0(endpoint: str, folder: Path) -> None:
    with EngineProcess(endpoint) as engine, raw_client(endpoint) as client:
        client.hello()
        client.send(submit("r", output_cap=FOREVER))
        client.expect(Outputs)
        engine.process.send_signal(signal.SIGTERM)
        assert client.until_finish("r")[-1].error == "the engine is shutting down"
        assert engine.wait() == 0
    assert list(folder.iterdir()) == []


def test_a_process_leaves_when_its_supervisors_pipe_closes(endpoint: str) -> None:
    with EngineProcess(endpoint, supervised=True) as engine, raw_client(endpoint) as client:
        client.hello()
        client.send(submit("r", salt="wait"))
        client.ping()
        engine.lose_supervisor()
        assert client.until_finish("r")[-1].error == "the engine is shutting down"
        assert engine.wait() == 0
