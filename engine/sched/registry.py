"""The policies by the names they have in the configuration (`config.POLICIES`)."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.sched.fcfs import Fcfs
from engine.sched.policy import Policy
from engine.sched.static import StaticBatches


def make_policy(config: EngineConfig) -> Policy:
    match config.policy:
        case "fcfs":
            return Fcfs()
        case "static":
            return StaticBatches(config.max_sequences)
        case unknown:
            raise ConfigError(f"no policy '{unknown}'")
