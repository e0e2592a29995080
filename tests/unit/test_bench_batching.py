"""The batching benchmark's own arithmetic, on a runner without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_runner import FakeRunner

from engine.bench.batching import Batching, BatchingRun, StepSample, percentile, run_batching
from engine.bench.batching_report import draw
from engine.bench.workload import MAX_ANSWER_TOKENS, Job, mixed_lengths
from engine.config import EngineConfig

WINDOW = 1024
CAP = 64


class SteppingClock:
    """Every look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def _run(batching: Batching, jobs: list[Job], num_slots: int) -> BatchingRun:
    config = EngineConfig(model=Path("none"), max_sequences=num_slots, max_step_tokens=256)
    runner = FakeRunner(400, max_sequences=num_slots, max_step_tokens=256)
    return run_batching(batching, jobs, config, runner, max_model_len=WINDOW, answer_cap=CAP, clock=SteppingClock())


def _jobs(*lengths: int) -> list[Job]:
    return [Job([3 + i] * 16, length) for i, length in enumerate(lengths)]


def test_static_batches_idle_until_their_longest_answer_and_continuous_ones_do_not() -> None:
    jobs = _jobs(*[1, 1, 1, 40] * 8)

    padded, static, continuous = _run("padded", jobs, 4), _run("static", jobs, 4), _run("continuous", jobs, 4)

    # Of 4 slots for 40 steps each, a static batch uses 40 + 3: the last batch starts with nobody waiting.
    assert static.useful_share(only_while_work_waits=False) == pytest.approx(43 / 160, abs=0.01)
    assert continuous.useful_share(only_while_work_waits=True) > 0.95
    assert len(static.steps) == 8 * 40
    assert len(continuous.steps) < len(static.steps) / 2
    assert padded.useful_share(only_while_work_waits=False) == pytest.approx(43 / 160, abs=0.01)
    assert len(padded.steps) == len(static.steps)
    assert len(padded.ttft_s) + len(padded.gaps_s) == padded.num_output_tokens, "padding is nobody's token"
    assert static.num_output_tokens == continuous.num_output_tokens == 8 * 43


def test_every_token_has_a_latency() -> None:
    run = _run("continuous", _jobs(5, 9, 1), 4)

    assert len(run.ttft_s) == 3
    assert len(run.gaps_s) == 4 + 8 + 0
    assert all(gap > 0 for gap in run.gaps_s)


def test_memory_is_compared_at_the_moment_when_most_is_held() -> None:
    run = _run("continuous", _jobs(30, 30), 4)

    assert run.peak_blocks == 2 * 3  # 16 tokens of prompt and 29 computed of the answer
    assert run.reserved_cap_blocks == 2 * (16 + CAP) // 16
    assert run.reserved_window_blocks == 2 * WINDOW // 16


def test_workloads_repeat_and_keep_their_limits() -> None:
    jobs = mixed_lengths(500, 3, 49152)

    assert jobs == mixed_lengths(500, 3, 49152)
    assert jobs != mixed_lengths(500, 4, 49152)
    answers = [job.num_answer_tokens for job in jobs]
    assert min(answers) == 1
    assert max(answers) == MAX_ANSWER_TOKENS
    assert all(16 <= len(job.token_ids) <= 600 for job in jobs)


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0], 0.99) == 3.0


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    steps = [StepSample(began_s=i / 10, elapsed_s=0.1, num_slots=4, num_waiting=1, num_blocks=i) for i in range(20)]
    run = BatchingRun(
        batching="continuous",
        wall_s=2.0,
        num_output_tokens=80,
        ttft_s=[0.1],
        gaps_s=[0.1],
        steps=steps,
        max_sequences=4,
        peak_blocks=19,
        reserved_window_blocks=64,
        reserved_cap_blocks=32,
    )

    draw([run, run], tmp_path / "new" / "batching.png")

    assert (tmp_path / "new" / "batching.png").read_bytes().startswith(b"\x89PNG")
