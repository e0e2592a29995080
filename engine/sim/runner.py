"""A runner that computes nothing: its steps take what the cost model says, its answers are as long as was scripted.

It also keeps the books that nobody else can keep from outside: what each step did for whom, and who wanted more.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import msgspec

from engine.sched.cost import CostModel
from engine.sched.plan import Chunk, StepPlan, StepResult
from engine.sim.trace import Charge, StepTrace
from engine.sim.workload import SEGMENT_TOKENS, VOCAB_SIZE, Arrival

NOBODY = -1
"""In place of an arrival's id, for what a step computes for a request that has ended."""


@dataclass(slots=True)
class Clock:
    """Simulated microseconds."""

    now_us: int = 0

    def __call__(self) -> int:
        return self.now_us


@dataclass(slots=True)
class _Row:
    """A resident request: its arrival's id (which is its seed), how many tokens it knows and has computed."""

    id: int
    num_prompt: int
    num_known: int
    num_computed: int


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
        self._rows: dict[int, _Row] = {}
        self._row_of: dict[int, int] = {}
        self._num_outputs: dict[int, int] = {}
        self._high_water: dict[int, int] = {}
        self._digest = sha256()
        self._encoder = msgspec.msgpack.Encoder()

    def expect(self, arrival: Arrival) -> None:
        """The arrival is about to be submitted, with its id for a seed."""
        self._num_outputs[arrival.id] = arrival.num_output_tokens

    def forget(self, arrival_id: int) -> None:
        """The arrival has ended."""
        self._num_outputs.pop(arrival_id, None)
        self._high_water.pop(arrival_id, None)
        row = self._row_of.pop(arrival_id, None)
        if row is not None:
            del self._rows[row]

    @property
    def plans_digest(self) -> str:
        return self._digest.hexdigest()

    def submit(self, plan: StepPlan) -> _Pending:
        self._digest.update(self._encoder.encode(plan))
        starts = {chunk.row: chunk.start for chunk in plan.chunks}  # behind what the prefix cache had
        for new in plan.new_rows:
            assert new.sampling.seed is not None, "the simulator gives every request a seed"
            start = starts[new.row]
            self._occupy(new.row, _Row(new.sampling.seed, new.num_prompt_tokens, len(new.token_ids), start))
        wanted = {row.id: num for row in self._rows.values() if (num := self._num_wanted(row))}
        charges, sampled = [], []
        for chunk in plan.chunks:
            row = self._rows.get(chunk.row)
            if row is None:  # planned ahead for a request that has ended: computed for nobody
                charges.append(self._charge_nobody(chunk))
                sampled.extend([(chunk.row, 0)] * chunk.samples)
                continue
            charges.append(self._charge(row, chunk))
            wanted[row.id] = wanted.get(row.id, 0) - chunk.num_tokens
            if chunk.samples:
                sampled.append((chunk.row, row.id * SEGMENT_TOKENS + row.num_known - row.num_prompt))
                row.num_known += 1
        start_us = max(self._clock.now_us, self._busy_until_us)
        elapsed_us = self._cost.step_us(charge.cost_us for charge in charges)
        self._busy_until_us = start_us + elapsed_us
        backlog = tuple(arrival_id for arrival_id, num_tokens in wanted.items() if num_tokens > 0)
        result = StepResult(
            step_id=plan.step_id,
            rows=tuple(row for row, _ in sampled),
            token_ids=tuple(token_id for _, token_id in sampled),
            logprobs=(None,) * len(sampled),
            elapsed_us=elapsed_us,
        )
        return _Pending(self, result, StepTrace(start_us, self._busy_until_us, tuple(charges), backlog))

    def finish(self, step: StepTrace) -> None:
        """The step has been waited for: its time has passed."""
        self._clock.now_us = max(self._clock.now_us, step.end_us)
        self.steps.append(step)

    def close(self) -> None:
        """Holds nothing."""

    def _occupy(self, number: int, row: _Row) -> None:
        before = self._rows.get(number)
        if before is not None:  # parked or preempted
            del self._row_of[before.id]
        earlier = self._row_of.get(row.id)
        if earlier is not None and earlier != number:
            del self._rows[earlier]
        self._rows[number] = row
        self._row_of[row.id] = number

    def _num_wanted(self, row: _Row) -> int:
        num_outputs = self._num_outputs.get(row.id, 0)
        return row.num_known - row.num_computed if row.num_known - row.num_prompt < num_outputs else 0

    def _charge(self, row: _Row, chunk: Chunk) -> Charge:
        end = chunk.start + chunk.num_tokens
        useful_from = min(end, max(chunk.start, self._high_water.get(row.id, 0)))
        self._high_water[row.id] = max(end, useful_from)
        row.num_computed = end
        return Charge(
            row.id,
            chunk.num_tokens,
            self._cost.marginal_us(chunk.start, end, row.num_prompt),
            self._cost.marginal_us(useful_from, end, row.num_prompt),
        )

    def _charge_nobody(self, chunk: Chunk) -> Charge:
        cost_us = self._cost.marginal_us(chunk.start, chunk.start + chunk.num_tokens, 0)
        return Charge(NOBODY, chunk.num_tokens, cost_us, 0)
