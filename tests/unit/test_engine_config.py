"""Every engine setting reaches the engine."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from gateway.commands.engine import engine_config
from gateway.settings import EngineSettings, Settings


def test_no_setting_is_lost_between_the_file_and_the_engine(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    wanted = {
        "device": "cuda",
        "dtype": "float32",
        "policy": "static",
        "max_sequences": 3,
        "max_step_tokens": 77,
        "kv_cache_bytes": 12345678,
        "host_kv_bytes": 87654321,
        "record": tmp_path / "plans.jsonl",
        "cost_model": tmp_path / "cost.json",
    }
    settings = Settings(home=tmp_path, engine=EngineSettings(model=str(model), threads=5, **wanted))
    defaults = EngineConfig(model=model)

    config = engine_config(settings)

    assert {name: getattr(config, name) for name in wanted} == wanted
    assert (config.model, config.num_threads) == (model, 5)
    assert all(getattr(defaults, name) != value for name, value in wanted.items()), "a default would prove nothing"
