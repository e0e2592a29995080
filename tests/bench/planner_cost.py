"""What a step costs in Python: schedule, apply and emit, with a runner that computes nothing.

    python tests/bench/planner_cost.py [--running 32 256] [--steps 2000] [--policy fair] [--teams 1000] [--class batch]

Prints the median and the 99th percentile in microseconds per step, for steps in which every request decodes, and with
a long queue of requests waiting behind them. Requests are dealt to the teams in turn. Thousands of rows do not fit into
the step that the interactive promise allows: they start slowly, and decode in turns; in class batch all decode at once.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import get_args

from engine.config import POLICIES, EngineConfig
from engine.core import EngineCore
from engine.messages import PathNode, RequestClass, Submit
from engine.sampling_params import SamplingParams
from engine.sched.plan import StepPlan, StepResult

PROMPT_TOKENS = 200


@dataclass(frozen=True)
class Done:
    """A step whose rows have all sampled token 1."""

    plan: StepPlan

    def wait(self) -> StepResult:
        rows = tuple(chunk.row for chunk in self.plan.chunks if chunk.samples)
        return StepResult(
            step_id=self.plan.step_id, rows=rows, token_ids=(1,) * len(rows), logprobs=(None,) * len(rows)
        )


class NoRunner:
    vocab_size = 50_000
    num_blocks = 100_000

    def submit(self, plan: StepPlan) -> Done:
        return Done(plan)

    def close(self) -> None:
        """Holds nothing."""


def measure(
    num_running: int,
    num_waiting: int,
    num_steps: int,
    *,
    plan_ahead: bool,
    policy: str,
    num_teams: int,
    request_class: RequestClass,
) -> list[float]:
    """Microseconds of each of num_steps steps in which all running requests decode."""
    core = EngineCore(
        EngineConfig(
            model=Path("none"),
            device="cuda",  # for its cost model; nothing runs there
            policy=policy,
            max_sequences=num_running,
            max_step_tokens=8192,
            plan_ahead=plan_ahead,
        ),
        NoRunner(),
        max_model_len=100_000,
        eos_token_ids=(0,),
        clock=lambda: time.monotonic_ns() // 1000,
    )
    for i in range(num_running + num_waiting):
        core.submit(
            Submit(
                engine_id="engine-0",
                request_id=f"r{i}",
                token_ids=[i + 1, *range(1, PROMPT_TOKENS)],
                sampling=SamplingParams(temperature=0.0),
                path=(PathNode("org"), PathNode(f"team{i % num_teams}"), PathNode(f"key{i % num_teams}")),
                request_class=request_class,
                output_cap=90_000,
            )
        )
    while core.stats().num_decode_tokens < num_running or core.stats().num_running < num_running:
        core.step()
    costs = []
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        core.step()
        costs.append((time.perf_counter_ns() - start) / 1000)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--policy", default="fcfs", choices=POLICIES)
    parser.add_argument("--teams", type=int, default=1)
    parser.add_argument("--class", dest="request_class", default="interactive", choices=get_args(RequestClass))
    arguments = parser.parse_args()
    print(f"{'running':>8} {'waiting':>8} {'ahead':>6} {'median µs':>10} {'p99 µs':>8}")
    for num_running in arguments.running:
        for num_waiting in (0, 4000):
            for plan_ahead in (False, True):
                costs = measure(
                    num_running,
                    num_waiting,
                    arguments.steps,
                    plan_ahead=plan_ahead,
                    policy=arguments.policy,
                    num_teams=arguments.teams,
                    request_class=arguments.request_class,
                )
                p99 = quantiles(costs, n=100)[-1]
                print(f"{num_running:8} {num_waiting:8} {plan_ahead!s:>6} {median(costs):10.0f} {p99:8.0f}")


if __name__ == "__main__":
    main()
