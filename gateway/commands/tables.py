"""Lists on stdout: for people in columns, for scripts separated by tabs or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import typer

from gateway.services.admin_pages import MAX_PAGE, Page, PageRequest

T = TypeVar("T")

Row = Mapping[str, Any]


async def everything(fetch: Callable[[PageRequest], Awaitable[Page[T]]]) -> list[T]:
    """All pages of a list."""
    items: list[T] = []
    after: str | None = ""
    while after is not None:
        page = await fetch(PageRequest(MAX_PAGE, after))
        items.extend(page.data)
        after = page.next
    return items


def show(rows: Sequence[Row], columns: Sequence[str], *, as_json: bool) -> None:
    """Print rows: as JSON with all they have, else these columns with a header."""
    if as_json:
        for row in rows:
            typer.echo(msgspec.json.encode(row).decode())
        return
    lines = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    if not sys.stdout.isatty():
        for line in lines:
            typer.echo("\t".join(line))
        return
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _text(value: Any) -> str:
    """Values have no tabs or line ends: the rules for names do not let them in."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
