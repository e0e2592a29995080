"""GET /health and /ready, for operators and load balancers; no key."""

from litestar import Response, get
from litestar.di import NamedDependency

from gateway.services.ports import Readiness


@get("/health", operation_id="health")
async def health() -> dict[str, str]:
    """200 as long as the process answers at all."""
    return {"status": "ok"}


@get("/ready", operation_id="ready")
async def ready(readiness: NamedDependency[Readiness]) -> Response[dict[str, str]]:
    """200 if requests can be served right now, with a reason if not as usual; else 503 with the reason."""
    if readiness.is_ready:
        return Response({"status": "degraded", "reason": readiness.reason} if readiness.reason else {"status": "ready"})
    return Response(
        {"status": "unavailable", "reason": readiness.reason}, status_code=503, headers={"retry-after": "1"}
    )
