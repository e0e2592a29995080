"""The policies by the names they have in the configuration (`config.POLICIES`)."""

from __future__ import annotations

from functools import partial

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.kv_cache import KVCache
from engine.request import Request
from engine.sched.calibration import load_cost_model
from engine.sched.cost import PROFILES, CostModel
from engine.sched.fair.policy import FairShare
from engine.sched.fcfs import Fcfs
from engine.sched.policy import Policy
from engine.sched.static import StaticBatches


def cost_model(config: EngineConfig) -> CostModel:
    """What steps cost on the machine of this configuration.

    Raises:
        ConfigError: its file cannot be read, is no calibration, or is another engine's.
    """
    if config.cost_model is None:
        return PROFILES["cpu" if config.device == "cpu" else "gpu8b"]
    return load_cost_model(config.cost_model, model=config.model_name, device=config.device, dtype=config.dtype)


def make_policy(config: EngineConfig, kv: KVCache, cost: CostModel | None = None) -> Policy:
    """
    Args:
        kv: asked only how much of a waiting request is computed already.
        cost: what steps cost; None takes what the configuration says.

    Raises:
        ConfigError: as `cost_model`, whether or not the policy asks what steps cost.
    """
    cost = cost or cost_model(config)
    match config.policy:
        case "fcfs":
            return Fcfs()
        case "static":
            return StaticBatches(config.max_sequences)
        case "fair":
            return FairShare(cost, config.max_sequences, num_cached_tokens=partial(_num_cached_tokens, kv))
        case unknown:
            raise ConfigError(f"no policy '{unknown}'")


def _num_cached_tokens(kv: KVCache, request: Request) -> int:
    kv.lookup(request.token_ids, request.cache_salt, request.prefix)
    return len(request.prefix) * kv.block_tokens
