"""What the policies that we compare with do to people: the figures that a fair order has to beat.

Each is the proof that the workload it stands for can tell a fair order from another one.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec import structs

from engine.sched.cost import PROFILES
from engine.sim import figures
from engine.sim.fluid import largest_lag
from engine.sim.simulator import Machine, simulate
from engine.sim.trace import Run
from engine.sim.workloads import make_workload

pytestmark = pytest.mark.slow
CPU = PROFILES["cpu"]


def _run(workload: str, policy: str, most_s: int = 100) -> Run:
    made = make_workload(workload, 1, CPU)
    return simulate(structs.replace(made, until_us=min(made.until_us, most_s * 1_000_000)), policy, Machine(cost=CPU))


def _p99_over_alone(workload: str, policy: str, team: str) -> float:
    run = _run(workload, policy)
    together = figures.latency(run, team).ttft_p99_us
    alone = figures.latency(simulate(run.workload.only(team), policy, Machine(cost=CPU)), team).ttft_p99_us
    assert together is not None
    assert alone is not None
    return together / alone


def _ratios(workload: str, policy: str) -> list[float]:
    """Served over entitled, by team."""
    return [share.ratio for share in figures.shares(_run(workload, policy)).values()]


def test_fcfs_lets_a_flood_starve_a_quiet_team() -> None:
    assert _p99_over_alone("flood", "fcfs", "quiet") > 100


def test_vtc_makes_a_quiet_team_wait_for_a_slot_though_not_for_long() -> None:
    assert 3 < _p99_over_alone("flood", "vtc", "quiet") < 20


def test_fcfs_serves_by_demand_and_not_by_weight() -> None:
    ratios = _ratios("shares", "fcfs")

    assert figures.jain_index(ratios) < 0.9
    assert max(ratios) > 1.5


def test_vtc_serves_like_work_by_weight() -> None:
    ratios = _ratios("shares", "vtc")

    assert figures.jain_index(ratios) > 0.999
    assert ratios == [pytest.approx(1, abs=0.02)] * 3


def test_vtc_knows_no_organizations() -> None:
    assert max(_ratios("nested", "vtc")) > 1.15


def test_fcfs_gives_more_to_who_asks_more_often() -> None:
    assert figures.jain_index(_ratios("equal", "fcfs")) < 0.9


def test_splitting_a_team_over_keys_or_sessions_pays_with_fcfs() -> None:
    shares = figures.shares(_run("split", "fcfs"))

    assert shares["keys"].ratio > 1.1
    assert shares["sessions"].ratio > 1.1


def test_a_bucket_wastes_what_others_leave() -> None:
    assert figures.throughput(_run("limited", "bucket")) < 0.9 * figures.throughput(_run("limited", "fcfs"))


def test_strict_priority_starves_the_lowest_class() -> None:
    assert figures.served_by_class(_run("classes", "priority"))["batch"] == 0


def test_longest_prefix_finds_most_of_what_agents_repeat_in_the_cache() -> None:
    assert figures.hit_rate(_run("agents", "prefix", 200)) > 0.85


def test_a_long_prompt_before_streams_leaves_fcfs_far_behind_the_ideal() -> None:
    assert largest_lag(_run("three-long", "fcfs", 12)).lag_us > 500_000


@pytest.mark.parametrize("policy", ["prefix", "vtc"])
def test_plans_do_not_depend_on_the_process(policy: str) -> None:
    """Hashes of strings differ from process to process; an order taken from a set would, too."""
    program = (
        "from engine.sched.cost import PROFILES; from engine.sim.simulator import Machine, simulate;"
        "from engine.sim.workloads import make_workload;"
        f"print(simulate(make_workload('three-long', 1, PROFILES['cpu']), '{policy}', "
        "Machine(cost=PROFILES['cpu'])).plans_digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(digests) == 1
