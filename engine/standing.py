"""What can be seen of fair share from outside: where a request stands, and what each team has.

Plain records, part of the protocol (`messages.py`). They are made when somebody asks, never in a step.
"""

from __future__ import annotations

from typing import Literal

import msgspec

RequestPhase = Literal["unknown", "queue", "prefill", "decode", "preempted", "parked", "at_cap"]
Resource = Literal["", "slot", "blocks", "step"]

MOST_NAMED = 100
"""Of the requests that are ahead of one, so many are told by name."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request is, and what it waits for.

    Of a request with several choices it tells of the one that is furthest behind.

    Attributes:
        team_id: the second node of its path.
        request_class: empty if the phase is ``unknown``, as is team_id.
        phase: ``unknown`` if the engine has no such request (any more).
        resource: what it waits for: a slot, KV blocks, or its turn in a step; empty if it runs or is at its cap.
        ahead: how many are before it in line for that resource, by class (only classes with any). Every choice of
            a request counts, since each takes a place; those of its own request do not.
        ahead_of_team: which of them belong to its own team, by request_id, the first first; at most `MOST_NAMED`.
        expected_wait_us: an estimate, until it runs; 0 if it runs, None where nothing can be said.
        queue_us, prefill_us, decode_us, preempted_us, parked_us: where its time went so far; they sum to its age.
    """

    team_id: str = ""
    request_class: str = ""
    phase: RequestPhase = "unknown"
    resource: Resource = ""
    ahead: dict[str, int] = {}
    ahead_of_team: tuple[str, ...] = ()
    expected_wait_us: int | None = None
    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    preempted_us: int = 0
    parked_us: int = 0


class TeamShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one team has at the moment. Teams without requests are left out, unless they are ahead of their siblings or
    were served lately: then the engine tells what they were charged.

    Attributes:
        team_id: second node of the path; org_id is the first.
        entitled_ppm: its share by weight among those that have requests now, in millionths of the engine.
        served_us: engine time (marginal cost) that it was charged since the engine started.
        lag_us: how far it is behind its siblings' clock (negative: ahead), in service of its own.
        num_waiting: its requests without a slot, parked ones included.
        num_parked: those of them that hold blocks.
        num_slots: sequence slots that it holds.
        num_borrowed_slots: those above its entitled share of the slots.
        num_lent_slots: slots of its entitled share that others hold.
    """

    org_id: str
    team_id: str
    entitled_ppm: int = 0
    served_us: int = 0
    lag_us: int = 0
    num_waiting: int = 0
    num_parked: int = 0
    num_slots: int = 0
    num_borrowed_slots: int = 0
    num_lent_slots: int = 0
