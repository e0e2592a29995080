"""``evenhand sim``: named workloads under the scheduler's policies, on a clock that is only counted; no model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from engine.sim.comparison import compare
from engine.sim.policies import check_policy, policy_names
from engine.sim.replay import replay
from engine.sim.replay_report import replay_report
from engine.sim.report import report
from engine.sim.simulator import Machine
from engine.sim.workloads import make_workload, workload_names


def run(
    workloads: Sequence[str], *, policies: Sequence[str], profile: str, seed: int, plot_folder: Path | None = None
) -> int:
    """Print a table for each workload, the workload's progress to stderr; returns the exit code.

    Raises `ConfigError` for a name that is unknown, before anything runs.

    Args:
        workloads: names; none is all of them.
        policies: names; none is all of them.
        plot_folder: where a picture of each workload goes, if anywhere.
    """
    machine = Machine.of_profile(profile)
    for policy in policies:
        check_policy(policy)
    if plot_folder is not None:
        from engine.sim.plot import draw, make_folder

        make_folder(plot_folder)
    made = [make_workload(name, seed, machine.cost) for name in workloads or workload_names()]
    for i, workload in enumerate(made):
        sys.stderr.write(f"{workload.name}: {i + 1} of {len(made)} ...\n")
        comparison = compare(workload, policies or policy_names(), machine)
        sys.stdout.write(("\n" if i else "") + report(comparison))
        sys.stdout.flush()
        if plot_folder is not None:
            draw(comparison, plot_folder / f"{workload.name}.png")
            sys.stderr.write(f"picture: {plot_folder / workload.name}.png\n")
    return 0


def run_replay(recording: Path) -> int:
    """Print whether the plans come out as recorded, and the recorded run's figures; the exit code: 1 if they do not.

    Raises `ConfigError` if the file cannot be read, or is no recording that can be replayed.
    """
    replayed = replay(recording)
    sys.stdout.write(replay_report(replayed))
    return 1 if replayed.difference else 0
