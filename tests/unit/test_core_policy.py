"""What a policy is told: who asks, in which class, and every change of weight or charge."""

from __future__ import annotations

from core_harness import CoreHarness

from engine.messages import PathNode
from engine.request import Request
from engine.sched.fcfs import Fcfs


class Recording(Fcfs):
    """First come, first served, with a diary."""

    def __init__(self) -> None:
        super().__init__()
        self.admitted: list[Request] = []
        self.told: list[tuple[str, str, int]] = []

    def admit(self, request: Request) -> None:
        self.admitted.append(request)
        super().admit(request)

    def set_weight(self, node_id: str, weight: int) -> None:
        self.told.append(("set_weight", node_id, weight))

    def charge_external(self, node_id: str, cost_us: int) -> None:
        self.told.append(("charge_external", node_id, cost_us))


def test_a_policy_sees_a_requests_path_and_class() -> None:
    policy = Recording()
    harness = CoreHarness(policy=policy)
    path = (PathNode("org", 2), PathNode("team", 3), PathNode("key", 1))

    harness.submit([1, 2, 3], path=path, request_class="batch")
    harness.drain()

    [request] = policy.admitted
    assert request.path == path
    assert request.request_class == "batch"


def test_weights_and_charges_reach_the_policy() -> None:
    policy = Recording()
    harness = CoreHarness(policy=policy)

    harness.core.set_weight("team", 5)
    harness.core.charge_external("team", 700)

    assert policy.told == [("set_weight", "team", 5), ("charge_external", "team", 700)]


def test_a_weight_that_nothing_could_be_divided_by_changes_nothing() -> None:
    policy = Recording()
    harness = CoreHarness(policy=policy)

    for weight in (0, -3):
        harness.core.set_weight("team", weight)

    assert policy.told == []
