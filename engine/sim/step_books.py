"""What each step did for whom, and who wanted more: the books that nobody can keep from inside a policy.

They are kept from plans alone, of runs that are simulated and of recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.sched.cost import CostModel
from engine.sched.plan import Chunk, NewRow, StepPlan
from engine.sim.trace import Charge

NOBODY = -1
"""In place of an arrival's id, for what a step computes for a request that has ended."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One step.

    Attributes:
        backlog: ids of the arrivals that hold a slot and wanted more in this step than they got.
        samples: (row, arrival's id, place of the token in its answer), in the plan's order.
    """

    charges: tuple[Charge, ...]
    backlog: tuple[int, ...]
    samples: tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class _Row:
    """A resident request: its arrival's id, how many tokens it knows and has computed."""

    id: int
    num_prompt: int
    num_known: int
    num_computed: int


class StepBooks:
    """
    Args:
        arrival_of: the id of the arrival that a new row belongs to.
    """

    def __init__(self, cost: CostModel, arrival_of: Callable[[NewRow], int]) -> None:
        self._cost = cost
        self._arrival_of = arrival_of
        self._rows: dict[int, _Row] = {}
        self._row_of: dict[int, int] = {}
        self._most_outputs: dict[int, int] = {}
        self._high_water: dict[int, int] = {}

    def expect(self, arrival_id: int, most_outputs: int) -> None:
        """From now on the arrival wants so many output tokens and no more."""
        self._most_outputs[arrival_id] = most_outputs

    def forget(self, arrival_id: int) -> None:
        """The arrival has ended."""
        self._most_outputs.pop(arrival_id, None)
        self._high_water.pop(arrival_id, None)
        row = self._row_of.pop(arrival_id, None)
        if row is not None:
            del self._rows[row]

    def enter(self, plan: StepPlan) -> Entry:
        """Plans are entered in order, each before the next one is made."""
        starts = {chunk.row: chunk.start for chunk in plan.chunks}  # behind what the prefix cache had
        for new in plan.new_rows:
            row = _Row(self._arrival_of(new), new.num_prompt_tokens, len(new.token_ids), starts[new.row])
            self._occupy(new.row, row)
        wanted = {row.id: num for row in self._rows.values() if (num := self._num_wanted(row))}
        charges, samples = [], []
        for chunk in plan.chunks:
            resident = self._rows.get(chunk.row)
            if resident is None:  # planned ahead for a request that has ended: computed for nobody
                charges.append(self._charge_nobody(chunk))
                samples.extend([(chunk.row, NOBODY, 0)] * chunk.samples)
                continue
            charges.append(self._charge(resident, chunk))
            wanted[resident.id] = wanted.get(resident.id, 0) - chunk.num_tokens
            if chunk.samples:
                samples.append((chunk.row, resident.id, resident.num_known - resident.num_prompt))
                resident.num_known += 1
        backlog = tuple(arrival_id for arrival_id, num_tokens in wanted.items() if num_tokens > 0)
        return Entry(tuple(charges), backlog, tuple(samples))

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
        most_outputs = self._most_outputs.get(row.id, 0)
        return row.num_known - row.num_computed if row.num_known - row.num_prompt < most_outputs else 0

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
