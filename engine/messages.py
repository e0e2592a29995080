"""The protocol between gateway and engine: versioned msgspec structs, sent as msgpack over ZeroMQ.

Frozen early: fields are only ever added, with a default. Knows nothing of sockets (`server.py`, `client.py`).
All times in messages are durations, since the two clocks differ. `engine_id` stands in every message, so that one
gateway can speak to a pool of engines.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import ProtocolError
from engine.sampling_params import SamplingParams
from engine.standing import Standing, TeamShare

PROTOCOL_VERSION = 1

RequestClass = Literal["interactive", "standard", "batch"]
FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


class PathNode(msgspec.Struct, frozen=True, array_like=True):
    """One node on a request's way down the fairness tree: (id, weight)."""

    id: str
    weight: int = 1


# --- gateway → engine -------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a client, and again after a reconnect. The engine answers with `Ready`."""

    engine_id: str
    client_id: str
    version: int = PROTOCOL_VERSION


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    """Run a request.

    Attributes:
        request_id: unique for this engine; chosen by the gateway.
        token_ids: the prompt, at least one token.
        num_choices: how many independent answers (the API's n); each is an `Output` with its own `choice`.
        path: from the organization down to the session; each node with its integer weight.
        request_class: the latency class; splits its own team's share.
        cache_salt: prefix cache entries are shared only within one salt (one per team).
        output_cap: most tokens to generate for each choice.
        hold_at_cap: at its cap a choice waits for `RaiseCap` instead of finishing with ``length``.
        deadline_ms: from arrival; when it passes the request ends with ``deadline``.
    """

    engine_id: str
    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    path: tuple[PathNode, ...]
    output_cap: int
    request_class: RequestClass = "interactive"
    cache_salt: str = ""
    num_choices: int = 1
    hold_at_cap: bool = False
    deadline_ms: int | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request in whatever state it is; answered by its final `Output` (finish ``abort``)."""

    engine_id: str
    request_id: str


class RaiseCap(msgspec.Struct, frozen=True, tag="raise_cap"):
    """The new cap of a request submitted with `hold_at_cap`; the old cap again means: finish with ``length``."""

    engine_id: str
    request_id: str
    output_cap: int


class SetWeight(msgspec.Struct, frozen=True, tag="set_weight"):
    """Change a node's weight from the next step on."""

    engine_id: str
    node_id: str
    weight: int


class ChargeExternal(msgspec.Struct, frozen=True, tag="charge_external"):
    """Work done for a node by another engine, in microseconds of engine time."""

    engine_id: str
    node_id: str
    cost_us: int


class StatsQuery(msgspec.Struct, frozen=True, tag="stats"):
    """Answered by `Stats` with the same query_id."""

    engine_id: str
    query_id: int


class CollectFinals(msgspec.Struct, frozen=True, tag="collect_finals"):
    """Ask for the final counts of requests whose gateway vanished; the engine forgets what `acknowledge` names.

    Attributes:
        client_id: whose; empty is the asking client's own. Who settles for a gateway that died asks for that one's.
    """

    engine_id: str
    acknowledge: tuple[str, ...] = ()
    client_id: str = ""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """A sign of life; a client silent for the engine's client time-out is taken for dead.

    Attributes:
        num_received: messages of the engine that the client has taken from this connection so far. Should the client
            vanish, the final counts in what came after them are kept for it.
    """

    engine_id: str
    num_received: int = 0


class StandingQuery(msgspec.Struct, frozen=True, tag="standing"):
    """Where does a request stand? Answered by `StandingReply` with the same query_id.

    Attributes:
        other_ids: further ids that it, or a part of it, may be known by; told is of what is furthest behind.
    """

    engine_id: str
    query_id: int
    request_id: str
    other_ids: tuple[str, ...] = ()


ToEngine = (
    Hello | Submit | Abort | RaiseCap | SetWeight | ChargeExternal | StatsQuery | StandingQuery | CollectFinals | Ping
)

