"""GET /v1/usage: what the team of the key has used."""

from datetime import UTC, datetime
from typing import Any

from litestar import Controller, Request, get
from litestar.di import NamedDependency

from gateway.domain.ledger import UsageTotals
from gateway.domain.principal import Principal
from gateway.errors import InvalidRequest
from gateway.services.usage import UsageReport, UsageReports

MAX_TIME_MS = 253_402_300_800_000
"""The end of the year 9999."""


class UsageController(Controller):
    """Usage by hour, key and model."""

    path = "/usage"
    tags = ("Usage",)

    @get(operation_id="retrieveUsage")
    async def retrieve(self, request: Request[Any, Any, Any], usage: NamedDependency[UsageReports]) -> dict[str, Any]:
        """Of the last day, or between ``from`` and ``until``; ``model`` and ``key_id`` choose a part of it."""
        principal: Principal = request.scope["auth"]
        query = request.query_params
        report = await usage.of_team(
            principal.team_id,
            from_ms=_time_ms("from", query.get("from")),
            until_ms=_time_ms("until", query.get("until")),
            model=query.get("model"),
            key_id=query.get("key_id"),
        )
        return _to_wire(principal.team_id, report)


def _time_ms(name: str, text: str | None) -> int | None:
    """Seconds since the epoch, or ISO 8601, which means UTC if it names no zone."""
    if not text:
        return None
    try:
        if text.isascii() and text.isdigit():
            time_ms = int(text[:20]) * 1000
        else:
            # A plus sign in an address means a blank, and many clients leave it so.
            time = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
            time_ms = int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError) as e:
        raise _unreadable(name) from e
    if not 0 <= time_ms < MAX_TIME_MS:
        raise _unreadable(name)
    return time_ms


def _unreadable(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{name}': it must be a time in ISO 8601, as in 2030-01-31T12:00:00Z, or seconds since 1970.",
        param=name,
    )


def _to_wire(team_id: str, report: UsageReport) -> dict[str, Any]:
    return {
        "object": "usage",
        "team_id": team_id,
        "from": _iso(report.from_ms),
        "until": _iso(report.until_ms),
        "totals": _totals(report.totals),
        "data": [
            {"hour": _iso(hour.hour_ms), "key_id": hour.key_id, "model": hour.model, **_totals(hour.totals)}
            for hour in report.hours
        ],
    }


def _totals(totals: UsageTotals) -> dict[str, int]:
    return {
        "requests": totals.num_requests,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "completion_tokens": totals.completion_tokens,
        "engine_us": totals.engine_us,
    }


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
