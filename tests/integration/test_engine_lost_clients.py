"""The engine when its clients vanish, fall silent or do not read: nothing runs on for nobody, and no end is lost."""

from __future__ import annotations

import time

from engine_kit import ENGINE_ID, FOREVER, EngineThread, RawClient, card, collect, raw_client, submit, until
from scripted_core import ScriptedCore

from engine.carriers.zeromq_server import ZeroMQServer
from engine.messages import (
    Abort,
    CollectFinals,
    Finals,
    Outputs,
    Ping,
    Refused,
    SetWeight,
    Stats,
    StatsQuery,
    Timings,
    encode,
)


def test_a_vanished_client_of_a_streaming_request_is_noticed_at_once(
    engine: EngineThread[ScriptedCore], endpoint: str
) -> None:
    with raw_client(endpoint) as gateway:
        gateway.hello("gateway")
        gateway.send(submit("r", output_cap=FOREVER))
        gateway.expect(Outputs)
    until(lambda: engine.core.aborted == ["r"], "the request is aborted")


def test_a_vanished_client_that_only_waits_is_noticed_long_before_the_timeout(endpoint: str) -> None:
    core = ScriptedCore()
    with EngineThread(core, ZeroMQServer(endpoint), card(), client_timeout_s=5.0):
        with raw_client(endpoint) as gateway:
            gateway.hello("gateway")
            gateway.send(submit("r", salt="wait"))
            gateway.ping()
        gone_at = time.monotonic()
        until(lambda: core.aborted == ["r"], "the request is aborted")
        assert time.monotonic() - gone_at < 4.0


def test_a_vanished_clients_waiting_requests_are_aborted_and_its_finals_kept_until_acknowledged(
    engine: EngineThread[ScriptedCore], endpoint: str
) -> None:
    with raw_client(endpoint) as gateway:
        gateway.hello("gateway")
        gateway.send(submit("running", output_cap=FOREVER))
        gateway.send(submit("waiting", salt="wait"))
        gateway.expect(Outputs)
    until(lambda: set(engine.core.aborted) == {"running", "waiting"}, "both are aborted")
    with raw_client(endpoint) as gateway:
        gateway.hello("gateway")
        finals = collect(gateway)
        assert set(finals) == {"running", "waiting"}
        assert finals["running"].num_output_tokens > 0
        assert finals["running"].num_computed_tokens == 3 + finals["running"].num_output_tokens
        assert (finals["waiting"].finish, finals["waiting"].num_output_tokens) == ("abort", 0)
        assert set(collect(gateway, "running", "unheard of")) == {"waiting"}
        assert set(collect(gateway, "waiting")) == set()


def test_finals_belong_to_the_client_that_vanished(engine: EngineThread[ScriptedCore], endpoint: str) -> None:
    with raw_client(endpoint) as gateway:
        gateway.hello("gateway")
        gateway.send(submit("r", output_cap=FOREVER))
        gateway.expect(Outputs)
    until(lambda: engine.core.aborted == ["r"], "the request is aborted")
    with raw_client(endpoint) as other:
        other.hello("other")
        assert collect(other, "r") == {}
    with raw_client(endpoint) as gateway:
        gateway.hello("gateway")
        assert set(collect(gateway)) == {"r"}


def test_another_client_may_settle_for_one_that_vanished_once_that_is_known_to_be_gone(endpoint: str) -> None:
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), card()) as engine, raw_client(endpoint) as heir:
        heir.hello("heir")
        assert finals_of(heir, "gateway").is_complete  # never heard of
        with raw_client(endpoint) as gateway:
            gateway.hello("gateway")
            gateway.send(submit("r", output_cap=FOREVER, num_choices=2))
            gateway.send(submit("waiting", salt="wait"))
            gateway.expect(Outputs)
            until(lambda: "waiting" in engine.core.submitted, "the engine has them all")
            assert not finals_of(heir, "gateway").is_complete  # connected
        until(lambda: finals_of(heir, "gateway").is_complete, "the engine has noticed and ended everything")
        finals = {final.request_id: final for final in finals_of(heir, "gateway").finals}
        assert set(finals) == {"r", "waiting"}
        r = finals["r"]
        assert r.timings == Timings(queue_us=1, prefill_us=2, decode_us=3, engine_us=r.num_output_tokens)
        assert collect(heir, "r") == {}  # acknowledged for oneself only
        assert [final.request_id for final in finals_of(heir, "gateway", "r").finals] == ["waiting"]
        assert finals_of(heir, "gateway", "waiting").finals == ()


def finals_of(client: RawClient, client_id: str, *acknowledge: str) -> Finals:
    client.send(CollectFinals(ENGINE_ID, acknowledge, client_id))
    while not isinstance(message := client.receive(), Finals):
        pass
    return message


