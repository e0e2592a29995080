"""What all steps of one policy share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Request
from engine.sched.cost import CostModel
from engine.sched.fair.claims import Claims
from engine.sched.fair.parameters import FairParameters
from engine.sched.fair.promises import Credit, Drift, Promises
from engine.sched.fair.roster import Roster
from engine.sched.fair.slots import Yielders
from engine.sched.fair.tree import Tree
from engine.sched.fair.window import Window


@dataclass(slots=True, kw_only=True)
class Shop:
    """The standing parts of the policy.

    Attributes:
        num_cached_tokens: leading tokens of a waiting request that need not be computed.
        senior: waits for blocks; no newcomer behind it in the order of a step is let in in that step.
    """

    parameters: FairParameters
    cost: CostModel
    max_sequences: int
    tree: Tree
    claims: Claims
    roster: Roster
    promises: Promises
    drift: Drift
    credit: Credit
    make_window: Callable[[int, int], Window]
    yielders: Yielders
    num_cached_tokens: Callable[[Request], int]
    senior: Request | None = None

    def target_us(self, now_us: int) -> int:
        """T: what a step is to take at most, as the cost model counts."""
        return self.drift.in_model_us(self.promises.target_us(now_us))
