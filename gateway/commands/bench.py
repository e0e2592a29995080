"""``evenhand bench``: measurements of the engine, from the same settings as a server's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.openmp import limit_spinning
from gateway.commands.engine import engine_config
from gateway.settings import Settings


def batching(settings: Settings, *, num_jobs: int, num_slots: int, seed: int, repeats: int, picture: Path) -> int:
    """Static against continuous batching; returns the exit code."""
    limit_spinning()
    from engine.bench.batching_report import main

    config = replace(engine_config(settings), max_sequences=num_slots)
    return main(config, num_jobs=num_jobs, seed=seed, repeats=repeats, picture=picture)
