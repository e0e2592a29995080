"""Writes down every plan that a runner is given: one JSON line each, as `engine.sched.plan.StepPlan`.

A plan holds the token ids of new prompts, so the file is for its owner's eyes (mode 0600) and exists only when asked
for.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.runner.port import PendingStep, Runner
from engine.sched.plan import StepPlan

_encoder = msgspec.json.Encoder()


class RecordingRunner:
    """A `Runner` in front of another. Lines reach the file before their step is computed, so a crash loses none."""

    def __init__(self, runner: Runner, path: Path) -> None:
        """Raises `ConfigError` if the file cannot be written. An earlier recording there is replaced."""
        self._runner = runner
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as e:
            raise ConfigError(f"engine.record: cannot write '{path}': {e.strerror}") from e
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    def submit(self, plan: StepPlan) -> PendingStep:
        self._file.write(_encoder.encode(plan) + b"\n")
        return self._runner.submit(plan)

    def close(self) -> None:
        self._file.close()
        self._runner.close()
