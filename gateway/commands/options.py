"""Options that several commands have, and the forms their values come in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from gateway.errors import EvenhandError, InvalidRequest
from gateway.limit_notation import parse_usd
from gateway.web.query import time_ms

Config = Annotated[
    Path | None, typer.Option("--config", help="Settings file; else EVENHAND_CONFIG, ./evenhand.toml or the home's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Weight = Annotated[int, typer.Option(help="Share among its siblings, 1 to 1000000.")]
Organization = Annotated[str, typer.Option("--org", help="Name of the organization.")]
Team = Annotated[str, typer.Option("--team", help="Name of the team.")]
OfModel = Annotated[
    str | None, typer.Option("--model", help="Only what this model answers; unset is all models together.")
]
Networks = Annotated[
    list[str] | None,
    typer.Option("--network", help="Where it may be used from, such as 10.0.0.0/8; can be repeated."),
]

_OPTIONS = {
    "models": "--model",
    "endpoints": "--endpoint",
    "max_queue_depth": "--max-queue-depth",
    "deadline_ms": "--deadline-ms",
    "expires_at": "--expires-in",
    "system_default": "--system",
    "networks": "--network",
    "rule.rate": "AMOUNT",
    "rule.amount": "AMOUNT",
    "rule.burst": "--burst",
    "rule.max_debt": "--max-debt",
    "rule.prompt_percent": "--prompt-percent",
    "rule.cached_percent": "--cached-percent",
    "rule.output_percent": "--output-percent",
    "rule.alerts": "--alert",
    "amount": "AMOUNT",
    "reason": "--reason",
    "period_id": "--period",
    "prompt": "--prompt",
    "cached": "--cached",
    "completion": "--completion",
    "valid_from": "--from",
}
"""What the admin API calls otherwise."""

_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def in_options(error: EvenhandError) -> str:
    """The error's message, with the name of the option that is at fault in place of the admin API's field."""
    field = error.param or ""
    option = _OPTIONS.get(field.partition("[")[0])
    return error.message if option is None else error.message.replace(f"'{field}'", option)


def duration_ms(text: str) -> int:
    """Such as 90s, 30m, 12h, 30d or 2w, in milliseconds."""
    found = re.fullmatch("([0-9]{1,9})([smhdw])", text)
    if found is None:
        raise typer.BadParameter("not a time such as 90s, 30m, 12h, 30d or 2w")
    return int(found[1]) * _UNIT_MS[found[2]]


def usd(text: str) -> int:
    """Decimal text in micro-USD."""
    try:
        return parse_usd(text)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e


def moment_ms(text: str) -> int:
    """ISO 8601, since the epoch."""
    try:
        return time_ms(text, "valid_from")
    except InvalidRequest as e:
        raise typer.BadParameter(in_options(e)) from e


ExpiresIn = Annotated[
    int | None,
    typer.Option("--expires-in", parser=duration_ms, metavar="TIME", help="Such as 12h or 30d; unset is never."),
]
