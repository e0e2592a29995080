"""Plain text tables for people."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "-"
"""A figure that there is not."""


def table(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Columns as wide as they must be; the first ones to the left, figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            f"{cell:<{width}}" if i < num_left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def ms(value_us: int | None) -> str:
    if value_us is None:
        return NONE
    return f"{value_us / 1000:.1f}" if value_us < 100_000 else f"{value_us / 1000:.0f}"
