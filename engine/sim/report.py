"""The table of a comparison, as plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.sim import figures
from engine.sim.comparison import Comparison, Result
from engine.sim.figures import Latency
from engine.sim.text_table import NONE, ms, table

_MOST_TEAMS = 8
"""Shares are listed for so many teams at most."""

_COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("policy", lambda r: r.run.policy),
    ("gap ms", lambda r: ms(r.gap.gap_us)),
    ("bound ms", lambda r: ms(r.bound_us)),
    ("lag ms", lambda r: ms(r.lag_us)),
    ("Jain", lambda r: f"{r.jain:.3f}"),
    ("worst share", lambda r: NONE if r.worst_share is None else f"{r.worst_share:.1%}"),
    ("throughput", lambda r: f"{r.throughput:.1%}"),
    ("cache hits", lambda r: f"{r.hit_rate:.1%}"),
    ("held s", lambda r: f"{r.longest_held_us / 1e6:.1f}"),
    ("refused", lambda r: str(r.num_refused)),
    ("step ms p50", lambda r: ms(figures.step_us(r.run, 50))),
    ("p99", lambda r: ms(figures.step_us(r.run, 99))),
)


def report(comparison: Comparison) -> str:
    """All figures of one workload: a table of policies, then each watched team's latency, then shares."""
    workload = comparison.workload
    lines = [f"{workload.name}: {workload.about} (seed {workload.seed}, {workload.max_sequences} slots)"]
    lines += table([[name for name, _ in _COLUMNS], *([show(r) for _, show in _COLUMNS] for r in comparison.results)])
    lines += _latencies(comparison.results)
    lines += _shares(comparison.results)
    lines += _classes(comparison.results)
    return "\n".join(lines) + "\n"


def _latencies(results: Sequence[Result]) -> list[str]:
    teams = list(results[0].latency) if results else []
    if not teams:
        return []
    head = ["policy", "team", "TTFT ms p50", "alone", "p99", "alone", "inter-token ms p50", "alone", "p99", "alone"]
    rows = [
        [result.run.policy, team, *_beside(result.latency[team], result.alone[team])]
        for team in teams
        for result in results
    ]
    return ["", *table([head, *rows], num_left=2)]


def _beside(together: Latency, alone: Latency) -> list[str]:
    pairs = (
        (together.ttft_p50_us, alone.ttft_p50_us),
        (together.ttft_p99_us, alone.ttft_p99_us),
        (together.inter_token_p50_us, alone.inter_token_p50_us),
        (together.inter_token_p99_us, alone.inter_token_p99_us),
    )
    return [ms(value) for pair in pairs for value in pair]


def _shares(results: Sequence[Result]) -> list[str]:
    teams = list(dict.fromkeys(team for result in results for team in result.shares))
    if len(teams) < 2 or len(teams) > _MOST_TEAMS:
        return []
    rows = [[result.run.policy, *(_served(result, team) for team in teams)] for result in results]
    return ["", *table([["served / entitled", *teams], *rows])]


def _served(result: Result, team: str) -> str:
    total_us = sum(share.served_us for share in result.shares.values())
    if team not in result.shares or not total_us:
        return NONE
    share = result.shares[team]
    return f"{share.served_us / total_us:.1%} / {share.entitled_us / total_us:.1%}"


def _classes(results: Sequence[Result]) -> list[str]:
    served = [figures.served_by_class(result.run) for result in results]
    classes = sorted({name for one in served for name in one})
    if len(classes) < 2:
        return []
    rows = [
        [result.run.policy, *(f"{one.get(name, 0) / max(1, sum(one.values())):.1%}" for name in classes)]
        for result, one in zip(results, served, strict=True)
    ]
    return ["", *table([["served by class", *classes], *rows])]
