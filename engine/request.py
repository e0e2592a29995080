"""One choice of one request: its tokens, how far its KV has come, what it holds, where its time went.

A plain record with an owner for each part: `core.py` appends tokens and ends it, `sched/scheduler.py` moves its
counters and gives it row and blocks. Pure Python.

There is no prefill phase and no decode phase: a request knows some tokens, the KV of a part of them is computed, and
every step closes some of the gap. A gap of one token is what others call decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from engine.kv.kv_cache import BlockTable
from engine.kv.prefix_cache import CachedBlock
from engine.messages import FinishReason, Output, PathNode, RequestClass, Timings, TokenLogprobs
from engine.sampling_params import SamplingParams


class RequestState(IntEnum):
    """Ordered, so that everything below AT_CAP is on its way and FINISHED is the last."""

    HELD = 0
    """Waits until choice 0's prompt is computed, to find it in the prefix cache."""
    WAITING = 1
    """Wants to run; holds nothing."""
    RUNNING = 2
    """Resident: holds a row and blocks."""
    PARKED = 3
    """Gave up its row and kept its blocks: a row is all it needs to go on where it was."""
    AT_CAP = 4
    """Paused until its cap is raised; resident or parked, unless others needed its blocks."""
    FINISHED = 5
    """Over; holds its row and blocks only until the steps in flight that name it are applied."""


class Phase(IntEnum):
    """What a request's time is booked under."""

    QUEUE = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3
    PARKED = 4


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One choice. Compared by identity.

    Attributes:
        arrival: its place in the order of arrival; unique over all choices of all requests.
        token_ids: prompt and accepted output.
        output_cap: most output tokens for now; at it the choice pauses (`hold_at_cap`) or ends.
        output_limit: most output tokens that window and KV pool can hold; never passed, and no place to pause.
        stop_ids: tokens that end it.
        sampling: with a seed.
        num_computed: leading tokens whose KV applied steps have computed (or the prefix cache has provided).
        num_scheduled: the same after the steps in flight.
        num_pending: tokens that steps in flight will sample.
        num_in_flight: steps in flight that name its row.
        high_water: the largest num_computed it has had.
        num_cached_tokens: found in the prefix cache at its first admission.
        row: its row in the runner while resident.
        table: its blocks; with a table and no row it is parked.
        is_announced: the runner has been told of this row (`NewRow`).
        num_blocks_sent: leading blocks of the table that the runner has been told.
        prefix: what the last lookup in the prefix cache found, while it waits.
        engine_us: its share of the time of the applied steps that it took part in.
    """

    request_id: str
    choice: int
    arrival: int
    path: tuple[PathNode, ...]
    request_class: RequestClass
    cache_salt: str
    token_ids: list[int]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    output_cap: int
    output_limit: int
    hold_at_cap: bool
    arrival_us: int

    num_prompt_tokens: int = field(init=False)
    state: RequestState = RequestState.WAITING

    num_computed: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    high_water: int = 0
    num_cached_tokens: int = 0

    row: int | None = None
    table: BlockTable | None = None
    is_announced: bool = False
    num_blocks_sent: int = 0
    prefix: list[CachedBlock] = field(default_factory=list)

    engine_us: int = 0
    phase: Phase = Phase.QUEUE
    phase_since_us: int = field(init=False)
    phase_us: list[int] = field(default_factory=lambda: [0] * len(Phase))

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.phase_since_us = self.arrival_us

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known(self) -> int:
        """Tokens known once the steps in flight are applied."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_wanted(self) -> int:
        """Tokens that it could compute in the next step; 0 while it is paused or certain to be at its cap by then."""
        num_known = self.num_known
        if self.state >= RequestState.AT_CAP or num_known - self.num_prompt_tokens >= self.output_cap:
            return 0
        return num_known - self.num_scheduled

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV was computed for it, the same as if it had never been preempted: cached ones are not counted,
        and what was lost and came back, by computing again or from the cache, counts once."""
        return self.high_water - self.num_cached_tokens

    def enter(self, phase: Phase, now_us: int) -> None:
        """Book the time since the last call under the old phase and go on in the new one."""
        self.phase_us[self.phase] += now_us - self.phase_since_us
        self.phase, self.phase_since_us = phase, now_us

    def news(
        self,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        held_at_cap: bool = False,
        finish: FinishReason | None = None,
    ) -> Output:
        """An output with these tokens, which are its last ones, and with its counts.

        With a finish it also says where the time went, up to the last `enter`; a pause at the cap counts as decoding.
        """
        return Output(
            request_id=self.request_id,
            choice=self.choice,
            token_ids=token_ids,
            logprobs=logprobs,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_delivered_tokens=self.num_output_tokens,
            held_at_cap=held_at_cap,
            finish=finish,
            stop_token_id=token_ids[-1] if finish == "stop" else None,
            timings=Timings(**{f"{p.name.lower()}_us": self.phase_us[p] for p in Phase}, engine_us=self.engine_us)
            if finish is not None
            else None,
        )
