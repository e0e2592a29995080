"""What a simulated run leaves behind: plain records, from which every figure is taken (`figures.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import FinishReason
from engine.sched.cost import CostModel
from engine.sim.workload import Arrival, Workload


@dataclass(slots=True)
class RequestTrace:
    """What became of one arrival. Times on the simulated clock.

    Attributes:
        arrived_us: when it came, which may be in the middle of a step.
        submitted_us: when the engine could first hear of it: between two steps.
        token_us: when each output token was there.
        num_cached_tokens: found in the prefix cache at its first admission.
        held_us: time between its admission and its end in which it had no slot: parked or preempted.
        refused: the code with which the engine refused it.
    """

    arrival: Arrival
    arrived_us: int
    submitted_us: int = 0
    token_us: list[int] = field(default_factory=list)
    ended_us: int | None = None
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    held_us: int = 0
    refused: str | None = None

    @property
    def ttft_us(self) -> int | None:
        """Time to the first token; None if there was none."""
        return self.token_us[0] - self.arrived_us if self.token_us else None


@dataclass(frozen=True, slots=True)
class Charge:
    """What a step did for one request.

    Attributes:
        id: of the arrival.
        cost_us: marginal cost of the whole chunk.
        useful_us: the part of it that had not been computed for this request before: what it is charged.
    """

    id: int
    num_tokens: int
    cost_us: int
    useful_us: int


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step.

    Attributes:
        backlog: ids of the arrivals that hold a slot and wanted more in this step than they got.
    """

    start_us: int
    end_us: int
    charges: tuple[Charge, ...]
    backlog: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(charge.num_tokens for charge in self.charges)

    @property
    def useful_us(self) -> int:
        return sum(charge.useful_us for charge in self.charges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One workload under one policy.

    Attributes:
        requests: by the arrival's id, in the order of arrival. Those that never arrived are not here.
        ended_us: when the simulation stopped.
        plans_digest: of all plans, byte for byte; equal digests are equal plans.
    """

    workload: Workload
    policy: str
    cost: CostModel
    requests: dict[int, RequestTrace]
    steps: list[StepTrace]
    ended_us: int
    plans_digest: str
