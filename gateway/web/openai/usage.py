"""GET /v1/usage: what the team of the key has used."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar import Controller, Request, get
from litestar.di import NamedDependency

from gateway.domain.ledger import UsageTotals
from gateway.domain.principal import Principal
from gateway.services.usage import UsageReport, UsageReports
from gateway.web.query import decode_query, time_ms


class UsageQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is asked for; `from` and `until` are times as `time_ms` reads them."""

    begin: str | None = msgspec.field(name="from", default=None)
    until: str | None = None
    model: str | None = None
    key_id: str | None = None


class UsageController(Controller):
    """Usage by hour, key and model."""

    path = "/usage"
    tags = ("Usage",)

    @get(operation_id="retrieveUsage")
    async def retrieve(self, request: Request[Any, Any, Any], usage: NamedDependency[UsageReports]) -> dict[str, Any]:
        """Of the last day, or between ``from`` and ``until``; ``model`` and ``key_id`` choose a part of it."""
        principal: Principal = request.scope["auth"]
        query = decode_query(request.scope["query_string"], UsageQuery)
        report = await usage.of_team(
            principal.team_id,
            from_ms=None if query.begin is None else time_ms(query.begin, "from"),
            until_ms=None if query.until is None else time_ms(query.until, "until"),
            model=query.model,
            key_id=query.key_id,
        )
        return _to_wire(principal.team_id, report)


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
        "cost_microusd": totals.cost_microusd,
    }


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
