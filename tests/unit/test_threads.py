"""The thread governor, on clocks that a test turns."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.runner.threads import ThreadGovernor


@dataclass
class Machine:
    """A machine with some cores; a step of one second's work on as many threads as it is allowed."""

    num_cores: int
    num_taken: int = 0
    num_threads: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    changes: list[int] = field(default_factory=list)

    def set_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.changes.append(num_threads)

    def run(self, governor: ThreadGovernor, num_steps: int, length_s: float = 0.02) -> None:
        for _ in range(num_steps):
            with governor.step():
                self.wall_s += length_s
                self.cpu_s += length_s * min(self.num_threads, self.num_cores - self.num_taken)


def _governed(num_cores: int) -> tuple[Machine, ThreadGovernor]:
    machine = Machine(num_cores, num_threads=num_cores)
    governor = ThreadGovernor(
        num_cores, machine.set_threads, wall_s=lambda: machine.wall_s, cpu_s=lambda: machine.cpu_s
    )
    return machine, governor


def test_a_quiet_machine_keeps_all_threads() -> None:
    machine, governor = _governed(2)

    machine.run(governor, 1000)

    assert machine.changes == []


def test_a_taken_core_costs_one_thread_within_two_steps() -> None:
    machine, governor = _governed(4)
    machine.num_taken = 1

    machine.run(governor, 2)

    assert machine.num_threads == 3


def test_several_taken_cores_cost_as_many_threads_and_never_the_last() -> None:
    machine, governor = _governed(4)
    machine.num_taken = 3

    machine.run(governor, 20)

    assert machine.num_threads == 1


def test_threads_come_back_when_the_neighbor_has_gone() -> None:
    machine, governor = _governed(2)
    machine.num_taken = 1
    machine.run(governor, 10)
    machine.num_taken = 0

    machine.run(governor, 100)

    assert machine.num_threads == 2
    assert machine.changes == [1, 2]


def test_a_neighbor_that_stays_is_tried_ever_more_rarely() -> None:
    machine, governor = _governed(2)
    machine.num_taken = 1

    machine.run(governor, 50 * 120)

    tries = machine.changes.count(2)
    assert 4 <= tries <= 8, "within two minutes, after 1, 2, 4, 8, ... seconds"


def test_one_slow_step_or_a_very_short_one_changes_nothing() -> None:
    machine, governor = _governed(2)

    for _ in range(50):
        machine.num_taken = 1
        machine.run(governor, 1)
        machine.run(governor, 5, length_s=0.001)
        machine.num_taken = 0
        machine.run(governor, 1)

    assert machine.changes == []
