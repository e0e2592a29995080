"""GET /v1/limits: what the key's limits are, and what is left of them."""

from datetime import UTC, datetime
from typing import Any

from litestar import Controller, Request, get
from litestar.di import NamedDependency

from gateway.domain.limits.meters import Bucket, Quota
from gateway.domain.limits.policy import QuotaRule, TokenRate
from gateway.domain.principal import Principal
from gateway.services.limit_reports import LimitReports, LimitStanding


class LimitsController(Controller):
    """Limits of the key, its team and its organization."""

    path = "/limits"
    tags = ("Limits",)

    @get(operation_id="retrieveLimits")
    async def retrieve(self, request: Request[Any, Any, Any], limits: NamedDependency[LimitReports]) -> dict[str, Any]:
        """Every limit that holds for the key, whatever the model, with what is left right now."""
        principal: Principal = request.scope["auth"]
        return {"object": "limits", "data": [_to_wire(each) for each in await limits.of(principal)]}


def _to_wire(standing: LimitStanding) -> dict[str, Any]:
    limit, rule, meter = standing.limit, standing.limit.rule, standing.meter
    told: dict[str, Any] = {
        "name": limit.name,
        "scope": limit.scope,
        "model": limit.model,
        "is_enforced": not limit.is_shadow,
        "amount": rule.amount,
        "remaining": standing.remaining,
    }
    if isinstance(meter, Bucket):
        told |= {"burst": meter.capacity, "period_ms": meter.period_ms}
    if isinstance(rule, TokenRate):
        told |= {"prompt_percent": rule.prompt_percent, "cached_percent": rule.cached_percent}
        told |= {"output_percent": rule.output_percent}
    if isinstance(rule, QuotaRule) and isinstance(meter, Quota) and standing.period is not None:
        told |= {
            "amount": meter.amount,
            "unit": rule.unit,
            "is_hard": rule.is_hard,
            "period": standing.period.id,
            "period_ends_at": _iso(standing.period.end_ms),
        }
    return told


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
