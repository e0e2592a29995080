"""The port between the core and whatever computes a step. Torch-free, so that tests and the simulator can stand in."""

from __future__ import annotations

from typing import Protocol

from engine.sched.plan import StepPlan, StepResult


class PendingStep(Protocol):
    """A submitted step."""

    def wait(self) -> StepResult:
        """Block until the step is done; called exactly once."""
        ...


class Runner(Protocol):
    """Runs plans in the order they are submitted.

    `submit` may return before the step is computed (CUDA), or leave the whole computation to `wait` (CPU). A plan may
    be submitted while the one before it has not been waited for: the runner feeds a row's sampled token to its next
    chunk itself. Blocks named by a plan are written by that plan's rows only.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def submit(self, plan: StepPlan) -> PendingStep: ...

    def close(self) -> None: ...
