"""GET /v1/requests/{id}: where a request stands, or what became of it."""

from typing import Any

from litestar import Controller, Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.domain.ledger import LedgerRow, Opening
from gateway.domain.principal import Principal
from gateway.domain.standing import LiveRequest
from gateway.domain.usage import EngineTimings
from gateway.services.lookup import RequestLookup
from gateway.web.admin.times import to_iso


class RequestsController(Controller):
    """Requests by id, of the key's own team."""

    path = "/requests"
    tags = ("Requests",)

    @get("/{request_id:str}", operation_id="retrieveRequest")
    async def retrieve(
        self, request: Request[Any, Any, Any], lookup: NamedDependency[RequestLookup], request_id: FromPath[str]
    ) -> dict[str, Any]:
        """While it waits or runs, and afterwards."""
        principal: Principal = request.scope["auth"]
        found = await lookup.find(request_id, principal.team_id)
        if isinstance(found, LiveRequest):
            return _live(found)
        return _ended(found) if isinstance(found, LedgerRow) else _settling(found)


def _head(request_id: str, status: str, request_class: str) -> dict[str, Any]:
    return {"id": request_id, "object": "request", "status": status, "class": request_class}


def _live(live: LiveRequest) -> dict[str, Any]:
    wait_us = live.expected_wait_us
    return _head(live.request_id, live.status, live.request_class) | {
        "waiting_for": live.waiting_for,
        "ahead": live.ahead,
        "ahead_of_team": live.ahead_of_team,
        "expected_wait_ms": None if wait_us is None else -(-wait_us // 1000),
        "timings": _parts(live.timings) | {"total_us": live.timings.passed_us},
    }


def _settling(opening: Opening) -> dict[str, Any]:
    return _head(opening.request_id, "settling", opening.request_class) | _origin(opening)


def _ended(row: LedgerRow) -> dict[str, Any]:
    in_engine_us = row.timings.passed_us
    gateway_us = None if row.total_us is None else max(row.total_us - in_engine_us, 0)
    return (
        _head(row.request_id, "ended", row.request_class)
        | _origin(row)
        | {
            "closed_at": to_iso(row.closed_at_ms),
            "outcome": row.outcome,
            "finish_reason": row.finish_reason or None,
            "error_code": row.error_code,
            "usage": {
                "prompt_tokens": row.prompt_tokens,
                "cached_tokens": row.cached_tokens,
                "completion_tokens": row.completion_tokens,
                "engine_us": row.engine_us,
                "cost_microusd": row.cost_microusd,
            },
            "timings": _parts(row.timings)
            | {"gateway_us": gateway_us, "total_us": in_engine_us + (gateway_us or 0), "ttft_us": row.ttft_us},
        }
    )


def _origin(known: Opening | LedgerRow) -> dict[str, Any]:
    return {
        "model": known.requested_model,
        "endpoint": known.endpoint,
        "stream": known.stream,
        "key_id": known.key_id,
        "opened_at": to_iso(known.opened_at_ms),
    }


def _parts(timings: EngineTimings) -> dict[str, Any]:
    return {
        "queue_us": timings.queue_us,
        "prefill_us": timings.prefill_us,
        "decode_us": timings.decode_us,
        "preempted_us": timings.preempted_us,
        "parked_us": timings.parked_us,
    }
