"""``evenhand bench``: measurements of the engine, from the same settings as a server's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.errors import ConfigError
from engine.openmp import limit_spinning
from gateway.commands.engine import calibration_file, engine_config
from gateway.settings import Settings


def batching(settings: Settings, *, num_jobs: int, num_slots: int, seed: int, repeats: int, picture: Path) -> int:
    """Static against continuous batching; returns the exit code."""
    limit_spinning()
    from engine.bench.batching_report import main

    config = replace(engine_config(settings), max_sequences=num_slots)
    return main(config, num_jobs=num_jobs, seed=seed, repeats=repeats, picture=picture)


def calibrate(settings: Settings, *, output: Path | None, repeats: int) -> int:
    """What steps cost on this machine; returns the exit code.

    Args:
        output: where the file goes; None is where engines of these settings look for it by themselves.

    Raises:
        ConfigError: there is no such folder.
    """
    limit_spinning()
    from engine.bench.batching_report import say
    from engine.bench.calibrate_report import main

    config = engine_config(settings)
    path = output or calibration_file(settings.home, config.model_name, config.device, config.dtype)
    try:
        if output is None:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"cannot make the folder '{path.parent}': {e.strerror}") from e
    if not path.parent.is_dir():
        raise ConfigError(f"no folder '{path.parent}' to write '{path.name}' to")
    code = main(config, path=path, repeats=repeats)
    if settings.engine.cost_model not in (None, path.absolute()):
        say(f"engines of these settings use another file: engine.cost_model is '{settings.engine.cost_model}'")
    return code
