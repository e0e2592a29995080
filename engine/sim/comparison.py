"""One workload under several policies: every figure of the table, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.sim import figures
from engine.sim.figures import Latency, Share
from engine.sim.fluid import TooLargeError, largest_lag
from engine.sim.gaps import Gap, largest_gap
from engine.sim.simulator import Machine, simulate
from engine.sim.trace import Run
from engine.sim.workload import Workload

REFERENCE = "fcfs"
"""The policy whose throughput is 100 %."""
_WINDOW_STEPS = 4
_LAG_STEPS = 16
_STEPS_PER_QUANTUM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One policy's figures on one workload.

    Attributes:
        bound_us: what the gap must not pass; None if the policy promises nothing.
        lag_us: the most that a node was behind the exact ideal; None for workloads too large for exact numbers.
        jain: of served over entitled, over the teams that were entitled to something.
        worst_share: the largest relative error of what a greedy team was served; None without such teams.
        throughput: of what `REFERENCE` does with the same steps.
        latency, alone: by watched team.
    """

    run: Run
    gap: Gap
    bound_us: int | None
    lag_us: int | None
    shares: dict[str, Share]
    jain: float
    worst_share: float | None
    throughput: float
    hit_rate: float
    longest_held_us: int
    num_refused: int
    latency: dict[str, Latency]
    alone: dict[str, Latency]


@dataclass(slots=True)
class Comparison:
    """Runs a workload under policies, and what they are compared with.

    The workload runs under `REFERENCE` in any case, and each watched team also runs alone under each policy.
    """

    workload: Workload
    machine: Machine
    results: list[Result] = field(default_factory=list)
    _reference: Run | None = None

    def add(self, policy: str) -> Result:
        if self._reference is None:
            self._reference = simulate(self.workload, REFERENCE, self.machine)
        run = self._reference if policy == REFERENCE else simulate(self.workload, policy, self.machine)
        reference = figures.throughput(self._reference)
        result = _result(
            run,
            throughput=figures.throughput(run) / reference if reference else 1.0,
            alone={
                team: figures.latency(simulate(self.workload.only(team), policy, self.machine), team)
                for team in self.workload.watched
            },
        )
        self.results.append(result)
        return result


def _result(run: Run, *, throughput: float, alone: dict[str, Latency]) -> Result:
    shares = figures.shares(run)
    greedy = [shares[team].ratio for team in run.workload.greedy if team in shares]
    return Result(
        run=run,
        gap=largest_gap(run),
        bound_us=gap_bound_us(run) if run.policy == "fair" else None,
        lag_us=_lag_us(run),
        shares=shares,
        jain=figures.jain_index([share.ratio for share in shares.values() if share.entitled_us]),
        worst_share=max((abs(ratio - 1) for ratio in greedy), default=None),
        throughput=throughput,
        hit_rate=figures.hit_rate(run),
        longest_held_us=figures.longest_held_us(run),
        num_refused=figures.num_refused(run),
        latency={team: figures.latency(run, team) for team in run.workload.watched},
        alone=alone,
    )


def gap_bound_us(run: Run) -> int:
    """Twice the window, the lag that a slot may cost, a quantum and one output token, and that lag once more, with the
    largest step of the run for the step's target."""
    target_us = figures.step_us(run, 100)
    arrivals = [trace.arrival for trace in run.requests.values()]
    last = max((arrival.num_prompt_tokens + arrival.num_output_tokens for arrival in arrivals), default=1)
    decode_us = run.cost.marginal_us(last - 1, last, 0)
    distance_us = (_WINDOW_STEPS + _LAG_STEPS) * target_us + -(-target_us // _STEPS_PER_QUANTUM) + decode_us
    return 2 * distance_us + _LAG_STEPS * target_us


def compare(workload: Workload, policies: Sequence[str], machine: Machine) -> Comparison:
    """Raises `ConfigError` for a policy that is unknown."""
    comparison = Comparison(workload, machine)
    for policy in policies:
        comparison.add(policy)
    return comparison


def _lag_us(run: Run) -> int | None:
    try:
        return largest_lag(run).lag_us
    except TooLargeError:
        return None
