"""The policies by the names they have in the configuration (`config.POLICIES`)."""

from __future__ import annotations

from functools import partial

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.kv_cache import KVCache
from engine.request import Request
from engine.sched.cost import PROFILES
from engine.sched.fair.policy import FairShare
from engine.sched.fcfs import Fcfs
from engine.sched.policy import Policy
from engine.sched.static import StaticBatches


def make_policy(config: EngineConfig, kv: KVCache) -> Policy:
    """
    Args:
        kv: asked only how much of a waiting request is computed already.
    """
    match config.policy:
        case "fcfs":
            return Fcfs()
        case "static":
            return StaticBatches(config.max_sequences)
        case "fair":
            cost = PROFILES["cpu" if config.device == "cpu" else "gpu8b"]
            return FairShare(cost, config.max_sequences, num_cached_tokens=partial(_num_cached_tokens, kv))
        case unknown:
            raise ConfigError(f"no policy '{unknown}'")


def _num_cached_tokens(kv: KVCache, request: Request) -> int:
    kv.lookup(request.token_ids, request.cache_salt, request.prefix)
    return len(request.prefix) * kv.block_tokens
