"""Every policy that can be simulated, by its name: the engine's own, and those it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.config import POLICIES, EngineConfig
from engine.errors import ConfigError
from engine.sched.cost import CostModel
from engine.sched.policy import Policy
from engine.sched.registry import make_policy
from engine.sim.baselines import LongestPrefix, StrictPriority, TokenBuckets, VirtualTokenCounter
from engine.sim.timed_steps import TimedSteps
from engine.sim.workload import Workload

_BASELINES = ("fcfs", "priority", "vtc", "prefix", "bucket")
"""Those that know nothing of promises: here their steps are made as large as promises allow."""


def policy_names() -> tuple[str, ...]:
    """The policies worth a column in a table; the engine's own first."""
    return (*(name for name in POLICIES if name not in {*_BASELINES, "static"}), *_BASELINES)


def make_simulated_policy(
    name: str, config: EngineConfig, cost: CostModel, workload: Workload, clock: Callable[[], int]
) -> Policy:
    """Raises `ConfigError` for a name that is unknown."""
    if name not in _BASELINES:
        if name not in POLICIES:
            raise ConfigError(f"no policy '{name}'; there are {', '.join(policy_names())}")
        return make_policy(replace(config, policy=name))
    return TimedSteps(_make_baseline(name, config, cost, workload, clock), cost)


def _make_baseline(
    name: str, config: EngineConfig, cost: CostModel, workload: Workload, clock: Callable[[], int]
) -> Policy:
    match name:
        case "priority":
            return StrictPriority()
        case "vtc":
            return VirtualTokenCounter(cost)
        case "prefix":
            return LongestPrefix(config.block_tokens)
        case "bucket":
            weights = {node[-1]: weight for node, weight in workload.weights().items() if len(node) == 2}
            return TokenBuckets(cost, clock, weights)
        case _:
            return make_policy(replace(config, policy=name))
