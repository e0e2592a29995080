"""Small workloads and machines for tests of the simulator."""

from __future__ import annotations

from typing import Any

from engine.messages import PathNode
from engine.sched.cost import CostModel
from engine.sim.simulator import Machine
from engine.sim.trace import Charge, RequestTrace, Run, StepTrace
from engine.sim.workload import FIRST_SHARED_ID, Arrival, Segment, Workload

COST = CostModel(
    fixed_us=1000, prefill_token_ns=100_000, prefill_context_ps=0, decode_token_ns=200_000, decode_context_ps=0
)
"""1 ms a step, 0.1 ms a prompt token, 0.2 ms an output token, wherever they are."""


def path(team: str, weight: int = 1, org: str = "org", org_weight: int = 1) -> tuple[PathNode, ...]:
    return (PathNode(org, org_weight), PathNode(team, weight), PathNode(f"{team}/key"), PathNode(f"{team}/key/s"))


def arrival(
    arrival_id: int, team: str, num_prompt: int, num_output: int, at_us: int = 0, weight: int = 1, **more: Any
) -> Arrival:
    """With a prompt of its own unless it is given one."""
    prompt = more.pop("prompt", (Segment(FIRST_SHARED_ID + arrival_id, num_prompt),))
    where = more.pop("path", path(team, weight))
    return Arrival(id=arrival_id, at_us=at_us, path=where, prompt=prompt, num_output_tokens=num_output, **more)


def workload(*arrivals: Arrival, **more: Any) -> Workload:
    values: dict[str, Any] = {"name": "test", "about": "for a test", "seed": 0, "until_us": 10_000_000, **more}
    return Workload(arrivals=arrivals, **values)


def machine(**more: Any) -> Machine:
    return Machine(cost=COST, kv_tokens=more.pop("kv_tokens", 1 << 16), **more)


def step(start_us: int, end_us: int, *charges: tuple[int, int], backlog: tuple[int, ...] = ()) -> StepTrace:
    """Charges are (arrival id, useful microseconds)."""
    return StepTrace(start_us, end_us, tuple(Charge(i, 1, cost_us, cost_us) for i, cost_us in charges), backlog)


def trace(made: Arrival, token_us: tuple[int, ...] = (), *, ended: bool = True, **more: Any) -> RequestTrace:
    """Ended with its last token."""
    ended_us = more.pop("ended_us", token_us[-1] if ended and token_us else None)
    return RequestTrace(
        made, made.at_us, made.at_us, list(token_us), ended_us, "length" if ended_us is not None else None, **more
    )


def run_of(made: Workload, traces: list[RequestTrace], steps: list[StepTrace], ended_us: int) -> Run:
    return Run(
        workload=made,
        policy="by hand",
        cost=COST,
        requests={trace.arrival.id: trace for trace in traces},
        steps=steps,
        ended_us=ended_us,
        plans_digest="",
    )
