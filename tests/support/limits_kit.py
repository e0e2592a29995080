"""An `Ask` with as little said as a test needs."""

from __future__ import annotations

from typing import Any

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.admission import Ask
from gateway.domain.limits.meters import Meter, Use

ORGANIZATION = OrganizationId("org_a")
LEASE_MS = 15_000


def ask(*meters: Meter | Use, request: str = "r1", **changes: Any) -> Ask:
    """10 tokens in, 0 to 20 out, 5 expected."""
    figures: dict[str, Any] = {
        "organization_id": ORGANIZATION,
        "request_id": RequestId(request),
        "owner": "gateway-1",
        "lease_ms": LEASE_MS,
        "prompt_tokens": 10,
        "min_output": 0,
        "expected_output": 5,
        "max_output": 20,
        "uses": tuple(meter if isinstance(meter, Use) else Use(meter) for meter in meters),
    }
    return Ask(**figures | changes)
