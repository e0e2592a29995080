"""A runner that computes nothing: its steps take what the cost model says, its answers are as long as was scripted."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import msgspec

from engine.sched.cost import CostModel
from engine.sched.plan import NewRow, StepPlan, StepResult
from engine.sim.step_books import NOBODY, StepBooks
from engine.sim.trace import StepTrace
from engine.sim.workload import SEGMENT_TOKENS, VOCAB_SIZE, Arrival


@dataclass(slots=True)
class Clock:
    """Simulated microseconds."""

    now_us: int = 0

    def __call__(self) -> int:
        return self.now_us


@dataclass(frozen=True, slots=True)
class _Pending:
    runner: SimulatedRunner
    result: StepResult
    trace: StepTrace

    def wait(self) -> StepResult:
        self.runner.finish(self.trace)
        return self.result


class SimulatedRunner:
    """A `Runner`. A step begins when the one before it has ended, or when it is submitted if that is later.

    Attributes:
        steps: those that have been waited for.
    """

    def __init__(self, clock: Clock, cost: CostModel, num_blocks: int) -> None:
        self.vocab_size = VOCAB_SIZE
        self.num_blocks = num_blocks
        self.steps: list[StepTrace] = []
        self._clock = clock
        self._cost = cost
        self._busy_until_us = 0
        self._books = StepBooks(cost, _arrival_of)
        self._digest = sha256()
        self._encoder = msgspec.msgpack.Encoder()

    def expect(self, arrival: Arrival) -> None:
        """The arrival is about to be submitted, with its id for a seed."""
        self._books.expect(arrival.id, arrival.num_output_tokens)

    def forget(self, arrival_id: int) -> None:
        """The arrival has ended."""
        self._books.forget(arrival_id)

    @property
    def plans_digest(self) -> str:
        return self._digest.hexdigest()

    def submit(self, plan: StepPlan) -> _Pending:
        self._digest.update(self._encoder.encode(plan))
        entry = self._books.enter(plan)
        start_us = max(self._clock.now_us, self._busy_until_us)
        elapsed_us = self._cost.step_us(charge.cost_us for charge in entry.charges)
        self._busy_until_us = start_us + elapsed_us
        result = StepResult(
            step_id=plan.step_id,
            rows=tuple(row for row, _, _ in entry.samples),
            token_ids=tuple(
                0 if arrival_id == NOBODY else arrival_id * SEGMENT_TOKENS + place
                for _, arrival_id, place in entry.samples
            ),
            logprobs=(None,) * len(entry.samples),
            elapsed_us=elapsed_us,
        )
        return _Pending(self, result, StepTrace(start_us, self._busy_until_us, entry.charges, entry.backlog))

    def finish(self, step: StepTrace) -> None:
        """The step has been waited for: its time has passed."""
        self._clock.now_us = max(self._clock.now_us, step.end_us)
        self.steps.append(step)

    def close(self) -> None:
        """Holds nothing."""


def _arrival_of(new: NewRow) -> int:
    assert new.sampling.seed is not None, "the simulator gives every request a seed"
    return new.sampling.seed