# --- engine → gateway -------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """What this engine serves.

    Attributes:
        max_model_len: the window: most tokens of prompt plus output.
        kv_capacity_tokens: tokens that the whole KV pool holds; a request larger than this can never run.
        incarnation: differs from one run of the engine process to the next; what was submitted to another one is lost.
    """

    engine_id: str
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_capacity_tokens: int
    max_sequences: int
    version: int = PROTOCOL_VERSION
    incarnation: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one output position: the sampled token's, and the most likely tokens in falling order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went, in microseconds; all but `engine_us` sum to the time from arrival to finish.

    Attributes:
        engine_us: its share of the time of the steps it took part in, by tokens.
        parked_us: without a slot, its KV still in place; one of the parts.
    """

    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    preempted_us: int = 0
    engine_us: int = 0
    parked_us: int = 0

    @property
    def passed_us(self) -> int:
        """From arrival to finish."""
        return self.queue_us + self.prefill_us + self.decode_us + self.preempted_us + self.parked_us


class Output(msgspec.Struct, frozen=True, tag="output", kw_only=True):
    """News of one choice of one request.

    Attributes:
        token_ids: tokens sampled since the last output, in order (empty on an abort, or when held at the cap).
        logprobs: one entry for each of `token_ids` if they were asked for, else None.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        num_computed_tokens: tokens for which KV was computed (high-water mark; recomputation not counted).
        num_delivered_tokens: output tokens sent so far, these included.
        held_at_cap: the choice waits for `RaiseCap`.
        finish: why it ended; None while it goes on. Nothing follows an output with a finish.
        stop_token_id: the end-of-sequence or stop token that ended it (also the last of `token_ids`).
        error: a sentence for people, with finish ``error``.
        timings: only with a finish.
    """

    request_id: str
    choice: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_delivered_tokens: int = 0
    held_at_cap: bool = False
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    timings: Timings | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All of one step's news for one client."""

    engine_id: str
    outputs: tuple[Output, ...]


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """A request that can never run, or that cannot be taken now; it has left nothing behind."""

    engine_id: str
    request_id: str
    code: str
    message: str


class Stats(msgspec.Struct, frozen=True, tag="stats_reply", kw_only=True):
    """A snapshot of the engine; counters are totals since it started.

    Attributes:
        busy_us: time of all steps.
        unshared_us: the part of it that was spent on requests which had ended, and that is in nobody's `engine_us`.
        teams: what each has, by policies that know of teams.
    """

    engine_id: str
    query_id: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    busy_us: int = 0
    unshared_us: int = 0
    num_parkings: int = 0
    teams: tuple[TeamShare, ...] = ()


class StandingReply(msgspec.Struct, frozen=True, tag="standing_reply"):
    engine_id: str
    query_id: int
    standing: Standing


class FinalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a request had used when its gateway vanished, kept until collected.

    Attributes:
        timings: of the choice that took longest, but for `engine_us`, which is the sum over all of them.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    finish: FinishReason
    timings: Timings = Timings()


class Finals(msgspec.Struct, frozen=True, tag="finals"):
    """The oldest final counts kept for a client.

    Attributes:
        is_complete: the client is not connected and none of its requests runs here, and nothing else is kept for it: a
            request that is not among these never will be. False may also come from an engine that cannot tell.
    """

    engine_id: str
    finals: tuple[FinalCounts, ...]
    is_complete: bool = False


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    engine_id: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine does not talk to this client: other protocol version, wrong engine_id, undecodable message."""

    engine_id: str
    reason: str


FromEngine = Ready | Outputs | Rejected | Stats | StandingReply | Finals | Pong | Refused

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes | memoryview) -> ToEngine:
    """Raises `ProtocolError` on anything that is not one of our messages."""
    try:
        return _to_engine.decode(frame)
    except (msgspec.DecodeError, RecursionError) as e:
        raise ProtocolError(f"undecodable message to the engine: {e}") from e


def decode_from_engine(frame: bytes | memoryview) -> FromEngine:
    """Raises `ProtocolError` on anything that is not one of our messages."""
    try:
        return _from_engine.decode(frame)
    except (msgspec.DecodeError, RecursionError) as e:
        raise ProtocolError(f"undecodable message from the engine: {e}") from e
