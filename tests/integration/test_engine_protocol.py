"""The engine's server at the bare protocol: real ZeroMQ sockets, every message, and everything that can go wrong."""

from __future__ import annotations

import msgspec
import pytest
from engine_kit import ENGINE_ID, FOREVER, EngineThread, RawClient, collect, raw_client, submit
from scripted_core import ScriptedCore

from engine.messages import (
    Abort,
    ChargeExternal,
    Hello,
    Outputs,
    Ping,
    RaiseCap,
    Refused,
    Rejected,
    SetWeight,
    Stats,
    StatsQuery,
    encode,
)

# --- every message ----------------------------------------------------------------------------------------------------


def test_hello_is_answered_with_the_card_however_often_it_comes(
    engine: EngineThread[ScriptedCore], endpoint: str
) -> None:
    with raw_client(endpoint) as client:
        first, second = client.hello(), client.hello()
    assert first == second
    assert first.model == "scripted"
    assert len(first.incarnation) == 16


def test_a_request_streams_to_its_finish_with_cumulative_counts(client: RawClient) -> None:
    client.send(submit("r", output_cap=3))
    outputs = client.until_finish("r")
    assert [output.token_ids for output in outputs] == [(0,), (1,), (2,)]
    assert [output.num_delivered_tokens for output in outputs] == [1, 2, 3]
    assert [output.finish for output in outputs] == [None, None, "length"]
    assert outputs[-1].timings is not None


def test_every_choice_of_a_request_has_its_own_outputs(client: RawClient) -> None:
    client.send(submit("r", output_cap=2, num_choices=2))
    outputs = client.until_finish("r", num_choices=2)
    assert [(o.choice, *o.token_ids) for o in outputs] == [(0, 0), (1, 1000), (0, 1), (1, 1001)]


def test_one_step_sends_one_message_for_all_requests_of_a_client(client: RawClient) -> None:
    for name in ("a", "b"):
        client.send(submit(name, output_cap=FOREVER))
    while len(client.expect(Outputs).outputs) == 1:
        pass
    assert [output.request_id for output in client.expect(Outputs).outputs] == ["a", "b"]


def test_abort_is_answered_by_the_final_output(engine: EngineThread[ScriptedCore], client: RawClient) -> None:
    client.send(submit("r", output_cap=FOREVER))
    client.expect(Outputs)
    client.send(Abort(ENGINE_ID, "r"))
    assert client.until_finish("r")[-1].finish == "abort"
    assert engine.core.aborted == ["r"]


def test_abort_of_a_request_that_has_not_begun(client: RawClient) -> None:
    client.send(submit("r", salt="wait"))
    client.send(Abort(ENGINE_ID, "r"))
    (output,) = client.until_finish("r")
    assert (output.finish, output.num_delivered_tokens) == ("abort", 0)


def test_abort_of_a_request_that_has_ended_or_never_was_is_ignored(
    engine: EngineThread[ScriptedCore], client: RawClient
) -> None:
    client.send(submit("r"))
    client.until_finish("r")
    client.send(Abort(ENGINE_ID, "r"))
    client.send(Abort(ENGINE_ID, "unheard of"))
    client.ping()
    assert engine.core.aborted == []


def test_raise_cap_lets_a_held_request_go_on_and_the_old_cap_ends_it(client: RawClient) -> None:
    client.send(submit("r", output_cap=1, hold_at_cap=True))
    (held,) = client.expect(Outputs).outputs
    assert (held.held_at_cap, held.finish) == (True, None)
    client.send(RaiseCap(ENGINE_ID, "r", 2))
    (held_again,) = client.expect(Outputs).outputs
    assert (held_again.held_at_cap, held_again.token_ids) == (True, (1,))
    client.send(RaiseCap(ENGINE_ID, "r", 2))
    (last,) = client.expect(Outputs).outputs
    assert (last.finish, last.num_delivered_tokens) == ("length", 2)


