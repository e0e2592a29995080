"""``evenhand engine``: one engine process, from settings."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.models.fetch import resolve_model
from gateway.backends.curve import curve_keys
from gateway.settings import Settings
from gateway.telemetry.logging import configure_logging


def engine_config(settings: Settings) -> EngineConfig:
    """What the engine is told. Fetches the model if it is not there.

    Raises:
        ConfigError: a value that the engine cannot work with.
        ModelLoadError: there is no such model.
    """
    chosen = settings.engine
    path, name = resolve_model(chosen.model, settings.home)
    return EngineConfig(
        model=path,
        model_name=name,
        device=chosen.device,
        dtype=chosen.dtype,
        policy=chosen.policy,
        max_sequences=chosen.max_sequences,
        max_step_tokens=chosen.max_step_tokens,
        kv_cache_bytes=chosen.kv_cache_bytes,
        host_kv_bytes=chosen.host_kv_bytes,
        record=chosen.record,
        num_threads=chosen.threads,
    )


def run(settings: Settings, supervisor_fd: int | None) -> int:
    """Serve until told to stop; the exit code."""
    from engine.process import run_engine  # torch takes seconds to import, and only this process needs it

    configure_logging(settings.log.level)
    return run_engine(
        engine_config(settings),
        settings.engine_endpoint,
        curve=curve_keys(settings.engine),
        supervisor_fd=supervisor_fd,
    )