def test_a_silent_client_is_given_up_after_the_timeout_and_refused_when_it_speaks_again(endpoint: str) -> None:
    core = ScriptedCore()
    with EngineThread(core, ZeroMQServer(endpoint), card(), client_timeout_s=0.2), raw_client(endpoint) as client:
        client.hello()
        client.send(submit("r", salt="wait"))
        until(lambda: core.aborted == ["r"], "the request is aborted")
        client.send(Ping(ENGINE_ID))
        assert "say hello first" in client.expect(Refused).reason
        client.hello()
        assert set(collect(client)) == {"r"}


def test_any_message_is_a_sign_of_life(endpoint: str) -> None:
    core = ScriptedCore()
    with EngineThread(core, ZeroMQServer(endpoint), card(), client_timeout_s=0.5), raw_client(endpoint) as client:
        client.hello()
        client.send(submit("r", salt="wait"))
        end_s = time.monotonic() + 3 * 0.5
        while time.monotonic() < end_s:
            client.send(SetWeight(ENGINE_ID, "team", 2))
            client.send(StatsQuery(ENGINE_ID, 1))
            client.expect(Stats)
        assert core.aborted == []


def test_a_client_that_connects_again_loses_what_its_old_connection_had(
    engine: EngineThread[ScriptedCore], endpoint: str
) -> None:
    with raw_client(endpoint) as old, raw_client(endpoint) as new:
        old.hello("gateway")
        old.send(submit("r", salt="wait"))
        old.ping()
        new.hello("gateway")
        until(lambda: engine.core.aborted == ["r"], "the request is aborted")
        assert set(collect(new)) == {"r"}
        old.send(Ping(ENGINE_ID))
        assert "say hello first" in old.expect(Refused).reason


def test_a_finish_that_was_sent_but_never_read_is_kept(engine: EngineThread[ScriptedCore], endpoint: str) -> None:
    with raw_client(endpoint) as gateway:
        gateway.hello("gateway")
        gateway.send(submit("read", output_cap=1))
        gateway.until_finish("read")
        gateway.ping()
        gateway.send(submit("unread", output_cap=1))
        until(lambda: "unread" in engine.core.submitted and not engine.core.has_work, "it has ended")
    with raw_client(endpoint) as gateway:
        gateway.hello("gateway")
        finals = collect(gateway)
    assert {name: final.finish for name, final in finals.items()} == {"unread": "length"}


def test_only_so_many_finals_are_kept_and_the_oldest_go_first(endpoint: str) -> None:
    core = ScriptedCore()
    with EngineThread(core, ZeroMQServer(endpoint), card(), max_finals=2):
        with raw_client(endpoint) as gateway:
            gateway.hello("gateway")
            for name in ("first", "second", "third"):
                gateway.send(submit(name, salt="wait"))
            gateway.ping()
        with raw_client(endpoint) as gateway:
            gateway.hello("gateway")
            until(lambda: len(core.aborted) == 3 and not core.has_work, "all are aborted")
            assert set(collect(gateway)) == {"second", "third"}


def test_a_client_that_does_not_read_loses_the_requests_concerned_and_is_told_when_it_reads(endpoint: str) -> None:
    core = ScriptedCore(step_s=0.0)
    carrier = ZeroMQServer(endpoint, max_backlog=10)
    with (
        EngineThread(core, carrier, card()),
        raw_client(endpoint, receive_bound=10) as slow,
        raw_client(endpoint) as other,
    ):
        slow.hello("slow")
        other.hello("other")
        slow.send(submit("queued", salt="wait"))
        slow.send(submit("flood", output_cap=FOREVER, num_choices=40))
        until(lambda: core.aborted == ["flood"], "the flood is aborted")
        # Others, and the slow client's own request that had nothing to say, are as before.
        other.send(submit("r"))
        assert other.until_finish("r")[-1].finish == "length"
        ends = [output for output in slow.until_finish("flood", num_choices=40) if output.finish is not None]
        assert {output.finish for output in ends} == {"error"}
        assert {output.choice for output in ends} == set(range(40))
        assert "not read in time" in (ends[0].error or "")
        assert core.aborted == ["flood"]
        finals = collect(slow)
        assert set(finals) == {"flood"}
        assert finals["flood"].num_output_tokens == sum(output.num_delivered_tokens for output in ends)
        slow.send(Abort(ENGINE_ID, "queued"))
        assert slow.until_finish("queued")[-1].finish == "abort"


def test_a_client_that_is_owed_too_much_is_given_up(endpoint: str) -> None:
    core = ScriptedCore(step_s=0.0)
    carrier = ZeroMQServer(endpoint, max_backlog=10)
    with EngineThread(core, carrier, card(), max_owed=5), raw_client(endpoint, receive_bound=10) as slow:
        slow.hello("slow")
        slow.send(submit("queued", salt="wait"))
        rejected = encode(submit("r" * 10_000, salt="reject"))
        until(lambda: slow.socket.send(rejected) is None and core.aborted == ["queued"], "the client is given up")
