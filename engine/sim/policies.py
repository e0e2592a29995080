"""Every policy that can be simulated, by its name: the engine's own, and those it is compared with."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import POLICIES, EngineConfig
from engine.errors import ConfigError
from engine.sched.cost import CostModel
from engine.sched.fcfs import Fcfs
from engine.sched.policy import Policy
from engine.sim.baselines import LongestPrefix, StrictPriority, TokenBuckets, VirtualTokenCounter
from engine.sim.timed_steps import TimedSteps
from engine.sim.workload import TEAM_DEPTH, Workload

_BASELINES = ("fcfs", "priority", "vtc", "prefix", "bucket")
"""Those that know nothing of promises: here their steps are made as large as promises allow."""


def policy_names() -> tuple[str, ...]:
    """The policies worth a column in a table; the engine's own first."""
    return (*(name for name in POLICIES if name not in {*_BASELINES, "static"}), *_BASELINES)


def check_policy(name: str) -> None:
    """Raises `ConfigError` for a name that is unknown."""
    if name not in policy_names():
        raise ConfigError(f"no policy '{name}'; there are {', '.join(policy_names())}")


def make_baseline(
    name: str, config: EngineConfig, cost: CostModel, workload: Workload, clock: Callable[[], int]
) -> Policy | None:
    """None for a policy of the engine's own, which `EngineCore` makes from its configuration."""
    policy: Policy
    match name:
        case "fcfs":
            policy = Fcfs()
        case "priority":
            policy = StrictPriority()
        case "vtc":
            policy = VirtualTokenCounter(cost)
        case "prefix":
            policy = LongestPrefix(config.block_tokens)
        case "bucket":
            weights = {node[-1]: weight for node, weight in workload.weights().items() if len(node) == TEAM_DEPTH}
            policy = TokenBuckets(cost, clock, weights)
        case _:
            return None
    return TimedSteps(policy, cost)
