"""The protocol's messages: what is on the wire stays what it was."""

from __future__ import annotations

import typing

import msgspec
import pytest

from engine.errors import ProtocolError
from engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    ChargeExternal,
    CollectFinals,
    FinalCounts,
    Finals,
    FromEngine,
    Hello,
    Output,
    Outputs,
    PathNode,
    Ping,
    Pong,
    RaiseCap,
    Ready,
    Refused,
    Rejected,
    SetWeight,
    StandingQuery,
    StandingReply,
    Stats,
    StatsQuery,
    Submit,
    Timings,
    ToEngine,
    TokenLogprobs,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from engine.sampling_params import SamplingParams
from engine.standing import Standing

TO_ENGINE: list[ToEngine] = [
    Hello("e", "gateway-1"),
    Submit(
        engine_id="e",
        request_id="r",
        token_ids=[1, 2, 3],
        sampling=SamplingParams(temperature=0.5, logit_bias={7: -1.5}, seed=-3, num_logprobs=2, stop_token_ids=(4, 5)),
        path=(PathNode("org", 2), PathNode("team")),
        output_cap=9,
        request_class="batch",
        cache_salt="team",
        num_choices=2,
        hold_at_cap=True,
        deadline_ms=1500,
    ),
    Abort("e", "r"),
    RaiseCap("e", "r", 20),
    SetWeight("e", "team", 4),
    ChargeExternal("e", "team", 123_456),
    StatsQuery("e", 7),
    StandingQuery("e", 8, "r", ("r-0", "r-1")),
    CollectFinals("e", ("r", "s"), "gateway-0"),
    Ping("e", 12),
]

FROM_ENGINE: list[FromEngine] = [
    Ready(
        engine_id="e",
        model="m",
        max_model_len=2048,
        vocab_size=49152,
        eos_token_ids=(2,),
        kv_capacity_tokens=4096,
        max_sequences=8,
        incarnation="a1",
    ),
    Outputs(
        "e",
        (
            Output(request_id="r", token_ids=(5, 6), logprobs=(TokenLogprobs(-0.5, ((5, -0.5),)), TokenLogprobs(-1.0))),
            Output(request_id="r", choice=1, held_at_cap=True, num_delivered_tokens=3),
            Output(request_id="s", finish="stop", stop_token_id=2, timings=Timings(queue_us=1, decode_us=2)),
            Output(request_id="t", finish="error", error="why"),
        ),
    ),
    Rejected("e", "r", "over_capacity", "too long"),
    Stats(engine_id="e", query_id=7, num_running=3, busy_us=9),
    StandingReply(
        "e",
        8,
        Standing(team_id="team", request_class="batch", phase="queue", resource="slot", ahead={"batch": 2}, queue_us=5),
    ),
    Finals(
        "e",
        (
            FinalCounts(
                request_id="r",
                num_prompt_tokens=1,
                num_cached_tokens=2,
                num_computed_tokens=3,
                num_output_tokens=4,
                finish="abort",
                timings=Timings(queue_us=5, engine_us=6),
            ),
        ),
        is_complete=True,
    ),
    Pong("e"),
    Refused("e", "other version"),
]

# Required fields by tag. A tag that goes, or a field that is added here, breaks a peer that is already deployed.
REQUIRED = {
    "hello": {"engine_id", "client_id"},
    "submit": {"engine_id", "request_id", "token_ids", "sampling", "path", "output_cap"},
    "abort": {"engine_id", "request_id"},
    "raise_cap": {"engine_id", "request_id", "output_cap"},
    "set_weight": {"engine_id", "node_id", "weight"},
    "charge_external": {"engine_id", "node_id", "cost_us"},
    "stats": {"engine_id", "query_id"},
    "standing": {"engine_id", "query_id", "request_id"},
    "collect_finals": {"engine_id"},
    "ping": {"engine_id"},
    "ready": {
        "engine_id",
        "model",
        "max_model_len",
        "vocab_size",
        "eos_token_ids",
        "kv_capacity_tokens",
        "max_sequences",
    },
    "outputs": {"engine_id", "outputs"},
    "rejected": {"engine_id", "request_id", "code", "message"},
    "stats_reply": {"engine_id"},
    "standing_reply": {"engine_id", "query_id", "standing"},
    "finals": {"engine_id", "finals"},
    "pong": {"engine_id"},
    "refused": {"engine_id", "reason"},
}


