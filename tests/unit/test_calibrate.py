"""What a calibration asks of a runner, and what it makes of the answers; on a runner without a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from engine.bench.calibrate import MeasuredStep, measure_steps
from engine.bench.calibrate_report import summary, table
from engine.bench.cost_fit import UnusableMeasurements, fit_cost
from engine.bench.step_grid import NUM_ROWS, StepShape, fitting_grid, row_lengths, whole_grid
from engine.sched.calibration import Calibration
from engine.sched.cost import PROFILES, CostModel
from engine.sched.plan import StepPlan, StepResult

BLOCK_TOKENS = 16
COST = PROFILES["cpu"]


@dataclass
class PricedRunner:
    """Takes what a cost model says, and proves that plans read only blocks that were written, each row its own.

    Attributes:
        hiccup_every: so many steps apart, one takes ten times as long.
        sampled: plans in which every chunk samples, in their order: those that are measured.
    """

    cost: CostModel
    num_blocks: int = 4096
    vocab_size: int = 500
    hiccup_every: int = 0
    sampled: list[StepPlan] = field(default_factory=list)
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _written: set[int] = field(default_factory=set)

    def submit(self, plan: StepPlan) -> _Done:
        for new in plan.new_rows:
            assert new.row < NUM_ROWS
            self._tables[new.row] = []
        marginals = []
        assert len({chunk.row for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            table, end = self._tables[chunk.row], chunk.start + chunk.num_tokens
            table.extend(chunk.new_block_ids)
            assert end <= len(table) * BLOCK_TOKENS
            assert all(0 <= block < self.num_blocks for block in table)
            assert self._written.issuperset(table[: chunk.start // BLOCK_TOKENS])
            self._written.update(table[: end // BLOCK_TOKENS])
            marginals.append(self.cost.marginal_us(chunk.start, end, 0 if chunk.num_tokens == 1 else end))
        if all(chunk.samples for chunk in plan.chunks):
            blocks = [block for chunk in plan.chunks for block in self._tables[chunk.row]]
            assert len(set(blocks)) == len(blocks)
            self.sampled.append(plan)
        elapsed_us = self.cost.step_us(marginals)
        if self.hiccup_every and len(self.sampled) % self.hiccup_every == 0:
            elapsed_us *= 10
        return _Done(StepResult(step_id=plan.step_id, elapsed_us=elapsed_us))

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class _Done:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


def _fit(steps: list[MeasuredStep]) -> CostModel:
    return fit_cost([step.shape.terms() for step in steps], [step.median_us for step in steps])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_runner_s_cost_model_is_found(profile: str) -> None:
    steps = measure_steps(PricedRunner(PROFILES[profile]), whole_grid(), block_tokens=BLOCK_TOKENS, repeats=2)

    assert max(abs(step.error(_fit(steps))) for step in steps) < 0.005, "more than whole microseconds explain"
    assert {step.spread for step in steps} == {0.0}


def test_a_hiccup_now_and_then_changes_nothing() -> None:
    runner = PricedRunner(COST, hiccup_every=7)

    steps = measure_steps(runner, whole_grid(), block_tokens=BLOCK_TOKENS, repeats=9)

    assert max(abs(step.error(COST)) for step in steps) < 0.001
    assert max(max(step.times_us) for step in steps) > 5 * COST.fixed_us


def test_each_step_is_measured_as_often_as_asked_after_a_round_that_does_not_count_in_ever_new_orders() -> None:
    runner, grid = PricedRunner(COST), whole_grid()

    steps = measure_steps(runner, grid, block_tokens=BLOCK_TOKENS, repeats=3)

    assert [step.shape for step in steps] == list(grid)
    assert {len(step.times_us) for step in steps} == {3}
    rounds = [runner.sampled[i : i + len(grid)] for i in range(0, len(runner.sampled), len(grid))]
    assert len(rounds) == 4
    assert all(Counter(each) == Counter(rounds[0]) for each in rounds)
    assert all(each != rounds[0] for each in rounds[1:])


def test_the_grid_is_what_fits_into_the_window_and_the_pool() -> None:
    assert fitting_grid(max_model_len=8192, num_blocks=5000, block_tokens=BLOCK_TOKENS) == whole_grid()
    short = fitting_grid(max_model_len=1024, num_blocks=5000, block_tokens=BLOCK_TOKENS)
    small = fitting_grid(max_model_len=8192, num_blocks=300, block_tokens=BLOCK_TOKENS)

    assert max(shape.num_tokens_known for shape in short) < 1024
    assert sum(-(-length // BLOCK_TOKENS) for length in row_lengths(small)) <= 300
    for grid in (short, small):
        steps = measure_steps(
            PricedRunner(COST, num_blocks=300 if grid is small else 5000), grid, block_tokens=16, repeats=2
        )
        assert max(abs(step.error(_fit(steps))) for step in steps) < 0.001


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(8192, 2), (8, 5000)])
def test_where_next_to_nothing_fits_it_says_so(max_model_len: int, num_blocks: int) -> None:
    grid = fitting_grid(max_model_len=max_model_len, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)
    steps = measure_steps(PricedRunner(COST, num_blocks=num_blocks), grid, block_tokens=BLOCK_TOKENS, repeats=2)

    with pytest.raises(UnusableMeasurements, match="too few"):
        _fit(steps)


def test_the_table_shows_how_far_the_model_is_off() -> None:
    shape = StepShape(num_decodes=8, decode_context=0)
    measured_us = 2 * shape.predicted_us(COST)
    lines = list(table([MeasuredStep(shape, (measured_us - 1000, measured_us, measured_us + 3000))], COST))

    assert len(lines) == 2
    assert lines[1].split() == ["8", "decodes", "at", "0", "15.6", "13%", "7.8", "-50%"]


@pytest.mark.parametrize(("times_us", "is_busy"), [((990, 1000, 1010), False), ((700, 1000, 1300), True)])
def test_the_summary_says_so_if_the_machine_was_busy(times_us: tuple[int, ...], is_busy: bool) -> None:
    calibration = Calibration(
        model="tiny",
        device="cpu",
        dtype="bfloat16",
        cost=COST,
        processor="Abacus 2",
        num_threads=2,
        torch_version="2.13.0",
        measured_on="2026-11-30",
        num_steps=1,
        median_error_permille=34,
        worst_error_permille=210,
    )

    lines = list(summary(calibration, [MeasuredStep(StepShape(num_decodes=1), times_us)]))

    assert "a prompt token 330 us and 0.200 us for each before it" in lines[0]
    assert lines[1] == "error of the model: median 3.4 %, worst 21.0 %"
    assert any("something else is running" in line for line in lines) == is_busy
