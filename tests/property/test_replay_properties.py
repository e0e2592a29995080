"""Whatever an engine goes through, its recording replays: each plan comes out again, byte for byte."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import run_of_anything

from engine.sim.replay import replay

seeds = st.integers(0, 1 << 32)


@pytest.mark.parametrize("plan_ahead", [False, True], ids=["in-time", "ahead"])
@pytest.mark.parametrize("policy", ["fair", "fcfs", "static"])
@settings(max_examples=examples(25), deadline=None)
@given(seed=seeds)
def test_a_recorded_run_replays(policy: str, plan_ahead: bool, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        harness = run_of_anything(path, seed, policy=policy, plan_ahead=plan_ahead)
        replayed = replay(path)

    assert replayed.difference == ""
    assert replayed.notes == ()
    assert replayed.num_steps == len(harness.runner.plans)
    told = [output for answer in harness.answers.values() for output in answer.outputs]
    assert sum(len(trace.token_us) for trace in replayed.run.requests.values()) == sum(len(o.token_ids) for o in told)


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, data=st.data())
def test_a_recording_cut_anywhere_replays_up_to_there(seed: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run_of_anything(path, seed, policy="fair", plan_ahead=data.draw(st.booleans()), num_events=40)
        whole = path.read_bytes()
        cut = data.draw(st.integers(whole.index(b"\n") + 1, len(whole)))
        path.write_bytes(whole[:cut])
        replayed = replay(path)

    assert replayed.difference == ""
    assert replayed.num_steps == whole[:cut].count(b'\n{"type":"planned"') - (
        whole[:cut].rsplit(b"\n", 1)[1].startswith(b'{"type":"planned"')
    )
    is_torn = not whole[:cut].endswith(b"\n")
    assert any("not whole" in note for note in replayed.notes) == is_torn


def test_these_runs_hold_every_kind_of_event() -> None:
    kinds: set[str] = set()
    num_preemptions = num_parkings = num_held = num_aborted_in_flight = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(6):
            path = Path(folder) / f"run-{seed}"
            harness = run_of_anything(path, seed, policy="fair", plan_ahead=True)
            stats = harness.core.stats()
            num_preemptions += stats.num_preemptions
            num_parkings += stats.num_parkings
            num_aborted_in_flight += stats.unshared_us > 0
            num_held += sum(o.held_at_cap for answer in harness.answers.values() for o in answer.outputs)
            for line in path.read_bytes().splitlines()[1:]:
                fields = msgspec.json.decode(line)
                kinds |= {fields["type"], fields.get("message", {}).get("type", "")}
            kinds |= {answer.finish for answer in harness.answers.values() if answer.finish is not None}

    assert kinds >= {"planned", "stepped", "submit", "abort", "raise_cap", "set_weight", "charge_external"}
    assert kinds >= {"stop", "length", "abort", "deadline"}
    assert min(num_preemptions, num_parkings, num_held, num_aborted_in_flight) > 0
