"""Where a request stands that has not ended."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.domain.ids import RequestId, TeamId
from gateway.domain.principal import RequestClass
from gateway.domain.usage import EngineTimings

LiveStatus = Literal["queued", "running", "preempted", "parked", "at_cap"]
"""``preempted``: it ran and gave up its place and what was computed; ``parked``: its place alone. Both wait to go on.
``at_cap``: it pauses until it may write more."""
Resource = Literal["slot", "blocks", "step"]


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that an engine has. Of one with several choices or prompts, that which is furthest behind.

    Attributes:
        waiting_for: a place among the sequences that run, room for its tokens, or its turn; None if it runs.
        ahead: how many are before it in line for that, by class; only classes with any.
        ahead_of_team: which of them are of its own team, the first first; perhaps not all of them.
        expected_wait_us: an estimate; 0 if it does not wait, None where nothing can be said.
        timings: so far; `engine_us` is not known yet.
    """

    request_id: RequestId
    team_id: TeamId
    request_class: RequestClass
    status: LiveStatus
    waiting_for: Resource | None
    ahead: dict[RequestClass, int]
    ahead_of_team: tuple[RequestId, ...]
    expected_wait_us: int | None
    timings: EngineTimings
