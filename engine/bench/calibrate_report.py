"""`evenhand bench calibrate` for people: measure, fit, table to stderr, file; its path alone on stdout."""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from engine.bench.batching_report import say
from engine.bench.calibrate import MeasuredStep, measure_steps
from engine.bench.cost_fit import fit_cost
from engine.bench.step_grid import NUM_ROWS, fitting_grid
from engine.config import EngineConfig
from engine.runner.model_runner import build_runner, dtype_name
from engine.sched.calibration import Calibration, store_calibration
from engine.sched.cost import CostModel

_NOISY = 0.1
"""Median spread of repeats from which a machine was not quiet."""


def main(config: EngineConfig, *, path: Path, repeats: int) -> int:
    """Calibrate an engine of this configuration; the file is written at the very end. Returns the exit code.

    Raises:
        UnusableMeasurements: no cost model follows from what was measured; nothing is written.
        ConfigError, ModelLoadError: the model cannot be loaded, or the file not written.
    """
    say(f"loading {config.model_name} ...")
    loaded = build_runner(replace(config, max_sequences=NUM_ROWS))
    num_threads = torch.get_num_threads()
    shapes = fitting_grid(
        max_model_len=loaded.max_model_len, num_blocks=loaded.runner.num_blocks, block_tokens=config.block_tokens
    )
    steps = measure_steps(loaded.runner, shapes, block_tokens=config.block_tokens, repeats=repeats, say=say)
    cost = fit_cost([step.shape.terms() for step in steps], [step.median_us for step in steps])
    calibration = _calibration(config, num_threads, steps, cost)
    for line in table(steps, cost):
        say(line)
    for line in summary(calibration, steps):
        say(line)
    store_calibration(calibration, path)
    sys.stdout.write(f"{path}\n")
    return 0


def table(steps: Sequence[MeasuredStep], cost: CostModel) -> Iterator[str]:
    """Each step: what was measured, what the model says, and how far it is off."""
    width = max(len(str(step.shape)) for step in steps)
    yield f"\n  {'step':<{width}}  {'measured ms':>11}  {'spread':>6}  {'model ms':>8}  {'error':>6}"
    for step in steps:
        yield (
            f"  {step.shape!s:<{width}}  {step.median_us / 1000:>11.1f}  {step.spread:>6.0%}"
            f"  {step.shape.predicted_us(cost) / 1000:>8.1f}  {step.error(cost):>+6.0%}"
        )


def summary(calibration: Calibration, steps: Sequence[MeasuredStep]) -> Iterator[str]:
    """The model in words, its errors, and whether the measurements are to be trusted."""
    cost = calibration.cost
    yield (
        f"\na step: {cost.fixed_us / 1000:.1f} ms; a prompt token {cost.prefill_token_ns / 1000:.0f} us and "
        f"{cost.prefill_context_ps / 1e6:.3f} us for each before it; an output token {cost.decode_token_ns / 1000:.0f} "
        f"us and {cost.decode_context_ps / 1e6:.3f} us for each before it"
    )
    yield (
        f"error of the model: median {calibration.median_error_permille / 10:.1f} %, worst "
        f"{calibration.worst_error_permille / 10:.1f} %"
    )
    spread = statistics.median(step.spread for step in steps)
    if spread > _NOISY:
        yield f"repeats differ by {spread:.0%}: something else is running, so calibrate again when nothing is"


def _calibration(config: EngineConfig, num_threads: int, steps: Sequence[MeasuredStep], cost: CostModel) -> Calibration:
    errors = [abs(step.error(cost)) for step in steps]
    return Calibration(
        model=config.model_name,
        device=config.device,
        dtype=dtype_name(config.device, config.dtype),
        cost=cost,
        processor=_processor(config.device),
        num_threads=num_threads,
        torch_version=str(torch.__version__),
        measured_on=f"{datetime.now(UTC):%Y-%m-%d}",
        num_steps=len(steps),
        median_error_permille=round(1000 * statistics.median(errors)),
        worst_error_permille=round(1000 * max(errors)),
    )


def _processor(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
