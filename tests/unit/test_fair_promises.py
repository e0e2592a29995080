"""Step sizes and the bound where they are under pressure: a machine that is slower than its model, newcomers in every
step, decodes that do not fit."""

from __future__ import annotations

from fair_harness import FairHarness
from fair_measures import Gaps

from engine.sched.cost import CostModel
from engine.sched.fair.parameters import FairParameters
from engine.sched.fair.promises import Drift


def drift_after(elapsed_permille: int, num_steps: int, *, cost_us: int = 45_000) -> Drift:
    drift = Drift(FairParameters())
    for _ in range(num_steps):
        drift.sealed(cost_us, 47_500)
        drift.measured(cost_us * elapsed_permille // 1000)
    return drift


def test_steps_become_smaller_on_a_machine_slower_than_its_model_and_larger_again() -> None:
    slow = drift_after(2000, 60)

    assert 23_000 <= slow.in_model_us(47_500) <= 26_000
    for _ in range(300):
        slow.sealed(45_000, 47_500)
        slow.measured(45_000)
    assert 45_000 <= slow.in_model_us(47_500) <= 47_500


def test_steps_that_are_not_full_say_nothing_of_the_model() -> None:
    assert drift_after(5000, 60, cost_us=10_000).permille == 1000


def test_a_machine_in_trouble_shrinks_a_step_to_a_quarter_at_most() -> None:
    assert drift_after(50_000, 200).in_model_us(47_500) >= 47_500 // 4


def test_nobody_gets_ahead_of_decodes_that_sit_out_for_newcomers() -> None:
    """A long prompt and twelve streams of an equal team; with every step one more team sends a short request."""
    harness, gaps = FairHarness(max_sequences=16), Gaps()
    harness.submit("o/a/k", 100_000, 1)
    for i in range(250):
        if i < 12:
            harness.submit("o/b/k", 5, 100_000)
        harness.submit(f"o/new{i}/k", 20, 1)
        harness.step()
        gaps.look(harness)
        assert not gaps.breaches


def test_decodes_that_are_due_stay_within_the_step() -> None:
    """Sixty streams of a team whose turn has come, beside a long prompt: what does not fit goes with the next step."""
    cost = CostModel(
        fixed_us=5_000, prefill_token_ns=330_000, prefill_context_ps=0, decode_token_ns=1_000_000, decode_context_ps=0
    )
    harness = FairHarness(max_sequences=64, cost=cost)
    for _ in range(60):
        harness.submit("o/flood/k", 5, 400)
    harness.run(20)
    harness.submit("o/long/k", 60_000, 1)
    harness.submit("o/quiet/k", 5, 400)
    for _ in range(150):
        harness.step()
        harness.submit(f"o/new{len(harness.steps)}/k", 20, 1)
        assert harness.step_us[-1] <= 1.05 * harness.targets_us[-1]
