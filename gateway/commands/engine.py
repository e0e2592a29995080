"""``evenhand engine``: one engine process, from settings."""

from __future__ import annotations

from pathlib import Path

import structlog

from engine.config import EngineConfig
from engine.models.fetch import resolve_model
from engine.openmp import limit_spinning
from gateway.backends.curve import curve_keys
from gateway.settings import EngineSettings, Settings
from gateway.telemetry.logging import configure_logging


def engine_config(settings: Settings) -> EngineConfig:
    """What the engine is told. Fetches the model if it is not there; imports torch if it is to choose the dtype.

    Raises:
        ConfigError: a value that the engine cannot work with.
        ModelLoadError: there is no such model.
    """
    chosen = settings.engine
    path, name = resolve_model(chosen.model, settings.home)
    dtype = _dtype(chosen)
    calibration = calibration_file(settings.home, name, chosen.device, dtype)
    return EngineConfig(
        model=path,
        model_name=name,
        device=chosen.device,
        dtype=dtype,
        policy=chosen.policy,
        max_sequences=chosen.max_sequences,
        max_step_tokens=chosen.max_step_tokens,
        kv_cache_bytes=chosen.kv_cache_bytes,
        host_kv_bytes=chosen.host_kv_bytes,
        record=chosen.record,
        cost_model=chosen.cost_model or (calibration if calibration.exists() else None),
        num_threads=chosen.threads,
    )


def calibration_file(home: Path, model_name: str, device: str, dtype: str) -> Path:
    """Where `evenhand bench calibrate` leaves its file, and engines look for it, unless they are told otherwise."""
    return home / "calibration" / f"{model_name}_{device}_{dtype}.json"


def tell_if_not_calibrated(home: Path, config: EngineConfig) -> None:
    """Log, once, that an engine whose policy plans with what steps cost has built-in figures only."""
    if config.policy == "fair" and config.cost_model is None:
        structlog.get_logger().info(
            "engine.not_calibrated",
            missing=str(calibration_file(home, config.model_name, config.device, config.dtype)),
            used="built-in figures of what steps cost",
            remedy="evenhand bench calibrate",
        )


def _dtype(chosen: EngineSettings) -> str:
    if chosen.dtype != "auto":
        return chosen.dtype
    limit_spinning()
    from engine.runner.model_runner import dtype_name

    return dtype_name(chosen.device, chosen.dtype)


def run(settings: Settings, supervisor_fd: int | None) -> int:
    """Serve until told to stop; the exit code."""
    from engine.process import run_engine  # torch takes seconds to import, and only this process needs it

    configure_logging(settings.log.level)
    config = engine_config(settings)
    tell_if_not_calibrated(settings.home, config)
    return run_engine(
        config,
        settings.engine_endpoint,
        curve=curve_keys(settings.engine),
        supervisor_fd=supervisor_fd,
    )
