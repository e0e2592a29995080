"""What isolation is measured by: the figures of a run, and what each should be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

TTFT_GOAL = 2.5
"""A quiet team's p99 beside a flood, as a multiple of what it is alone."""
LONG_GOAL = 3.0
"""A long prompt's median beside a flood, likewise; 2.0 is what equal weights leave."""
GAP_GOAL = 3.0
"""A stream's p99 between tokens beside long prompts, likewise, or `GAP_GOAL_S` if that is more."""
GAP_GOAL_S = 0.060
LOSS_GOAL = 0.05
"""Part of its output that a flood may lose beyond the engine time that the quiet team was charged."""
SHARE_GOAL = 0.05
"""How far from its share by weight a team may be, as a part of that share."""


Bound = Literal["at most", "at least", "near"]


@dataclass(frozen=True, slots=True)
class Line:
    """A figure for people and programs.

    Attributes:
        name: for programs; its unit is the last part.
        value, goal: None where there is none.
        bound: what the goal is; near is within `SHARE_GOAL` of it.
    """

    name: str
    what: str
    value: float | None
    goal: float | None = None
    bound: Bound = "at most"

    @property
    def verdict(self) -> Literal["ok", "over", "under"] | None:
        """None if there is no goal, or no figure."""
        if self.value is None or self.goal is None:
            return None
        slack = SHARE_GOAL * self.goal if self.bound == "near" else 0.0
        if self.bound != "at least" and self.value > self.goal + slack:
            return "over"
        return "under" if self.bound != "at most" and self.value < self.goal - slack else "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """One run, times in seconds.

    Attributes:
        ttft_alone_s, ttft_beside_s: the quiet team's, without and beside the flood.
        pace_beside_s: between tokens of its answers beside the flood; these are steps of the engine.
        long_alone_s, long_beside_s: time to the first token of its long prompts, likewise.
        gaps_alone_s, gaps_beside_s: between tokens of its stream, alone and beside long prompts of the other team.
        flood_alone_per_s, flood_beside_per_s: output tokens of the flood, without and beside the quiet team.
        charged: engine time that the quiet team was charged beside the flood, as a part of the time that passed; None
            if the server does not tell.
        quiet_failures, flood_failures: why answers did not come, of either team.
    """

    ttft_alone_s: Sequence[float]
    ttft_beside_s: Sequence[float]
    pace_beside_s: Sequence[float]
    long_alone_s: Sequence[float]
    long_beside_s: Sequence[float]
    gaps_alone_s: Sequence[float]
    gaps_beside_s: Sequence[float]
    flood_alone_per_s: float
    flood_beside_per_s: float
    charged: float | None
    quiet_failures: Sequence[str]
    flood_failures: Sequence[str]

    @property
    def failures(self) -> Sequence[str]:
        return [*self.quiet_failures, *self.flood_failures]

    def lines(self) -> Iterator[Line]:
        """In the order of the phases."""
        alone, beside = self.ttft_alone_s, self.ttft_beside_s
        yield Line("quiet_alone_num", "quiet team alone: requests", len(alone))
        yield _ms("quiet_alone_ttft_p50_ms", "  TTFT p50 (ms)", percentile(alone, 0.5))
        yield _ms("quiet_alone_ttft_p99_ms", "  TTFT p99 (ms)", percentile(alone, 0.99))
        yield Line("quiet_beside_num", "beside the flood: requests", len(beside))
        yield _ms("quiet_beside_ttft_p50_ms", "  TTFT p50 (ms)", percentile(beside, 0.5))
        goal_s = _times(TTFT_GOAL, percentile(alone, 0.99))
        yield _ms("quiet_beside_ttft_p99_ms", "  TTFT p99 (ms)", percentile(beside, 0.99), goal_s)
        yield _ms("quiet_beside_gap_p50_ms", "  inter-token p50 (ms)", percentile(self.pace_beside_s, 0.5))
        yield _ms("quiet_beside_gap_p99_ms", "  inter-token p99 (ms)", percentile(self.pace_beside_s, 0.99))
        yield Line("quiet_failed_num", "  refused or failed", len(self.quiet_failures), 0)
        long_s = percentile(self.long_alone_s, 0.5)
        yield _ms("long_alone_ttft_ms", "long prompt alone: TTFT, median (ms)", long_s)
        yield _ms(
            "long_beside_ttft_ms",
            "  beside the flood (ms)",
            percentile(self.long_beside_s, 0.5),
            _times(LONG_GOAL, long_s),
        )
        yield from self._gap_lines()
        yield from self._flood_lines()

    def _gap_lines(self) -> Iterator[Line]:
        alone, beside = self.gaps_alone_s, self.gaps_beside_s
        yield _ms("stream_alone_gap_p50_ms", "stream alone: inter-token p50 (ms)", percentile(alone, 0.5))
        yield _ms("stream_alone_gap_p99_ms", "  p99 (ms)", percentile(alone, 0.99))
        yield _ms("stream_alone_gap_max_ms", "  longest (ms)", max(alone, default=None))
        yield _ms("stream_beside_gap_p50_ms", "beside long prompts: inter-token p50 (ms)", percentile(beside, 0.5))
        tripled_s = _times(GAP_GOAL, percentile(alone, 0.99))
        goal_s = None if tripled_s is None else max(tripled_s, GAP_GOAL_S)
        yield _ms("stream_beside_gap_p99_ms", "  p99 (ms)", percentile(beside, 0.99), goal_s)
        yield _ms("stream_beside_gap_max_ms", "  longest (ms)", max(beside, default=None))

    def _flood_lines(self) -> Iterator[Line]:
        yield Line("flood_alone_per_s", "flood alone: output tokens/s", self.flood_alone_per_s)
        yield Line("flood_beside_per_s", "  beside the quiet team", self.flood_beside_per_s)
        charged = None if self.charged is None else 100 * self.charged
        yield Line("quiet_charged_percent", "  quiet team's charge (% of the time)", charged)
        kept = 100 * self.flood_beside_per_s / self.flood_alone_per_s if self.flood_alone_per_s else None
        goal = None if charged is None else 100 - charged - 100 * LOSS_GOAL
        yield Line("flood_kept_percent", "  output kept (%)", kept, goal, "at least")
        yield Line("flood_failed_num", "  refused or failed", len(self.flood_failures), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Two teams that both flood. The first one of each pair is the team that the quiet key belongs to.

    Attributes:
        weights: which the two have.
        output_per_s: output tokens.
        engine_s: engine time that they were charged; None if the server does not tell.
        failures: why answers did not come, of both.
    """

    weights: tuple[int, int]
    output_per_s: tuple[float, float]
    engine_s: tuple[float, float] | None
    failures: Sequence[str]

    def lines(self) -> Iterator[Line]:
        """By engine time if that is known, since it is what weights share out; else output has to do."""
        for place in (0, 1):
            entitled = 100 * self.weights[place] / sum(self.weights)
            yield Line(
                f"team{place}_entitled_percent", f"team of weight {self.weights[place]}: share due (%)", entitled
            )
            output = _percent(self.output_per_s, place)
            goal = entitled if self.engine_s is None else None
            yield Line(f"team{place}_output_percent", "  of the output (%)", output, goal, "near")
            if self.engine_s is not None:
                engine = _percent(self.engine_s, place)
                yield Line(f"team{place}_engine_percent", "  of the engine's time (%)", engine, entitled, "near")
            yield Line(f"team{place}_output_per_s", "  output tokens/s", self.output_per_s[place])
        yield Line("failed_num", "refused or failed", len(self.failures), 0)


def percentile(values: Sequence[float], rank: float) -> float | None:
    """The smallest value that at least this part of all does not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(rank * len(values)) - 1)]


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _percent(values: tuple[float, float], place: int) -> float | None:
    return 100 * values[place] / sum(values) if sum(values) else None


def _ms(name: str, what: str, value_s: float | None, goal_s: float | None = None) -> Line:
    return Line(name, what, _times(1000, value_s), _times(1000, goal_s))
