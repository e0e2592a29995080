"""Recorded plans are the plans."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest
from fake_runner import FakeRunner

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.messages import Submit
from engine.runner.recording import RecordingRunner
from engine.sampling_params import SamplingParams
from engine.sched.plan import StepPlan


def test_every_plan_is_written_before_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    path.write_text("an earlier recording\n")
    runner = FakeRunner(64, max_sequences=4, max_step_tokens=32)
    recording = RecordingRunner(runner, path)
    core = EngineCore(
        EngineConfig(model=tmp_path, max_sequences=4, max_step_tokens=32),
        recording,
        max_model_len=512,
        eos_token_ids=(),
        clock=lambda: 0,
    )
    for i in range(3):
        core.submit(
            Submit(
                engine_id="engine-0",
                request_id=str(i),
                token_ids=list(range(5, 45 + i)),
                sampling=SamplingParams(seed=i),
                path=(),
                output_cap=5,
            )
        )
    while core.has_work:
        core.step()

    lines = path.read_bytes().splitlines()

    assert len(lines) > 5
    assert [msgspec.json.decode(line, type=StepPlan) for line in lines] == runner.plans
    recording.close()


def test_a_recording_is_for_its_owner_only(tmp_path: Path) -> None:
    RecordingRunner(FakeRunner(64, max_sequences=4, max_step_tokens=32), tmp_path / "plans").close()

    assert stat.S_IMODE((tmp_path / "plans").stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.record"):
        RecordingRunner(FakeRunner(64, max_sequences=4, max_step_tokens=32), tmp_path / "none" / "plans")
