"""Figures as a table for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from gateway.bench.figures import Bound, Line

_NONE = "-"
_SIGNS: dict[Bound, str] = {"at most": "<= ", "at least": ">= ", "near": "near "}


def table(title: str, lines: Iterable[Line]) -> str:
    """A line for each figure: what it is, what it should be, and whether it is."""
    rows = [("", "measured", "goal", ""), *_rows(lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    texts = [
        f"  {what:<{widths[0]}}  {value:>{widths[1]}}  {goal:>{widths[2]}}  {verdict}".rstrip()
        for what, value, goal, verdict in rows
    ]
    return "\n".join([title, *texts]) + "\n"


def as_json(parameters: dict[str, object], lines: Iterable[Line]) -> str:
    """One line: the parameters, and by the figures' names their values, their goals and verdicts."""
    kept = list(lines)
    answer = {
        **parameters,
        "figures": {line.name: None if line.value is None else round(line.value, 3) for line in kept},
        "goals": {line.name: round(line.goal, 3) for line in kept if line.goal is not None},
        "verdicts": {line.name: line.verdict for line in kept if line.verdict is not None},
    }
    return msgspec.json.encode(answer).decode() + "\n"


def _rows(lines: Iterable[Line]) -> Iterator[tuple[str, str, str, str]]:
    for line in lines:
        goal = "" if line.goal is None else _SIGNS[line.bound] + _figure(line.goal)
        yield line.what, _figure(line.value), goal, line.verdict or ""


def _figure(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.1f}"
