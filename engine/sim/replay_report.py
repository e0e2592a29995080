"""What a replay has shown, as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from engine.sim import figures
from engine.sim.gaps import largest_gap
from engine.sim.replay import Replayed
from engine.sim.text_table import NONE, ms, table
from engine.sim.trace import Run

_MOST_TEAMS = 40
"""Those with the most requests are listed."""


def replay_report(replayed: Replayed) -> str:
    """First the verdict, then the recorded run's figures by team."""
    header, run = replayed.header, replayed.run
    about = (
        f"{run.workload.name}: {header.model}, policy {header.policy}, {header.max_sequences} slots, steps of "
        f"{header.max_step_tokens} tokens, {header.num_blocks} blocks"
    )
    lines = [about]
    if replayed.difference:
        lines.append(f"different: {replayed.difference}")
    else:
        lines.append(f"{replayed.num_steps} steps: identical")
    lines += replayed.notes
    if run.requests:
        lines += ["", *table([_TEAM_HEAD, *_teams(run)]), "", *table([_RUN_HEAD, _whole(run)])]
    return "\n".join(lines) + "\n"


_TEAM_HEAD = (
    "team",
    "requests",
    "TTFT ms p50",
    "p99",
    "inter-token ms p50",
    "p99",
    "served s",
    "share",
    "entitled",
)
_RUN_HEAD = ("steps", "step ms p50", "p99", "gap ms", "cache hits", "longest held s", "lasted s")


def _teams(run: Run) -> Iterator[list[str]]:
    shares = figures.shares(run)
    served_us = sum(share.served_us for share in shares.values())
    entitled_us = sum(share.entitled_us for share in shares.values())
    num_requests = dict.fromkeys(run.workload.teams(), 0)
    for trace in run.requests.values():
        num_requests[trace.arrival.team] += 1
    for team in sorted(num_requests, key=lambda team: -num_requests[team])[:_MOST_TEAMS]:
        latency, share = figures.latency(run, team), shares[team]
        yield [
            team,
            str(num_requests[team]),
            ms(latency.ttft_p50_us),
            ms(latency.ttft_p99_us),
            ms(latency.inter_token_p50_us),
            ms(latency.inter_token_p99_us),
            f"{share.served_us / 1e6:.2f}",
            f"{share.served_us / served_us:.1%}" if served_us else NONE,
            f"{share.entitled_us / entitled_us:.1%}" if entitled_us else NONE,
        ]


def _whole(run: Run) -> list[str]:
    return [
        str(len(run.steps)),
        ms(figures.step_us(run, 50)),
        ms(figures.step_us(run, 99)),
        ms(largest_gap(run).gap_us),
        f"{figures.hit_rate(run):.1%}",
        f"{figures.longest_held_us(run) / 1e6:.1f}",
        f"{run.ended_us / 1e6:.1f}",
    ]
