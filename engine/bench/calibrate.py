"""Measures what steps cost, by giving plans to a runner directly: no scheduler, no core, no requests.

Sequences are laid out once. A step then names any position of theirs, since all blocks have been written and a runner
keeps nothing else of where a sequence stands; so each shape is measured as often as one likes, in any order.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.bench.step_grid import StepShape, row_lengths
from engine.runner.port import Runner
from engine.sampling_params import SamplingParams
from engine.sched.cost import CostModel
from engine.sched.plan import Chunk, NewRow, StepPlan

_FILL_BLOCKS = 32
"""Blocks that one step writes while sequences are laid out."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A shape and how long it took, each time it was measured."""

    shape: StepShape
    times_us: tuple[int, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median: how much else went on."""
        low, _, high = statistics.quantiles(self.times_us, n=4, method="inclusive")
        return (high - low) / self.median_us

    def error(self, cost: CostModel) -> float:
        """How far a model is off, as a share of the median; above 0 if it says more."""
        return self.shape.predicted_us(cost) / self.median_us - 1


def measure_steps(
    runner: Runner,
    shapes: Sequence[StepShape],
    *,
    block_tokens: int,
    repeats: int,
    seed: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> list[MeasuredStep]:
    """Measure each shape `repeats` times (2 or more), in a new order each time, after a round that does not count.

    Args:
        runner: of at least `step_grid.NUM_ROWS` rows, with room for all shapes; whatever it holds is lost.
        say: told how far it is.
    """
    if not shapes:
        return []
    rng = random.Random(seed)
    steps = _Steps(runner, row_lengths(shapes), block_tokens, rng)
    say("writing the contexts ...")
    steps.lay_out()
    times: dict[StepShape, list[int]] = {shape: [] for shape in shapes}
    for repeat in range(repeats + 1):
        say(f"round {repeat} of {repeats}: {len(times)} steps ..." if repeat else "warming up ...")
        for shape in rng.sample(list(times), len(times)):
            elapsed_us = steps.run(shape)
            if repeat:
                times[shape].append(elapsed_us)
    return [MeasuredStep(shape, tuple(taken)) for shape, taken in times.items()]


class _Steps:
    """Sequences of given lengths in a runner; the last one is the prompt's."""

    def __init__(self, runner: Runner, lengths: Sequence[int], block_tokens: int, rng: random.Random) -> None:
        self._runner = runner
        self._block_tokens = block_tokens
        self._rng = rng
        self._prompt_row = len(lengths) - 1
        self._tables: dict[int, range] = {}
        self._num_blocks = 0
        for row, length in enumerate(lengths):
            if length:
                end = self._num_blocks + -(-length // block_tokens)
                self._tables[row] = range(self._num_blocks, end)
                self._num_blocks = end

    def lay_out(self) -> None:
        """Write every block once, then give each row its own.

        Memory that was never written reads faster than any other. What is written does not matter, so blocks are filled
        as if each few of them were a short prompt: that takes a fraction of the time.
        """
        for first in range(0, self._num_blocks, _FILL_BLOCKS):
            self._occupy({0: range(first, min(first + _FILL_BLOCKS, self._num_blocks))}, whole=True)
        self._occupy(self._tables, whole=False)

    def run(self, shape: StepShape) -> int:
        """Microseconds."""
        chunks = [
            Chunk(row=row, start=shape.decode_context, num_tokens=1, samples=True) for row in range(shape.num_decodes)
        ]
        if shape.chunk_tokens:
            prompt = Chunk(row=self._prompt_row, start=shape.chunk_start, num_tokens=shape.chunk_tokens, samples=True)
            chunks.append(prompt)
        return self._runner.submit(StepPlan(step_id=0, chunks=tuple(chunks))).wait().elapsed_us

    def _occupy(self, tables: dict[int, range], *, whole: bool) -> None:
        """One step in which rows become resident, and all of their tokens, or the first one, are computed."""
        rows, chunks = [], []
        for row, table in tables.items():
            num_tokens = len(table) * self._block_tokens
            token_ids = tuple(self._rng.randrange(self._runner.vocab_size) for _ in range(num_tokens))
            sampling = SamplingParams(seed=row)
            rows.append(NewRow(row=row, token_ids=token_ids, num_prompt_tokens=num_tokens, sampling=sampling))
            chunks.append(Chunk(row=row, start=0, num_tokens=num_tokens if whole else 1, new_block_ids=tuple(table)))
        self._runner.submit(StepPlan(step_id=0, new_rows=tuple(rows), chunks=tuple(chunks))).wait()
