"""`evenhand bench calibrate` on the real model, small, and an engine that is given what it must refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.bench.calibrate import measure_steps
from engine.bench.cost_fit import fit_cost
from engine.bench.step_grid import NUM_ROWS, StepShape, whole_grid
from engine.config import EngineConfig
from engine.runner.model_runner import build_runner
from engine.sched.calibration import load_calibration

pytestmark = [pytest.mark.model, pytest.mark.slow]

WIDE = 2.5
"""Others may use this machine meanwhile."""
NEVER_FITTED = (
    StepShape(num_decodes=6, decode_context=300),
    StepShape(chunk_tokens=100, chunk_start=200),
    StepShape(num_decodes=5, decode_context=200, chunk_tokens=150, chunk_start=100),
)


def _evenhand(home: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")}
    fixed = {"EVENHAND_HOME": str(home), "EVENHAND_ENGINE__THREADS": "1", "EVENHAND_ENGINE__KV_CACHE_BYTES": "128MiB"}
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments],
        env=base | fixed | settings,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_fitted_model_tells_what_other_steps_take(smollm2_path: Path) -> None:
    loaded = build_runner(EngineConfig(model=smollm2_path, max_sequences=NUM_ROWS, kv_cache_bytes=256 << 20))
    fitted = [shape for shape in whole_grid() if shape.num_tokens_known < 500 and shape.num_decodes <= 8]

    steps = measure_steps(loaded.runner, [*fitted, *NEVER_FITTED], block_tokens=16, repeats=5)
    cost = fit_cost([s.shape.terms() for s in steps[: len(fitted)]], [s.median_us for s in steps[: len(fitted)]])

    for step in steps[len(fitted) :]:
        assert 1 / WIDE < step.shape.predicted_us(cost) / step.median_us < WIDE, str(step.shape)


def test_the_path_of_the_file_is_all_there_is_on_stdout(new_home: Callable[[], Path], tmp_path: Path) -> None:
    home = new_home()
    path = home / "calibration" / "smollm2-135m-instruct_cpu_float32.json"
    other = {"EVENHAND_ENGINE__COST_MODEL": str(tmp_path / "mine.json")}

    done = _evenhand(home, "bench", "calibrate", "--repeats", "3", EVENHAND_ENGINE__DTYPE="float32", **other)

    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
    assert "error of the model: median" in done.stderr
    assert f"engine.cost_model is '{tmp_path / 'mine.json'}'" in done.stderr
    calibration = load_calibration(path)
    assert (calibration.model, calibration.device, calibration.dtype) == ("smollm2-135m-instruct", "cpu", "float32")
    assert calibration.num_threads == 1


def test_nothing_is_measured_for_a_folder_that_is_not_there(new_home: Callable[[], Path], tmp_path: Path) -> None:
    done = _evenhand(new_home(), "bench", "calibrate", "--output", str(tmp_path / "no" / "cost.json"))

    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == f"evenhand: no folder '{tmp_path / 'no'}' to write 'cost.json' to\n"


def test_an_engine_whose_cost_model_is_not_there_ends_with_one_line(
    new_home: Callable[[], Path], tmp_path: Path
) -> None:
    done = _evenhand(
        new_home(),
        "engine",
        EVENHAND_ENGINE__COST_MODEL=str(tmp_path / "none.json"),
        EVENHAND_ENGINE__ENDPOINT=f"ipc://{tmp_path}/engine.sock",
        EVENHAND_LOG__LEVEL="error",
    )

    assert done.returncode == 78
    assert done.stderr == (
        f"evenhand engine: cannot read the calibration '{tmp_path / 'none.json'}': No such file or directory\n"
    )
