"""A simulation that is recorded as an engine is has the same figures when it is replayed, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path

import pytest
from msgspec import structs

from engine.config import EngineConfig
from engine.recording.recorder import RecordingCore
from engine.runner.port import Runner
from engine.sched.cost import CostModel
from engine.sched.policy import Policy
from engine.sim import figures
from engine.sim.gaps import largest_gap
from engine.sim.replay import replay
from engine.sim.simulator import Machine, simulate
from engine.sim.step_books import NOBODY
from engine.sim.trace import Run
from engine.sim.workloads import make_workload


@pytest.mark.parametrize("plan_ahead", [False, True], ids=["in-time", "ahead"])
def test_a_replayed_simulation_has_the_simulations_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_ahead: bool
) -> None:
    path = tmp_path / "run"
    machine = changed(Machine.of_profile("gpu8b"), plan_ahead=plan_ahead, kv_tokens=1 << 13)

    def record(
        config: EngineConfig,
        runner: Runner,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], int],
        policy: Policy | None,
        cost: CostModel,
    ) -> RecordingCore:
        assert policy is None
        return RecordingCore(
            config,
            runner,
            path=path,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            clock=clock,
            cost=cost,
        )

    monkeypatch.setattr("engine.sim.simulator.EngineCore", record)
    workload = structs.replace(make_workload("on-off", 1, machine.cost), until_us=7_000_000)
    simulated = simulate(workload, "fair", machine)
    replayed = replay(path)

    assert replayed.difference == ""
    assert replayed.run.plans_digest == simulated.plans_digest
    assert len(simulated.steps) > 50
    assert figures.longest_held_us(simulated) > 0
    assert any(trace.finish == "abort" and trace.token_us for trace in simulated.requests.values())
    assert books(replayed.run) == books(simulated)
    assert fates(replayed.run) == fates(simulated)
    assert largest_gap(replayed.run).gap_us == largest_gap(simulated).gap_us
    assert figures.hit_rate(replayed.run) == figures.hit_rate(simulated)


def books(run: Run) -> list[tuple[int, int, list[tuple[int, int, int, int]], list[int]]]:
    """Every step, by its time since the first arrival and the places of arrivals in their order."""
    places = {arrival_id: place for place, arrival_id in enumerate(run.requests)}
    began_us = began(run)
    return [
        (
            step.start_us - began_us,
            step.end_us - began_us,
            [(places.get(c.id, NOBODY), c.num_tokens, c.cost_us, c.useful_us) for c in step.charges],
            sorted(places[arrival_id] for arrival_id in step.backlog),
        )
        for step in run.steps
    ]


def fates(run: Run) -> list[tuple[object, ...]]:
    """What became of each arrival."""
    began_us = began(run)
    return [
        (
            trace.arrival.path,
            trace.arrival.request_class,
            trace.arrival.num_prompt_tokens,
            trace.submitted_us - began_us,
            [at_us - began_us for at_us in trace.token_us],
            trace.ended_us and trace.ended_us - began_us,
            trace.finish,
            trace.num_cached_tokens,
            trace.held_us,
        )
        for trace in run.requests.values()
    ]


def began(run: Run) -> int:
    return next(iter(run.requests.values())).submitted_us
