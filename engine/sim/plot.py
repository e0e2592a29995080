"""A picture of a comparison: who was served when, and who waited how long, one column for each policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ConfigError
from engine.sim.comparison import Comparison
from engine.sim.trace import Run

_NUM_BINS = 60
_MOST_TEAMS = 8
_REST = "all others"
_COLORS = ("#2f6f8f", "#c98a2b", "#6a8f3f", "#a84a5c", "#6b5b95", "#4f9d96", "#b5651d", "#8c8c8c", "#cfcfcf")


def draw(comparison: Comparison, path: Path) -> None:
    """Served share over time above, time to the first token below, on the same axes for all policies.

    Raises `ConfigError` if the picture cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = [result.run for result in comparison.results]
    teams = _teams(runs)
    columns = len(runs)
    figure, axes = plt.subplots(
        2, columns, figsize=(4 * columns, 6), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, run in enumerate(runs):
        served, waited = axes[0][column], axes[1][column]
        times, layers = served_by_team(run, teams)
        served.stackplot(times, list(layers.values()), labels=list(layers), colors=_COLORS)
        served.set_title(run.policy)
        for team, color in zip(layers, _COLORS, strict=False):
            points = [
                (trace.arrived_us / 1e6, trace.ttft_us / 1000)
                for trace in run.requests.values()
                if trace.ttft_us is not None and _shown(trace.arrival.team, teams) == team
            ]
            if points:
                waited.scatter(*zip(*points, strict=True), s=6, color=color, linewidths=0)
        waited.set_xlabel("seconds")
    axes[0][0].set_ylabel("part of the engine's time")
    axes[1][0].set_ylabel("ms to the first token")
    axes[1][0].set_yscale("log")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=_MOST_TEAMS + 1)
    figure.suptitle(f"{comparison.workload.name}: {comparison.workload.about}")
    try:
        figure.savefig(path, dpi=110)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror or e}") from e
    finally:
        plt.close(figure)


def make_folder(path: Path) -> None:
    """Raises `ConfigError` if there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{path} is no folder, and cannot be made one: {e.strerror or e}") from e


def served_by_team(run: Run, teams: Sequence[str]) -> tuple[list[float], dict[str, list[float]]]:
    """The middle of each span of time in seconds, and the part of it in which each team's work was computed."""
    span_us = max(1, -(-run.ended_us // _NUM_BINS))
    by_id = {arrival_id: _shown(trace.arrival.team, teams) for arrival_id, trace in run.requests.items()}
    names = [*teams, *([_REST] if _REST in by_id.values() else [])]
    layers: dict[str, list[float]] = {name: [0.0] * _NUM_BINS for name in names}
    for step in run.steps:
        place = min(_NUM_BINS - 1, step.start_us // span_us)
        for charge in step.charges:
            if charge.id in by_id:
                layers[by_id[charge.id]][place] += charge.useful_us / span_us
    return [(place + 0.5) * span_us / 1e6 for place in range(_NUM_BINS)], layers


def _teams(runs: Sequence[Run]) -> list[str]:
    """The teams that are shown by name: those with the most requests."""
    arrived = {arrival_id: trace.arrival.team for run in runs for arrival_id, trace in run.requests.items()}
    return sorted(team for team, _ in Counter(arrived.values()).most_common(_MOST_TEAMS))


def _shown(team: str, teams: Sequence[str]) -> str:
    return team if team in teams else _REST
