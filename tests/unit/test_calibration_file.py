"""The file of `evenhand bench calibrate`: kept as it was, refused where it does not belong, found where it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from fake_runner import FakeRunner
from msgspec import json, structs

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.sched.calibration import Calibration, load_calibration, load_cost_model, store_calibration
from engine.sched.cost import PROFILES, CostModel
from engine.sched.registry import cost_model
from engine.sim.simulator import Machine
from gateway.commands.engine import calibration_file, engine_config, tell_if_not_calibrated
from gateway.settings import EngineSettings, Settings

COST = CostModel(
    fixed_us=4321, prefill_token_ns=10_000, prefill_context_ps=7, decode_token_ns=3_000, decode_context_ps=0
)
CALIBRATION = Calibration(
    model="tiny",
    device="cpu",
    dtype="float32",
    cost=COST,
    processor="Abacus 2",
    num_threads=2,
    torch_version="2.13.0",
    measured_on="2026-11-30",
    num_steps=40,
    median_error_permille=30,
    worst_error_permille=210,
)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "cost.json"
    store_calibration(CALIBRATION, path)
    return path


def test_a_stored_calibration_is_loaded_as_it_was(stored: Path) -> None:
    assert load_calibration(stored) == CALIBRATION
    assert load_cost_model(stored, model="tiny", device="cpu", dtype="float32") == COST
    assert [path.name for path in stored.parent.iterdir()] == ["cost.json"]


def test_a_calibration_replaces_the_one_before(stored: Path) -> None:
    newer = structs.replace(CALIBRATION, num_steps=7)
    store_calibration(newer, stored)

    assert load_calibration(stored) == newer


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"model": "huge"}, "model 'tiny', not of 'huge'"),
        ({"device": "cuda"}, "device 'cpu', not of 'cuda'"),
        ({"dtype": "bfloat16"}, "dtype 'float32', not of 'bfloat16'"),
    ],
)
def test_another_engine_s_calibration_is_refused(stored: Path, engine: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"cost.json' is of {said}.*bench calibrate"):
        load_cost_model(stored, **{"model": "tiny", "device": "cpu", "dtype": "float32", **engine})


def _with(**changes: object) -> bytes:
    return json.encode({**structs.asdict(CALIBRATION), **changes})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1, 2]",
        b"\xff\xfe",
        json.encode(COST),
        _with(speed=3),
        _with(num_steps=1.5),
        _with(cost={**structs.asdict(COST), "fixed_us": 0.5}),
        _with(cost={**structs.asdict(COST), "fixed_us": 0}),
        _with(cost={"fixed_us": 1}),
    ],
)
def test_what_is_no_calibration_is_refused_by_name_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"cost\.json' is no file of 'evenhand bench calibrate'") as caught:
        load_calibration(path)
    assert "\n" not in str(caught.value)


def test_a_file_out_of_reach_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json': No such file"):
        load_calibration(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_calibration(tmp_path)
    with pytest.raises(ConfigError, match=r"no/cost\.json"):
        store_calibration(CALIBRATION, tmp_path / "no" / "cost.json")


def test_an_engine_plans_with_its_file_and_without_one_with_built_in_figures(stored: Path) -> None:
    config = EngineConfig(model=stored, model_name="tiny", dtype="float32", cost_model=stored)

    assert cost_model(config) == COST
    assert cost_model(EngineConfig(model=stored)) == PROFILES["cpu"]
    assert cost_model(EngineConfig(model=stored, device="cuda")) == PROFILES["gpu8b"]


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_an_engine_does_not_start_with_a_file_that_it_cannot_use(tmp_path: Path, policy: str) -> None:
    config = EngineConfig(model=tmp_path, policy=policy, cost_model=tmp_path / "none.json")
    runner = FakeRunner(64, max_sequences=config.max_sequences, max_step_tokens=config.max_step_tokens)

    with pytest.raises(ConfigError, match=r"none\.json"):
        EngineCore(config, runner, max_model_len=64, eos_token_ids=(), clock=lambda: 0)


def _settings(home: Path, **engine: object) -> Settings:
    model = home / "tiny.gguf"
    model.touch()
    return Settings(home=home, engine=EngineSettings(model=str(model), dtype="float32", policy="fair", **engine))


def test_an_engine_finds_the_file_of_its_model_device_and_dtype_by_itself(tmp_path: Path) -> None:
    path = calibration_file(tmp_path, "tiny", "cpu", "float32")
    assert path == tmp_path / "calibration" / "tiny_cpu_float32.json"
    path.parent.mkdir()
    for other in ("tiny_cpu_bfloat16.json", "tiny_cuda_float32.json", "huge_cpu_float32.json"):
        path.with_name(other).touch()
    assert engine_config(_settings(tmp_path)).cost_model is None

    store_calibration(CALIBRATION, path)

    config = engine_config(_settings(tmp_path))
    assert config.cost_model == path
    assert cost_model(config) == COST


def test_a_file_that_is_set_goes_before_the_one_that_is_found_even_if_it_is_not_there(tmp_path: Path) -> None:
    path = calibration_file(tmp_path, "tiny", "cpu", "float32")
    path.parent.mkdir()
    store_calibration(CALIBRATION, path)

    assert engine_config(_settings(tmp_path, cost_model=tmp_path / "mine.json")).cost_model == tmp_path / "mine.json"


def test_the_dtype_in_the_file_s_name_is_what_auto_stands_for(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    auto = settings.model_copy(update={"engine": settings.engine.model_copy(update={"dtype": "auto"})})

    assert engine_config(auto).dtype in {"bfloat16", "float32"}


def test_an_engine_says_once_that_it_is_not_calibrated_and_how_to_do_it(tmp_path: Path) -> None:
    config = engine_config(_settings(tmp_path))
    in_turn = EngineSettings(model=str(config.model), policy="fcfs")
    fcfs = engine_config(_settings(tmp_path).model_copy(update={"engine": in_turn}))
    calibrated = engine_config(_settings(tmp_path, cost_model=tmp_path / "cost.json"))

    with structlog.testing.capture_logs() as logs:
        for each in (config, fcfs, calibrated):
            tell_if_not_calibrated(tmp_path, each)

    assert [(log["event"], log["remedy"]) for log in logs] == [("engine.not_calibrated", "evenhand bench calibrate")]
    assert logs[0]["missing"] == str(tmp_path / "calibration" / "tiny_cpu_float32.json")


def test_the_simulator_takes_a_calibration_in_place_of_a_profile(stored: Path, tmp_path: Path) -> None:
    machine = Machine.of_profile(str(stored))

    assert (machine.cost, machine.device) == (COST, "cpu")
    (tmp_path / "profile").write_text("fast")
    with pytest.raises(ConfigError, match="no file of"):
        Machine.of_profile(str(tmp_path / "profile"))