def tag(message: object) -> str:
    return str(msgspec.inspect.type_info(type(message)).tag)  # type: ignore[union-attr]


@pytest.mark.parametrize("message", TO_ENGINE, ids=tag)
def test_a_message_to_the_engine_survives_the_wire(message: ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=tag)
def test_a_message_from_the_engine_survives_the_wire(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


def test_every_message_of_the_protocol_is_tried_above() -> None:
    assert {type(message) for message in TO_ENGINE} == set(typing.get_args(ToEngine))
    assert {type(message) for message in FROM_ENGINE} == set(typing.get_args(FromEngine))


def test_tags_and_required_fields_are_those_of_version_1() -> None:
    required = {
        tag(message): {field.name for field in msgspec.structs.fields(message) if field.required}
        for message in (*TO_ENGINE, *FROM_ENGINE)
    }
    assert PROTOCOL_VERSION == 1
    assert required == REQUIRED


@pytest.mark.parametrize("message", [*TO_ENGINE, *FROM_ENGINE], ids=tag)
def test_the_engine_id_stands_in_every_message(message: ToEngine | FromEngine) -> None:
    assert message.engine_id == "e"


def test_a_field_of_a_later_version_is_ignored() -> None:
    frame = msgspec.msgpack.encode({"type": "abort", "engine_id": "e", "request_id": "r", "grace_ms": 5})
    assert decode_to_engine(frame) == Abort("e", "r")


def test_a_field_that_an_earlier_version_did_not_send_takes_its_default() -> None:
    assert decode_to_engine(msgspec.msgpack.encode({"type": "ping", "engine_id": "e"})) == Ping("e", 0)
    earlier = {"type": "finals", "engine_id": "e", "finals": ()}
    assert decode_from_engine(msgspec.msgpack.encode(earlier)) == Finals("e", (), is_complete=False)


GARBAGE = {
    "empty": b"",
    "text": b"GET / HTTP/1.1",
    "cut off": encode(TO_ENGINE[1])[:-5],
    "trailing bytes": encode(Ping("e")) + b"\x00",
    "no tag": msgspec.msgpack.encode({"engine_id": "e"}),
    "unknown tag": msgspec.msgpack.encode({"type": "reboot", "engine_id": "e"}),
    "missing field": msgspec.msgpack.encode({"type": "abort", "engine_id": "e"}),
    "invalid UTF-8": encode(Abort("e", "rr")).replace(b"rr", b"\xff\xfe"),
    "nested without end": b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 100_000,
    "wrong type": msgspec.msgpack.encode({"type": "abort", "engine_id": "e", "request_id": 5}),
}


@pytest.mark.parametrize("frame", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_a_protocol_error_on_both_sides(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="to the engine"):
        decode_to_engine(frame)
    with pytest.raises(ProtocolError, match="from the engine"):
        decode_from_engine(frame)


def test_messages_of_one_direction_are_garbage_in_the_other() -> None:
    with pytest.raises(ProtocolError):
        decode_to_engine(encode(Pong("e")))
    with pytest.raises(ProtocolError):
        decode_from_engine(encode(Ping("e")))


@pytest.mark.parametrize("value", ["urgent", "", None])
def test_a_class_that_does_not_exist_is_refused(value: str | None) -> None:
    fields = msgspec.msgpack.decode(encode(TO_ENGINE[1]))
    fields["request_class"] = value
    with pytest.raises(ProtocolError, match="request_class"):
        decode_to_engine(msgspec.msgpack.encode(fields))