def test_set_weight_and_charge_external_reach_the_core(engine: EngineThread[ScriptedCore], client: RawClient) -> None:
    client.send(SetWeight(ENGINE_ID, "team", 7))
    client.send(ChargeExternal(ENGINE_ID, "team", 1234))
    client.ping()
    assert engine.core.weights == [("team", 7)]
    assert engine.core.charges == [("team", 1234)]


def test_stats_come_with_the_query_id_and_the_engine_id(client: RawClient) -> None:
    client.send(submit("r", salt="wait"))
    client.send(StatsQuery(ENGINE_ID, 42))
    stats = client.expect(Stats)
    assert (stats.engine_id, stats.query_id, stats.num_running) == (ENGINE_ID, 42, 1)


def test_collect_finals_is_empty_while_nobody_vanished(client: RawClient) -> None:
    client.send(submit("r"))
    client.until_finish("r")
    assert collect(client) == {}


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_another_protocol_version_is_refused(engine: EngineThread[ScriptedCore], endpoint: str) -> None:
    with raw_client(endpoint) as client:
        client.send(Hello(ENGINE_ID, "old", version=99))
        assert "version 1, not 99" in client.expect(Refused).reason


def test_a_client_that_wants_another_engine_is_refused(engine: EngineThread[ScriptedCore], endpoint: str) -> None:
    with raw_client(endpoint) as client:
        client.send(Hello("engine-9", "lost"))
        assert "this is engine 'engine-0', not 'engine-9'" in client.expect(Refused).reason


def test_a_request_before_hello_is_refused(engine: EngineThread[ScriptedCore], endpoint: str) -> None:
    with raw_client(endpoint) as client:
        client.send(submit("r"))
        assert "say hello first" in client.expect(Refused).reason
    assert engine.core.submitted == {}


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"GET / HTTP/1.1"],
        [b"\x93\x01\x02"],
        [b"several", b"parts"],
        [encode(Ping(ENGINE_ID))[:-1]],
        [b"\x91" * 10**5],
    ],
    ids=["empty", "text", "array", "parts", "cut off", "nested"],
)
def test_garbage_is_refused_and_the_engine_lives_on(client: RawClient, parts: list[bytes]) -> None:
    client.socket.send_multipart(parts)
    assert "undecodable" in client.expect(Refused).reason
    client.send(submit("r"))
    assert client.until_finish("r")[-1].finish == "length"


def test_a_malformed_submit_is_one_rejected_request_not_a_refused_client(client: RawClient) -> None:
    fields = msgspec.msgpack.decode(encode(submit("r")))
    client.socket.send(msgspec.msgpack.encode({**fields, "output_cap": "many"}))
    rejected = client.expect(Rejected)
    assert (rejected.request_id, rejected.code) == ("r", "invalid_request")
    assert "output_cap" in rejected.message


def test_what_the_core_rejects_comes_back_with_code_and_text(client: RawClient) -> None:
    client.send(submit("r", salt="reject"))
    assert client.expect(Rejected) == Rejected(ENGINE_ID, "r", "over_capacity", "the prompt is longer than the KV pool")


def test_a_request_id_in_flight_is_rejected_for_every_client(client: RawClient, endpoint: str) -> None:
    client.send(submit("r", salt="wait"))
    client.ping()
    with raw_client(endpoint) as other:
        other.hello("other")
        other.send(submit("r"))
        assert other.expect(Rejected).code == "duplicate_request"
    client.send(Abort(ENGINE_ID, "r"))
    client.until_finish("r")
    client.send(submit("r"))
    assert client.until_finish("r")[-1].finish == "length"


def test_another_clients_abort_and_raise_cap_are_ignored(
    engine: EngineThread[ScriptedCore], client: RawClient, endpoint: str
) -> None:
    client.send(submit("r", output_cap=1, hold_at_cap=True))
    client.expect(Outputs)
    with raw_client(endpoint) as other:
        other.hello("other")
        other.send(Abort(ENGINE_ID, "r"))
        other.send(RaiseCap(ENGINE_ID, "r", 1))
        other.ping()
    assert engine.core.aborted == []
    client.send(RaiseCap(ENGINE_ID, "r", 1))
    assert client.until_finish("r")[-1].finish == "length"
